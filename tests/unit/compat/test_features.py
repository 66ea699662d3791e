"""A vLLM is known by its shape, and refused if its shape is not known."""

from __future__ import annotations

import pytest

from lmcache_mp_safe.compat import features
from lmcache_mp_safe.errors import ConfigError


class Bare:
    """A base class, lookup or scheduler that has nothing a gate fits."""

    def schedule(self) -> None: ...


def test_host_of_unknown_shape_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("KVConnectorBase_V1", "KVCacheManager", "Scheduler"):
        monkeypatch.setattr(features, name, Bare)
    with pytest.raises(ConfigError, match="use vLLM"):
        features.probe()


def test_host_that_asks_for_the_capability_needs_no_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    class Asking(Bare):
        supports_divergent_local_hybrid_hits = False

    monkeypatch.setattr(features, "KVConnectorBase_V1", Asking)
    found = features.probe()
    assert (found.asks_capability, found.divergent_lookup, found.pads_remainder) == (True, "none", False)
