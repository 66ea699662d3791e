"""Whatever a user writes into a salt, a model path or request configs: no hook raises, and two users share nothing."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request

from lmcache_mp_safe.compat.requests import HostRequest
from lmcache_mp_safe.errors import UnnameableError
from lmcache_mp_safe.identity import PrefixDigests, namespace
from lmcache_mp_safe.testing.world import BLOCK, FULL, World, prompt

NASTY = ["", "@", "../../etc/passwd", "a\\b/c\x00d", "x" * 10_000, "🙂", "\ud800", "\n\t\x1b[0m", "digest-", " "]
TEXT = st.one_of(st.sampled_from(NASTY), st.text(st.characters(), max_size=40))
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.just(10**4000), st.floats(), TEXT),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXT, inner, max_size=3)),
    max_leaves=8,
)
CONFIGS = st.one_of(VALUES, st.dictionaries(TEXT.map(lambda text: f"lmcache.{text}"), VALUES, max_size=3))
SALTS = st.one_of(TEXT, VALUES, st.none())
TOKENS = prompt(4 * BLOCK)


class Host(HostRequest):
    """vLLM's request with prefix hashes of the small world, which need no block pool of vLLM's."""

    blocks: list[Any]

    def block_hashes(self, columns: range, block_tokens: int) -> Any:
        return [(self.request_id, column) for column in columns]


def host(request_id: str, salt: Any, configs: Any) -> Host:
    parameters = SamplingParams(max_tokens=4)
    parameters.extra_args = {"kv_transfer_params": configs}
    made = Host(Request(request_id, TOKENS, parameters, None), BLOCK)
    made._request.cache_salt = salt  # whatever vLLM would let through
    return made


def names(salt: Any, configs: Any) -> set[bytes]:
    """Names of everything that could be stored of this request; none if it uses no cache."""
    source = host("r", salt, configs)
    digests = PrefixDigests(source.tokens, source.extra_keys, 2 * BLOCK)
    try:
        return {*digests.chunks(2), *(digests.boundary(boundary) for boundary in range(BLOCK, 4 * BLOCK, BLOCK))}
    except UnnameableError:
        return set()


@settings(max_examples=150, deadline=None)
@given(SALTS, CONFIGS)
def test_no_hook_raises_and_nothing_is_counted_as_a_fault_of_ours(salt: Any, configs: Any) -> None:
    world = World((FULL,), eager_prefetch=True)
    source = host("r", salt, configs)
    world.half.arrived(source)
    for _ in range(4):
        assert world.half.matched_tokens(source, 0) in (None, 0)
    world.half.allocated(source, 0, ())
    source._request.num_computed_tokens = 4 * BLOCK
    for _ in range(3):
        world.half.build_plan([source.request_id], preempted=False)
    world.half.finished(source)
    assert world.half.counters["internal_errors"] == 0


@settings(max_examples=300, deadline=None)
@given(TEXT, TEXT)
def test_two_salts_share_no_object(one: str, other: str) -> None:
    if one != other:
        assert not names(one, None) & names(other, None)
    else:
        assert names(one, None) == names(other, None)


def canonical(configs: dict[str, Any]) -> str:
    return json.dumps({key: value for key, value in configs.items() if key.startswith("lmcache.")}, sort_keys=True)


PLAIN = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-(2**63), 2**64 - 1), st.floats(), TEXT),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXT, inner, max_size=3)),
    max_leaves=6,
)


@settings(max_examples=300, deadline=None)
@given(*[st.dictionaries(TEXT.map(lambda text: f"lmcache.tag.{text}"), PLAIN, max_size=3)] * 2)
def test_two_request_configs_share_no_object(one: dict[str, Any], other: dict[str, Any]) -> None:
    if canonical(one) != canonical(other):
        assert not names("", one) & names("", other)
    else:
        assert names("", one) == names("", other)


@given(TEXT, TEXT)
def test_two_model_paths_share_no_namespace(one: str, other: str) -> None:
    assert (namespace(one, []) == namespace(other, [])) == (one == other)


def test_what_can_be_named_is_named() -> None:
    """The properties above would hold, too, if nothing had a name."""
    for salt, configs in (("tenant", None), ("🙂" * 10_000, {"lmcache.tag.a": [1, {"b": None}]}), ("@/\\\x00", None)):
        assert len(names(salt, configs)) == 5
