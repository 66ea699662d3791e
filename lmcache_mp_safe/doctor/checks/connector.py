"""The KV connector that the engine's arguments ask for."""

from __future__ import annotations

from collections.abc import Iterator

from lmcache_mp_safe.doctor.facts import Connector, ConnectorKind, Facts
from lmcache_mp_safe.doctor.findings import Finding, ok, problem, warning

OPTION = """--kv-transfer-config '{"kv_connector":"LMCacheMPSafeConnector","kv_role":"kv_both"}'"""
POLICY = '"kv_load_failure_policy":"recompute"'


def check(facts: Facts) -> Iterator[Finding]:
    engine = facts.probe.engine
    if engine is None:
        return
    connector = engine.connector
    if connector.kind is ConnectorKind.NONE:
        yield warning("no-connector", "the arguments ask for no KV connector: nothing is kept on a server", OPTION)
    elif connector.kind is ConnectorKind.OURS:
        yield from _ours(connector)
    elif connector.kind is ConnectorKind.OTHER:
        yield warning(
            "other-connector",
            f"{connector.name} is not looked at: doctor knows this connector and the stock one",
            OPTION,
        )


def _ours(connector: Connector) -> Iterator[Finding]:
    if connector.settings_error:
        yield problem(
            "settings", f"the start will fail: {connector.settings_error}", "change kv_connector_extra_config"
        )
    else:
        yield ok("settings", f"{connector.name}, {connector.role or 'no role'}; its settings are right")
    if connector.in_multi:
        yield warning(
            "multi-connector",
            "it is a child of MultiConnector: its start cannot set how vLLM treats a failed load, and a hit goes to the"
            " first connector that has one",
            f"give {POLICY} at the outer level, beside MultiConnector",
        )
    if connector.load_failure_policy == "recompute":
        yield ok("load-failure-policy", "a failed load is recomputed")
    elif connector.in_multi:
        yield problem(
            "load-failure-policy",
            f"kv_load_failure_policy is {connector.load_failure_policy!r}: an entry that the server lost fails its"
            " request",
            f"give {POLICY} at the outer level, beside MultiConnector",
        )
    else:
        yield ok("load-failure-policy", "a failed load is recomputed: the connector sets the policy at its start")
