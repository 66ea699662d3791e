"""A wrong setting stops the start and names its key."""

from __future__ import annotations

from typing import Any

import pytest

from lmcache_mp_safe.config import _KEYS, SafeConfig, parse_config
from lmcache_mp_safe.contract import Integrity
from lmcache_mp_safe.errors import ConfigError


def test_no_settings_are_the_defaults() -> None:
    assert parse_config({}) == SafeConfig()


def test_settings_land_in_their_fields() -> None:
    config = parse_config(
        {
            "lmcache.mp.host": "tcp://10.0.0.1",
            "lmcache.mp.port": 7000,
            "lmcache.mp.mq_timeout": 20,
            "lmcache.mp.save_decode_cache": True,
            "lmcache.mp.safe.integrity": "seal",
            "lmcache.mp.safe.chunk_tokens": 1024,
        }
    )
    assert config.server_url == "tcp://10.0.0.1:7000"
    assert config.call_timeout_s == 20.0
    assert config.save_decode_cache is True
    assert config.integrity is Integrity.SEAL
    assert config.chunk_tokens == 1024


@pytest.mark.parametrize("urls", ["tcp://h:1", ["tcp://h:1"], "h:1", " h:1 ,"])
def test_one_server_url_is_taken_in_every_form(urls: object) -> None:
    assert parse_config({"lmcache.mp.server_urls": urls}).server_url == "tcp://h:1"


WRONG: list[tuple[str, Any]] = [
    ("lmcache.mp.server_urls", ["a:1", "b:2"]),
    ("lmcache.mp.server_urls", []),
    ("lmcache.mp.server_urls", 7),
    ("lmcache.mp.server_urls", "grpc://h:1"),
    ("lmcache.mp.host", "grpc://h"),
    ("lmcache.mp.host", 7),
    ("lmcache.mp.port", "5555"),
    ("lmcache.mp.port", 0),
    ("lmcache.mp.port", True),
    ("lmcache.mp.mq_timeout", "10"),
    ("lmcache.mp.mq_timeout", 0),
    ("lmcache.mp.heartbeat_interval", -1),
    ("lmcache.mp.eager_prefetch", "yes"),
    ("lmcache.mp.save_decode_cache", 1),
    ("lmcache.mp.autostart", True),
    ("lmcache.mp.lazy_offload", True),
    ("lmcache.mp.unheard_of", 1),
    ("lmcache.mp.safe.chunk_tokens", 0),
    ("lmcache.mp.safe.chunk_tokens", 2.5),
    ("lmcache.mp.safe.integrity", "sometimes"),
    ("lmcache.mp.safe.integrity", None),
    ("lmcache.mp.safe.max_probes", -1),
    ("lmcache.mp.safe.pin_fraction", 0),
    ("lmcache.mp.safe.pin_fraction", 1.5),
    ("lmcache.mp.safe.call_bytes", 10),
    ("lmcache.mp.safe.weights_id", 7),
    ("lmcache.mp.safe.chunk_token", 256),
    ("anything", 1),
]


@pytest.mark.parametrize(("key", "value"), WRONG)
def test_wrong_setting_is_an_error_that_names_its_key(key: str, value: Any) -> None:
    with pytest.raises(ConfigError) as error:
        parse_config({key: value})
    assert key in str(error.value)


def test_misspelt_key_is_answered_with_the_likely_one() -> None:
    with pytest.raises(ConfigError, match=r"did you mean lmcache\.mp\.safe\.integrity\?"):
        parse_config({"lmcache.mp.safe.integrety": "off"})


def test_every_field_can_be_set_and_every_key_has_a_field() -> None:
    fields = set(SafeConfig.__dataclass_fields__)
    assert {field for field, _ in _KEYS.values()} | {"server_url"} == fields
