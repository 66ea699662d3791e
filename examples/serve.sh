#!/usr/bin/env bash
# An LMCache server and vLLM on one machine: serve.sh MODEL [arguments of vllm serve]
#
# POOL_GB: size of the pool in GiB; /dev/shm must hold it. PORT: of the LMCache server.
set -euo pipefail

: "${1:?usage: serve.sh MODEL [arguments of vllm serve]}"
POOL_GB=${POOL_GB:-64}
PORT=${PORT:-5555}
HTTP_PORT=${HTTP_PORT:-8080}
connector='{"kv_connector":"LMCacheMPSafeConnector","kv_role":"kv_both","kv_connector_extra_config":{"lmcache.mp.port":'$PORT'}}'

# The server needs no GPU.
CUDA_VISIBLE_DEVICES= lmcache server --host 127.0.0.1 --port "$PORT" --http-host 127.0.0.1 --http-port "$HTTP_PORT" \
    --l1-size-gb "$POOL_GB" --eviction-policy LRU \
    --shm-name "lmcache_$PORT" --no-l1-use-lazy --supported-transfer-mode auto &
server=$!
trap 'kill "$server"' EXIT

for _ in $(seq 60); do
    curl --silent --fail --output /dev/null "http://127.0.0.1:$HTTP_PORT/healthcheck" && break
    kill -0 "$server"  # fails where the server has ended
    sleep 1
done

serve=("$@" --enable-prefix-caching --kv-transfer-config "$connector")
lmcache-mp-safe doctor --server-http-url "http://127.0.0.1:$HTTP_PORT" -- "${serve[@]}"
vllm serve "${serve[@]}"
