"""What is installed."""

from __future__ import annotations

from collections.abc import Iterator

from lmcache_mp_safe.compat.versions import TESTED_LMCACHE, TESTED_VLLM
from lmcache_mp_safe.doctor.facts import Facts
from lmcache_mp_safe.doctor.findings import Finding, ok, problem, warning


def check(facts: Facts) -> Iterator[Finding]:
    software = facts.software
    yield ok("package", f"lmcache_mp_safe {software.package}, Python {software.python}")
    yield _version("vllm", "vLLM", software.vllm, TESTED_VLLM)
    yield _version("lmcache", "LMCache", software.lmcache, TESTED_LMCACHE)
    if not software.torch:
        yield problem("torch-missing", "torch is not installed here", "run doctor in the environment that vLLM runs in")
    elif (host := facts.probe.host) is not None:
        yield ok("torch", f"torch {software.torch}, {f'CUDA {host.cuda}' if host.cuda else 'built without CUDA'}")
    else:
        yield ok("torch", f"torch {software.torch}")


def _version(name: str, title: str, installed: str, tested: tuple[str, ...]) -> Finding:
    if not installed:
        return problem(
            f"{name}-missing", f"{title} is not installed here", "run doctor in the environment that vLLM runs in"
        )
    if installed.partition("+")[0] not in tested:
        return warning(
            f"{name}-untested",
            f"{title} {installed}: this connector is tested with {', '.join(tested)}",
            f"install one of these, or run `lmcache-mp-safe demo` here: it shows whether {title} {installed} works",
        )
    return ok(name, f"{title} {installed}")
