"""Everything that cannot be served stops vLLM's start with a message that says what to change."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from lmcache_mp_safe.testing.engine import Engine, EngineSpec
from lmcache_mp_safe.testing.engine_worker import EngineCallError, EngineProcess
from lmcache_mp_safe.testing.server import LMCacheServer

pytestmark = pytest.mark.engine

MakeSpec = Callable[..., EngineSpec]


def failed_start(spec: EngineSpec) -> str:
    """What the engine process says when it does not come up."""
    with pytest.raises(EngineCallError) as error, EngineProcess(spec):
        pass
    return str(error.value)


def with_options(spec: EngineSpec, **options: Any) -> EngineSpec:
    return dataclasses.replace(spec, options={**spec.options, **options})


@pytest.mark.old_vllm
def test_prefix_caching_switched_off(make_spec: MakeSpec) -> None:
    words = failed_start(with_options(make_spec("attention"), enable_prefix_caching=False))
    assert "start vLLM with --enable-prefix-caching" in words


@pytest.mark.old_vllm
def test_recurrent_states_are_cached_at_boundaries_or_refused(make_spec: MakeSpec) -> None:
    """With prefix caching vLLM turns the mode `none` into `align` by itself; without, nothing could be served."""
    words = failed_start(with_options(make_spec(), enable_prefix_caching=False, mamba_cache_mode="none"))
    assert "start vLLM with --enable-prefix-caching" in words
    with EngineProcess(with_options(make_spec(), mamba_cache_mode="none")) as engine:
        assert engine.run(mamba_mode) == "align"


def mamba_mode(engine: Engine) -> str:
    return str(engine.vllm_config.cache_config.mamba_cache_mode)


def test_unknown_setting(make_spec: MakeSpec) -> None:
    words = failed_start(make_spec(extra={"lmcache.mp.safe.integrety": "off"}))
    assert "did you mean lmcache.mp.safe.integrity?" in words


def test_setting_of_the_wrong_type(make_spec: MakeSpec) -> None:
    assert "lmcache.mp.port must be a whole number" in failed_start(make_spec(extra={"lmcache.mp.port": "5555"}))


@pytest.mark.old_vllm
def test_server_that_cannot_be_reached(make_spec: MakeSpec) -> None:
    words = failed_start(make_spec(extra={"lmcache.mp.port": 9, "lmcache.mp.safe.connect_timeout_s": 2}))
    assert "no LMCache server answers at tcp://127.0.0.1:9" in words
    assert "lmcache server --host" in words
    assert "lmcache.mp.safe.require_server" in words


@pytest.mark.parametrize(
    ("shm_name", "flags"),
    [("", ("--no-l1-use-lazy", "--supported-transfer-mode", "auto")), (None, ("--no-l1-use-lazy",))],
    ids=["no shared memory", "no engine-driven transfer"],
)
def test_server_without_the_flags_that_matter(
    make_spec: MakeSpec, shm_name: str | None, flags: tuple[str, ...]
) -> None:
    with LMCacheServer(l1_size_gb=0.1, shm_name=shm_name, flags=flags) as bare:
        words = failed_start(make_spec(extra={"lmcache.mp.port": bare.port, "lmcache.mp.safe.connect_timeout_s": 4}))
    assert "--shm-name NAME --no-l1-use-lazy --supported-transfer-mode auto" in words


def test_server_that_is_not_required_may_be_away(make_spec: MakeSpec, salt: str) -> None:
    settings = {"lmcache.mp.port": 9, "lmcache.mp.safe.connect_timeout_s": 1, "lmcache.mp.safe.require_server": False}
    with EngineProcess(make_spec("attention", extra=settings)) as engine:
        (answer,) = engine.generate([list(range(5, 400))], 4, salts=[salt])
        assert len(answer.token_ids) == 4
        assert engine.held_blocks() == 0
