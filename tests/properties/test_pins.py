"""Pins under any order of pinning, freeing and unpinning: counts add up, the budget holds, nothing is handed out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import hypothesis
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from hypothesis.stateful import run_state_machine_as_test as run

from lmcache_mp_safe.errors import LocalError
from lmcache_mp_safe.scheduler.certify import Certificate, Pages, Pins
from lmcache_mp_safe.testing.world import FakeBlock, FakePool

BLOCKS = 12


def certificate(blocks: list[FakeBlock]) -> Certificate:
    return Certificate((Pages((), blocks, [block.block_hash for block in blocks]),))


class PinsMachine(RuleBasedStateMachine):
    """A pool with owners beside the pins; `owned` and `pinned` are the books."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = FakePool(BLOCKS)
        self.owned: Counter[int] = Counter()
        self.pinned: list[Certificate] = []

    @initialize(budget=st.integers(1, BLOCKS))
    def start(self, budget: int) -> None:
        self.budget = budget
        self.pins = Pins(self.pool, budget / BLOCKS)

    @rule()
    def owner_takes_a_block(self) -> None:
        if self.pool.free:
            self.owned[self.pool.take().block_id] += 1

    @rule(number=st.integers(0, BLOCKS))
    def owner_frees_a_block(self, number: int) -> None:
        held = sorted(+self.owned)
        if held:
            chosen = held[number % len(held)]
            self.owned[chosen] -= 1
            self.pool.unpin([self.pool.blocks[chosen]])

    @rule(numbers=st.sets(st.integers(1, BLOCKS - 1), min_size=1))
    def store_begins(self, numbers: set[int]) -> None:
        """Of free blocks, too: what vLLM's cache still serves may have no owner."""
        wanted = certificate([self.pool.blocks[number] for number in sorted(numbers)])
        before, counts = self.pins.held, [block.ref_cnt for block in self.pool.blocks]
        pinned = self.pins.try_pin(wanted)
        assert pinned == (before == 0 or before + len(numbers) <= self.budget)
        if pinned:
            self.pinned.append(wanted)
        else:
            assert (self.pins.held, [block.ref_cnt for block in self.pool.blocks]) == (before, counts), "all or nothing"

    @precondition(lambda self: self.pinned)
    @rule(number=st.integers(0, BLOCKS))
    def store_ends(self, number: int) -> None:
        self.pins.unpin(self.pinned.pop(number % len(self.pinned)))

    @precondition(lambda self: not self.pinned)
    @rule()
    def one_more_unpin_is_refused_and_changes_nothing(self) -> None:
        with pytest.raises(LocalError):
            self.pins.unpin(certificate([self.pool.blocks[1]]))

    @invariant()
    def every_reference_has_an_owner_or_a_pin(self) -> None:
        pinned = Counter(block.block_id for each in self.pinned for block in each.blocks)
        assert {b.block_id: b.ref_cnt for b in self.pool.blocks if b.ref_cnt} == dict(+(self.owned + pinned))
        assert {b.block_id for b in self.pool.free} == {b.block_id for b in self.pool.blocks[1:] if not b.ref_cnt}

    @invariant()
    def held_is_what_is_pinned(self) -> None:
        if hasattr(self, "pins"):
            assert self.pins.held == sum(len(each.blocks) for each in self.pinned)
            assert self.pins.held <= self.budget or len(self.pinned) == 1


SETTINGS = settings(max_examples=100, stateful_step_count=30)
REPEATED = settings(SETTINGS, database=None, derandomize=True, phases=[hypothesis.Phase.generate])


def test_pins_are_counted_bounded_and_all_or_nothing() -> None:
    run(PinsMachine, settings=SETTINGS)


def no_budget(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Pins, "_budget", property(lambda self: 10**6, lambda self, value: None), raising=False)


def pins_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(FakePool, "pin", lambda self, blocks: None)


def forgets_to_count(patch: pytest.MonkeyPatch) -> None:
    right = Pins.unpin

    def wrong(self: Pins, each: Certificate) -> None:
        held = self.held
        right(self, each)
        self.held = held

    patch.setattr(Pins, "unpin", wrong)


@pytest.mark.parametrize("mistake", [no_budget, pins_nothing, forgets_to_count])
def test_mistake_is_caught(mistake: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    mistake(monkeypatch)
    with pytest.raises(AssertionError):
        run(
            PinsMachine,
            settings=REPEATED,
        )
