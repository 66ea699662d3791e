"""`doctor` on real vLLM: the groups it finds without weights are the engine's, and the findings fit the version."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from lmcache_mp_safe.compat.features import probe as host_features
from lmcache_mp_safe.doctor.checks import diagnose
from lmcache_mp_safe.doctor.facts import Facts, Probe
from lmcache_mp_safe.doctor.findings import Level
from lmcache_mp_safe.doctor.gather import Options, gather, look_at_host
from lmcache_mp_safe.testing.engine import Engine, EngineSpec, GroupFacts
from lmcache_mp_safe.testing.engine_worker import EngineProcess
from lmcache_mp_safe.testing.models import ModelKind
from lmcache_mp_safe.testing.server import LMCacheServer

pytestmark = pytest.mark.engine

MakeSpec = Callable[..., EngineSpec]
Models = Callable[[ModelKind], Path]

MTP = ("--speculative-config", json.dumps({"method": "mtp", "num_speculative_tokens": 2}))


def arguments(model: Path, connector: str, port: int = 9, further: Sequence[str] = ()) -> tuple[str, ...]:
    """Of `vllm serve`, for one of the tiny models."""
    extra = {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": port}
    transfer = {"kv_connector": connector, "kv_role": "kv_both", "kv_connector_extra_config": extra}
    hybrid = ("--mamba-cache-mode", "align", "--mamba-ssm-cache-dtype", "float32") if "hybrid" in model.name else ()
    return (
        *(str(model), "--skip-tokenizer-init", "--dtype", "bfloat16", "--enable-prefix-caching"),
        *("--max-model-len", "16384", "--enforce-eager", *hybrid, *further),
        *("--kv-transfer-config", json.dumps(transfer)),
    )


def groups_of(engine: Engine) -> tuple[GroupFacts, ...]:
    return engine.groups


@pytest.mark.parametrize(
    ("kind", "speculation", "further"),
    [
        pytest.param("hybrid", "none", (), marks=pytest.mark.old_vllm),
        ("hybrid", "mtp", MTP),
        pytest.param("window", "none", ("--block-size", "32"), marks=pytest.mark.long),
    ],
)
def test_groups_without_weights_are_those_of_the_engine(
    make_spec: MakeSpec, models: Models, kind: ModelKind, speculation: Any, further: tuple[str, ...]
) -> None:
    spec = dataclasses.replace(make_spec(kind, speculation=speculation), connector=None)
    with EngineProcess(spec) as engine:
        real = engine.run(groups_of)
    found = look_at_host(Options(arguments(models(kind), "LMCacheMPSafeConnector", further=further)))
    assert found.failed_at == "", found.failure
    assert found.model is not None
    assert [(group.spec, group.block_tokens, group.layers) for group in found.model.groups] == [
        (group.spec, group.block_size, len(group.layers)) for group in real
    ]
    assert [group.page_bytes for group in found.model.groups] == [
        group.page_bytes * len(group.layers) for group in real
    ]


@pytest.fixture(scope="module")
def hybrid(models: Models) -> Facts:
    """This connector on the tiny hybrid with speculation, and no server."""
    return gather(Options(arguments(models("hybrid"), "LMCacheMPSafeConnector", further=MTP), step_s=1))


@pytest.mark.old_vllm
def test_tiny_hybrid_is_on_one_page(hybrid: Facts) -> None:
    sections = diagnose(hybrid)
    wrong = {finding.name for findings in sections.values() for finding in findings if finding.level is not Level.OK}
    assert wrong == {"server-absent"}
    text = "\n".join(finding.text for findings in sections.values() for finding in findings)
    assert "recurrent (MambaSpec), 640 tokens a block" in text
    assert "append-only (FullAttentionSpec), 640 tokens a block" in text
    assert "scheduler block 640 tokens, chunk 640 tokens" in text
    assert "speculation mtp, 2 draft tokens" in text
    assert "hits end one block (640 tokens) earlier" in text
    assert "pages are copied by reference" in text
    assert "page-locking the pool: not applicable" in text
    assert "no LMCache server answers at tcp://127.0.0.1:9" in text


@pytest.mark.old_vllm
def test_lookup_path_and_gate_are_those_of_this_vllm(hybrid: Facts) -> None:
    features, host = host_features(), hybrid.probe.host
    assert host is not None
    assert host.lookup_path == features.lookup_path
    if features.asks_capability and features.reports_failed_loads:
        assert host.gate == ()
    else:  # 0.27
        assert host.gate == ("KVCacheManager.get_computed_blocks_for_connector", "Scheduler.update_from_output")
    assert host.gate_error == ""


@pytest.mark.old_vllm
def test_stock_connector_on_the_hybrid_with_speculation_is_recognised(models: Models) -> None:
    """Before a server with the flags of this connector and LMCache's chunk size."""
    with LMCacheServer(l1_size_gb=0.1, start_timeout_s=240) as server:
        given = arguments(models("hybrid"), "LMCacheMPConnector", server.port, MTP)
        facts = gather(Options(given, http_url=server.http_url, step_s=20))
    found = {finding.name for finding in diagnose(facts)["stock connector"] if finding.level is Level.PROBLEM}
    everywhere = {"stock-speculation", "stock-state-race", "stock-cpu-state", "stock-object-groups", "stock-chunk-size"}
    features = host_features()
    old = set() if features.asks_capability else {"stock-divergent-hits"}
    old |= set() if features.reports_failed_loads else {"stock-load-failure-kills"}
    assert found == everywhere | old


def test_arguments_that_vllm_refuses_end_with_status_2(models: Models) -> None:
    command = [sys.executable, "-m", "lmcache_mp_safe.cli.main", "doctor", "--step", "1", "--json", "-", "--"]
    run = subprocess.run(
        [*command, "vllm", "serve", str(models("attention")), "--no-such-flag"],
        capture_output=True,
        text=True,
        timeout=380,
        check=False,
    )
    assert run.returncode == 2, run.stderr
    assert "--no-such-flag" in run.stdout


def test_model_that_is_not_there_is_said_not_to_have_been_found_out() -> None:
    found = look_at_host(Options(("/no/such/model", "--skip-tokenizer-init")))
    assert found.host is not None
    assert found.failed_at == "configuration"
    assert "/no/such/model" in found.failure


def test_look_that_takes_too_long_says_how_far_it_got(models: Models) -> None:
    found = look_at_host(Options(arguments(models("attention"), "LMCacheMPSafeConnector"), deadline_s=0.1))
    assert found == Probe(failed_at="vLLM", failure="not done after 0.1 s")
