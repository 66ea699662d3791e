"""vLLM's own requests and block pool, as the scheduler half sees them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request

from lmcache_mp_safe.compat.requests import HostRequest
from lmcache_mp_safe.errors import UnnameableError
from lmcache_mp_safe.identity import PrefixDigests

pytestmark = pytest.mark.old_vllm

TOKENS = 512
CHUNK = 256


def request(
    *, configs: Any = None, tokens: list[int] | None = None, images: list[Any] | None = None, **fields: Any
) -> Request:
    """A request of 512 equal tokens."""
    parameters = SamplingParams(max_tokens=4)
    if configs is not None:
        parameters.extra_args = {"kv_transfer_params": configs}
    if "prompt_embeds" not in fields:
        fields["prompt_token_ids"] = tokens or [7] * TOKENS
    made = Request(
        **{"request_id": "r", "prompt_token_ids": None, "sampling_params": parameters, "pooling_params": None, **fields}
    )
    made.mm_features = images or []
    return made


def image(name: str, offset: int, length: int = 300) -> Any:
    return SimpleNamespace(identifier=name, mm_position=SimpleNamespace(offset=offset, length=length))


def adapter(path: str, name: str = "adapter") -> LoRARequest:
    return LoRARequest(name, 1, path)


def names(made: Request) -> list[bytes]:
    """Names of both chunks and of a boundary in each."""
    host = HostRequest(made, 16)
    digests = PrefixDigests(host.tokens, host.extra_keys, CHUNK)
    return [*digests.chunks(2), digests.boundary(CHUNK // 2), digests.boundary(CHUNK + CHUNK // 2)]


def embeddings(seed: int) -> torch.Tensor:
    return torch.rand((TOKENS, 4), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"lora_request": adapter("/a")}, {}),
        ({"lora_request": adapter("/a")}, {"lora_request": adapter("/b")}),
        ({"lora_request": adapter("/a", "one")}, {"lora_request": adapter("/a", "two")}),
        ({"lora_request": adapter("/a", "x")}, {"cache_salt": "x"}),
        ({"cache_salt": "a"}, {"cache_salt": "b"}),
        ({"cache_salt": "a"}, {}),
        ({"images": [image("cat", 10)]}, {"images": [image("dog", 10)]}),
        ({"images": [image("cat", 10)]}, {"images": [image("cat", 11)]}),
        ({"images": [image("cat", 10)]}, {}),
        ({"prompt_embeds": embeddings(1)}, {"prompt_embeds": embeddings(2)}),
        ({"prompt_embeds": embeddings(1)}, {"tokens": [0] * TOKENS}),
        ({"configs": {"lmcache.tag.user": "a"}}, {"configs": {"lmcache.tag.user": "b"}}),
        ({"configs": {"lmcache.tag.user": "a"}}, {}),
    ],
)
def test_requests_with_equal_tokens_and_other_content_share_no_name(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert not set(names(request(**one))) & set(names(request(**other)))


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"lora_request": adapter("/a")},
        {"cache_salt": "a"},
        {"images": [image("cat", 10)]},
        {"prompt_embeds": embeddings(1)},
        {"configs": {"lmcache.tag.user": "a"}},
    ],
)
def test_equal_requests_share_every_name(fields: dict[str, Any]) -> None:
    assert names(request(**fields)) == names(request(request_id="another", **fields))


def test_content_behind_a_prefix_leaves_its_name() -> None:
    late = names(request(images=[image("cat", CHUNK + 10, 20)]))
    plain = names(request())
    assert late[0] == plain[0]
    assert late[1] != plain[1]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"lmcache.max_offload_tokens": 7}, {"lmcache.max_offload_tokens": 8}),  # a limit, no content
        ({"do_remote_prefill": True, "remote_port": 1}, {}),  # another connector's business
    ],
)
def test_what_a_request_says_about_its_handling_is_not_part_of_its_name(one: Any, other: Any) -> None:
    assert names(request(configs=one)) == names(request(configs=other))


def test_embeddings_mixed_with_tokens_are_not_named() -> None:
    """vLLM's own hashes do not cover which positions are which, so what its cache serves there may be another's."""
    mask = [position % 2 == 0 for position in range(TOKENS)]
    mixed = request(prompt_embeds=embeddings(1))
    mixed.prompt_is_token_ids = mask
    with pytest.raises(UnnameableError):
        names(mixed)


@pytest.mark.parametrize("salt", [5, ["a"], {"a": 1}, b"a", 1.5])
def test_salt_that_is_no_text_is_not_named(salt: Any) -> None:
    made = request(cache_salt=salt)
    assert HostRequest(made, 16).salt == ""
    with pytest.raises(UnnameableError):
        names(made)


@pytest.mark.parametrize("configs", [None, "text", ["lmcache.tag.a"], 5, {1: 2}, {b"lmcache.tag.a": 1}])
def test_transfer_parameters_of_another_form_are_none_of_ours(configs: Any) -> None:
    assert HostRequest(request(configs=configs), 16).user_configs == {}
