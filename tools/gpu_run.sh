#!/usr/bin/env bash
# Build, test, sanitize and measure on a machine with a GPU, in at most ten minutes.
#
#   tools/gpu_run.sh [-o DIR] [-t SECONDS] [-q] [STEP...]
#
# STEP: build, test, memcheck, racecheck, or a key of `python -m benchmarks --list`; keys in one word (ttft,decode) share
# a process. Without any: build test memcheck racecheck copies run-lengths hooks first-use interference server.
#   -o DIR      where logs and results go (out/gpu)
#   -t SECONDS  for everything (570); a step that does not fit any more is left out
#   -q          benchmarks with few repeats
#
# Needs nvcc, compute-sanitizer, and python3 with torch, pytest and pytest-timeout, and what pyproject.toml lists; for
# server, ttft and decode also vLLM and LMCache. Ends with 1 if a step failed; a missed threshold is not a failure.
set -uo pipefail
cd "$(dirname "$0")/.."

out=out/gpu total=570 quick=()
while getopts "o:t:q" flag; do
    case $flag in
        o) out=$OPTARG ;;
        t) total=$OPTARG ;;
        q) quick=(--quick) ;;
        *) exit 2 ;;
    esac
done
shift $((OPTIND - 1))
[ $# -gt 0 ] || set -- build test memcheck racecheck copies run-lengths hooks first-use interference server
mkdir -p "$out"
: > "$out/summary.txt"

capability=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -1 | tr -d .)
sanitizer=$(PATH=$PATH:/usr/local/cuda/bin command -v compute-sanitizer || echo compute-sanitizer)
export PYTHONUNBUFFERED=1 LMCACHE_MP_SAFE_CUDA=1 LMCACHE_MP_SAFE_CUDA_ARCHS=${LMCACHE_MP_SAFE_CUDA_ARCHS:-$capability}

pytest=(python3 -m pytest -m gpu -p no:cacheprovider -o minversion=0)
# Only this package's own kernels count; torch asks the driver many a thing that it refuses.
sanitize=(env PYTORCH_NO_CUDA_MEMORY_CACHING=1 "$sanitizer" --error-exitcode 1 --report-api-errors no)
status=0

for step in "$@"; do
    case $step in
        build) limit=120 command=(python3 -m pip install --no-deps --no-build-isolation --editable .) ;;
        test) limit=150 command=("${pytest[@]}" tests/gpu) ;;
        memcheck)
            limit=120
            command=("${sanitize[@]}" --tool memcheck "${pytest[@]}" tests/gpu/test_ops_device.py -k "csrc and not loop")
            ;;
        racecheck)
            limit=120
            command=("${sanitize[@]}" --tool racecheck "${pytest[@]}" tests/gpu/test_ops_device.py
                -k "csrc and not loop and (digest or long_rows)")
            ;;
        *)
            limit=150
            [[ $step == *ttft* || $step == *decode* ]] && limit=360
            IFS=, read -ra keys <<< "$step"
            command=(python3 -m benchmarks "${keys[@]}" --out "$out" ${quick[@]+"${quick[@]}"})
            ;;
    esac
    left=$((total - SECONDS)) begin=$SECONDS
    if [ "$left" -lt 15 ]; then
        echo "$step: left out, the time is up" >> "$out/summary.txt"
        status=1
        continue
    fi
    echo "=== $step: ${command[*]}"
    # INT, so that servers and engines are stopped, too.
    timeout --signal=INT --kill-after=15 "$((limit < left ? limit : left))" "${command[@]}" 2>&1 | tee "$out/$step.log"
    case ${PIPESTATUS[0]} in
        0) word=ok ;;
        124 | 137) word="out of time" status=1 ;;
        *) word=failed status=1 ;;
    esac
    echo "$step: $word, $((SECONDS - begin)) s" >> "$out/summary.txt"
done
echo "=== summary"
cat "$out/summary.txt"
exit $status
