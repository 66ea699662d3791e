"""The tiny models: the same bytes from the same seed, small, and with the gates that make a wrong state show."""

from __future__ import annotations

import json
from pathlib import Path
from typing import get_args

import pytest
from safetensors.torch import load_file

from lmcache_mp_safe.testing.models import SLOW_GATE, VOCABULARY, WORD, ModelKind, successor, write_model

KINDS: tuple[ModelKind, ...] = get_args(ModelKind)


@pytest.mark.parametrize("kind", KINDS)
def test_a_seed_gives_the_same_bytes_again_and_another_seed_other_ones(kind: ModelKind, tmp_path: Path) -> None:
    first, again, other = (
        (write_model(kind, tmp_path / name, seed) / "model.safetensors").read_bytes()
        for name, seed in (("first", 0), ("again", 0), ("other", 1))
    )
    assert first == again
    assert first != other
    assert len(first) < 8 * 2**20


def test_the_hybrid_model_has_slow_gates_and_an_mtp_module(tmp_path: Path) -> None:
    weights = load_file(write_model("hybrid", tmp_path) / "model.safetensors")
    gates = [weight for name, weight in weights.items() if name.endswith("A_log")]
    assert len(gates) == 3
    assert all((gate == SLOW_GATE).all() for gate in gates)
    assert "mtp.fc.weight" in weights


def test_the_window_model_mixes_windows_with_full_attention(tmp_path: Path) -> None:
    config = json.loads((write_model("window", tmp_path) / "config.json").read_text())
    assert config["layer_types"] == ["sliding_attention", "full_attention"] * 2


def test_successors_lead_once_round_every_word() -> None:
    for start in range(0, VOCABULARY, WORD):
        token, seen = start, set()
        for _ in range(WORD):
            seen.add(token)
            token = successor(token)
        assert token == start
        assert seen == set(range(start, start + WORD))


def test_an_unknown_kind_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no model kind 'mamba': one of hybrid, attention, window"):
        write_model("mamba", tmp_path)  # type: ignore[arg-type]
