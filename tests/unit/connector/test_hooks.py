"""vLLM's hooks on the connector itself, with a configuration and a server that are stand-ins."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.sampling_params import SamplingParams
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.request import Request

from lmcache_mp_safe.config import parse_config
from lmcache_mp_safe.connector import LayoutMetadata, LMCacheMPSafeConnector, PlanMetadata, ReportMetadata
from lmcache_mp_safe.contract import JobOutcome, JobReport, RankLayout, StepReport
from lmcache_mp_safe.errors import ConfigError
from lmcache_mp_safe.testing.fake_wire import FakeWire
from lmcache_mp_safe.worker.half import Finished

BLOCK = 16


class Connector(LMCacheMPSafeConnector):
    """The connector over a server in small."""

    def make_wire(self, object_bytes: int, generation: str, first_epoch: Any) -> Any:
        self.server = FakeWire(object_bytes)
        return self.server


def engine_config(role: str) -> Any:
    transfer = SimpleNamespace(
        kv_connector_extra_config={"lmcache.mp.safe.chunk_tokens": BLOCK},
        kv_load_failure_policy="fail",
        kv_role=role,
        is_kv_producer=role != "kv_consumer",
        is_kv_consumer=role != "kv_producer",
    )
    return SimpleNamespace(
        kv_transfer_config=transfer,
        cache_config=SimpleNamespace(
            enable_prefix_caching=True, mamba_cache_mode="none", cache_dtype="auto", kv_cache_layout="NHD"
        ),
        parallel_config=SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1),
        model_config=SimpleNamespace(
            model="m", revision=None, dtype="bfloat16", quantization=None, hf_overrides={}, is_hybrid=False
        ),
        speculative_config=None,
        kv_events_config=None,
    )


def connector(role: str = "kv_both") -> Connector:
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.bfloat16)
    groups = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec, layer_names=["l"])])
    made = Connector(engine_config(role), KVConnectorRole.SCHEDULER, groups)  # type: ignore[arg-type]
    made.bind_gpu_block_pool(BlockPool(64, enable_caching=True, hash_block_size=BLOCK))
    made.set_xfer_handshake_metadata({0: LayoutMetadata(RankLayout(0, (512,), b"l" * 16))})
    return made


def request(request_id: str = "r", **fields: Any) -> Request:
    return Request(request_id, [7] * 40, SamplingParams(max_tokens=4), None, **fields)


@pytest.mark.parametrize("role", ["kv_both", "kv_producer", "kv_consumer"])
def test_a_cache_declares_no_delivery_and_no_divergent_hits_in_any_role(role: str) -> None:
    made = connector(role)
    assert made.requires_kv_delivery is False
    assert made.supports_divergent_local_hybrid_hits is False


def test_divergent_hits_cannot_be_switched_on() -> None:
    made = connector()
    with pytest.raises(AttributeError):
        made.supports_divergent_local_hybrid_hits = True  # type: ignore[misc]
    with pytest.raises(ConfigError, match="unknown key"):
        parse_config({"lmcache.mp.safe.supports_divergent_local_hybrid_hits": True})


def test_load_failures_are_recomputed_without_a_setting() -> None:
    assert connector()._vllm_config.kv_transfer_config.kv_load_failure_policy == "recompute"


def test_hit_is_always_loaded_asynchronously(monkeypatch: pytest.MonkeyPatch) -> None:
    made = connector()
    for answer, expected in ((32, (32, True)), (0, (0, False)), (None, (None, False))):
        monkeypatch.setattr(made.scheduler_half, "matched_tokens", lambda source, local, answer=answer: answer)
        assert made.get_num_new_matched_tokens(request(), 0) == expected


def test_free_of_a_request_is_never_delayed() -> None:
    made = connector()
    never_ran, asked = request("never"), request("asked")
    made.get_num_new_matched_tokens(asked, 0)
    for finished in (never_ran, asked, asked):
        assert made.request_finished(finished, [1, 2]) == (False, None)
        assert made.request_finished_all_groups(finished, ([1], [2])) == (False, None)


def worker(finished: Finished) -> Connector:
    made = connector()
    made._worker = SimpleNamespace(poll=lambda: finished)  # type: ignore[assignment]
    return made


def test_nothing_is_ever_reported_as_sent() -> None:
    for ids in (set[str](), {"r", "s"}):
        made = worker(Finished(received=frozenset({"r"}), failed=frozenset()))  # type: ignore[arg-type]
        assert made.get_finished(ids) == (None, {"r"})


def test_failed_load_is_reported_as_received_too() -> None:
    made = worker(Finished(received=frozenset({"r", "s"}), failed=frozenset({"r"})))  # type: ignore[arg-type]
    results = made.get_transfer_results(set())
    assert (results.finished_sending, results.finished_recving, results.failed_recving) == (set(), {"r", "s"}, {"r"})


def test_failed_loads_are_kept_for_the_gate_once() -> None:
    made = connector()
    asked = request()
    made.update_state_after_alloc(asked, SimpleNamespace(get_block_ids=lambda: ([1, 2],)), 32)  # type: ignore[arg-type]
    scheduled = SimpleNamespace(num_scheduled_tokens={}, preempted_req_ids=None)
    meta = made.build_connector_meta(scheduled)  # type: ignore[arg-type]
    assert isinstance(meta, PlanMetadata)
    (job,) = meta.plan.loads
    report = ReportMetadata(StepReport(jobs=(JobReport(job.job_id, 0, JobOutcome.STALE_EPOCH),)))
    made.update_connector_output(SimpleNamespace(kv_connector_worker_meta=report))  # type: ignore[arg-type]
    assert made.take_failed_loads() == {"r"}
    assert made.take_failed_loads() == set()
