"""What the command line says."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

PHASES = ("ref", "apc", "ext", "control", "multi", "race", "decode", "audit")
BLOCK_TOKENS = {"cuda": 576, "cpu": 640}  # the least that vLLM accepts for the hybrid model there

# What engine and server need beside `testing.engine.ENVIRONMENT`; a value that is set already is kept.
ENVIRONMENT: Mapping[str, str] = {
    "GLOO_SOCKET_IFNAME": "lo",
    "HF_HUB_OFFLINE": "1",
    "LMCACHE_DISABLE_BANNER": "1",
    "LMCACHE_TRACK_USAGE": "false",
    "NUMBA_NUM_THREADS": "1",  # before it is imported, as `testing.engine` will set it
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # FlashInfer may be absent, and vLLM does not ask
}


@dataclass(frozen=True)
class Options:
    """Lengths in blocks are in vLLM's blocks of `block_size` tokens."""

    connector: Literal["safe", "stock", "none"]
    extra: dict[str, Any]
    spec: Literal["none", "ngram", "mtp"]
    spec_tokens: int
    save_decode_cache: bool
    chunk_blocks: int
    batched_blocks: float
    device: Literal["cuda", "cpu"]
    block_size: int
    gpu_blocks: int
    kv_gb: float
    attention: str
    gdn_prefill: str
    batch_invariant: bool
    graphs: bool
    autotune: bool
    phases: tuple[str, ...]
    sessions: int
    turns: int
    rounds: int
    first_blocks: float
    turn_blocks: float
    max_tokens: int
    stall: str
    race_stalls: tuple[str, ...]
    race_sessions: int
    race_blocks: int
    race_tokens: int
    decode_blocks: float
    model: Path | None
    l1_gb: float
    server_arg: tuple[str, ...]
    shm_name: str
    log: Path | None
    out: Path | None
    seed: int

    def tokens(self, blocks: float) -> int:
        return int(blocks * self.block_size)

    @property
    def max_model_len(self) -> int:
        conversation = self.tokens(self.first_blocks + 1.5 * self.turns * self.turn_blocks)
        race = self.tokens(self.race_blocks) + self.race_tokens
        decode = self.tokens(1.3 + self.decode_blocks)
        return max(conversation + self.turns * self.max_tokens, race, decode) + 128

    def set_environment(self) -> None:
        """Before torch and vLLM are imported."""
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        os.environ["TORCHDYNAMO_DISABLE"] = "0" if self.graphs else "1"
        if self.batch_invariant:
            os.environ["VLLM_BATCH_INVARIANT"] = "1"


def parse(arguments: Sequence[str] | None = None) -> Options:
    found = _parser().parse_args(arguments)
    if found.device == "auto":
        found.device = "cuda" if Path("/dev/nvidiactl").exists() else "cpu"
    found.block_size = found.block_size or BLOCK_TOKENS[found.device]
    found.batch_invariant &= found.device == "cuda"  # one thread on CPU: there is nothing to vary
    found.phases = tuple(found.phases.split(","))
    found.race_stalls = tuple(found.race_stalls.split(","))
    found.server_arg = tuple(found.server_arg)
    if unknown := set(found.phases) - set(PHASES):
        raise SystemExit(f"no phase {', '.join(sorted(unknown))}; there are {', '.join(PHASES)}")
    return Options(**vars(found))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.probe",
        description="One engine and its server: is what the connector delivers what would have been computed?",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--connector", choices=["safe", "stock", "none"], default="safe")
    add("--extra", type=json.loads, default={}, help="JSON merged into kv_connector_extra_config")
    add("--spec", choices=["none", "ngram", "mtp"], default="none")
    add("--spec-tokens", type=int, default=0, help="draft tokens; 0: ngram 3, mtp 2")
    add("--save-decode-cache", action="store_true")
    add("--chunk-blocks", type=int, default=1, help="chunk, in blocks")
    add("--batched-blocks", type=float, default=1.25, help="max_num_batched_tokens, in blocks")
    add("--device", choices=["auto", "cuda", "cpu"], default="auto")
    add("--block-size", type=int, default=0, help="tokens of a block; 0: 576 on a GPU, 640 on CPU")
    add("--gpu-blocks", type=int, default=64, help="num_gpu_blocks_override; 0 leaves it to vLLM")
    add("--kv-gb", type=float, default=1.0)
    add("--attention", default="", help="an attention backend; empty: vLLM's choice")
    add("--gdn-prefill", default="triton", help="empty: vLLM's choice, which on Hopper is FlashInfer, there or not")
    add("--batch-invariant", action="store_true", help="VLLM_BATCH_INVARIANT=1, forced for the recurrent layers too")
    add("--graphs", action="store_true", help="CUDA graphs and torch.compile instead of eager")
    add("--autotune", action="store_true", help="let Triton kernels tune themselves instead of taking the first choice")
    add("--phases", default="ref,apc,ext,control,audit,multi", help=f"in this order; of {', '.join(PHASES)}")
    add("--sessions", type=int, default=8)
    add("--turns", type=int, default=3)
    add("--rounds", type=int, default=1, help="repeats of the concurrent phases")
    add("--first-blocks", type=float, default=1.5, help="system prompt that all sessions share, in blocks")
    add("--turn-blocks", type=float, default=0.9, help="what a user says in a turn, in blocks (mean)")
    add("--max-tokens", type=int, default=16)
    add("--stall", default="", help="PERIOD:MS: stop the server for MS after each PERIOD ms during `multi`")
    add("--race-stalls", default="0,100:60,150:250", help="the same, one race each; 0: none")
    add("--race-sessions", type=int, default=5)
    add("--race-blocks", type=int, default=8, help="length of a race's prompt, in blocks")
    add("--race-tokens", type=int, default=48, help="output tokens of a race")
    add("--decode-blocks", type=float, default=2.5, help="length of the answers of `decode`, in blocks")
    add("--model", type=Path, help="directory of the model; written if it holds none; default: a temporary one")
    add("--l1-gb", type=float, default=4.0)
    add("--server-arg", action="append", default=[], help="a further argument for the server")
    add("--shm-name", default="", help="name of the server's pool; default: a random one")
    add("--log", type=Path, help="the server's log")
    add("--out", type=Path, help="JSON of everything")
    add("--seed", type=int, default=0)
    return parser
