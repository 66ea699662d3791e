"""How the installed vLLM treats KV connectors."""

from __future__ import annotations

from collections.abc import Iterator

from lmcache_mp_safe.doctor.facts import Facts, Host
from lmcache_mp_safe.doctor.findings import Finding, ok, problem


def check(facts: Facts) -> Iterator[Finding]:
    host, probe = facts.probe.host, facts.probe
    if host is None:
        if facts.software.vllm:
            yield problem(
                "vllm-broken",
                f"vLLM cannot be looked at: {probe.failure}",
                'find out what `python -c "import vllm.v1.core.sched.scheduler"` says',
            )
        return
    yield _device(host)
    if host.gate_error:
        yield problem(
            "gate-does-not-fit",
            f"this connector will not start on vLLM {host.vllm}: {host.gate_error}",
            "use vLLM 0.26, 0.27 or 0.28 and newer",
        )
        return
    asks = "asks" if host.asks_capability else "does not ask"
    yield ok("capability", f"vLLM {host.vllm} {asks} for supports_divergent_local_hybrid_hits (declared: False)")
    yield ok("lookup-path", host.lookup_path)
    yield ok("gate", f"replaced at the start: {', '.join(host.gate)}" if host.gate else "no gate is needed")
    channel = "vLLM's own channel" if host.reports_failed_loads else "the gate"
    yield ok("failed-loads", f"a failed load is reported through {channel}; its request is computed")


def _device(host: Host) -> Finding:
    if not host.device:
        return problem(
            "no-device",
            "vLLM finds no device that it could run on",
            "run doctor where vLLM runs, with the same access to the GPU",
        )
    return ok("device", f"vLLM runs on {host.device}{f' ({host.device_name})' if host.device_name else ''}")
