"""One rank: its pages, its device, the real worker half on it, and the forwards that check what they read."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np
import torch

from lmcache_mp_safe.geometry.pages import PageLayout
from lmcache_mp_safe.ops.streamed import StreamedBackend
from lmcache_mp_safe.testing.pools import simple_pages
from lmcache_mp_safe.testing.sim.host import LAYERS, WINDOW, groups_of
from lmcache_mp_safe.testing.sim.runner import Move, Work
from lmcache_mp_safe.testing.sim.settings import Settings
from lmcache_mp_safe.testing.sim.tokens import BLOCK, Words, mask_of
from lmcache_mp_safe.testing.sim_device import SimDevice, SimEvent, SimStream
from lmcache_mp_safe.worker.half import WorkerHalf

WORD_BYTES = 8
_STAGING_BYTES = 64 << 10
_PATIENCE = 20_000  # steps of streams until what a host waits for must be there


@dataclass(frozen=True)
class Plane:
    """The pages of one layer: `words[block]` is a page."""

    group: int
    kind: str
    words: Words
    mask: np.uint64

    def name(self) -> str:
        return f"group {self.group} ({self.kind})"


class SlowQueue:
    """Stands in for the copy thread: calls run when the simulator says so, urgent ones first."""

    def __init__(self) -> None:
        self._urgent: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self._usual: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self._look: Callable[[], object] = bool

    def watch(self, look: Callable[[], object]) -> None:
        self._look = look

    def hook(self) -> None:
        """The thread looks when it has run a call, or had none to run."""

    def __len__(self) -> int:
        return len(self._urgent) + len(self._usual)

    def submit(self, act: Callable[..., None], *arguments: Any, urgent: bool = False) -> None:
        (self._urgent if urgent else self._usual).append((act, arguments))

    def run_one(self) -> bool:
        """Whether there was one."""
        queue = self._urgent or self._usual
        ran = bool(queue)
        if queue:
            act, arguments = queue.popleft()
            act(*arguments)
        self._look()
        return ran

    def shutdown(self) -> None:
        while self.run_one():
            pass


class Rank:
    """A worker process and its device.

    Attributes:
        wrong: what forwards found that should not be there.
        slow: copies move seldom, until they are waited for.
    """

    def __init__(self, number: int, settings: Settings) -> None:
        self.number = number
        self.wrong: list[str] = []
        self.slow = False
        self.weights = 0
        self._kinds = groups_of(settings)
        self.device = SimDevice()
        sizes = [[self._page_words(kind, settings) * WORD_BYTES] * LAYERS[kind] for kind in self._kinds]
        self.pages, size = simple_pages(sizes, settings.blocks)
        self.memory = torch.zeros(size, dtype=torch.uint8)
        device: Any = self.device  # it takes streams of its own only
        self.backend = StreamedBackend(
            device, [self.memory], staging_bytes=_STAGING_BYTES, direct_bytes=1 if settings.direct else None
        )
        self.queue = SlowQueue() if settings.copy_thread else None
        self.worker = WorkerHalf(rank=number, pages=self.pages, backend=self.backend, queue=self.queue)
        self.layout = self.pages.rank_layout(number)
        self.planes = self._planes(self.pages)

    @staticmethod
    def _page_words(kind: str, settings: Settings) -> int:
        return settings.state_words if kind == "state" else BLOCK

    def _planes(self, pages: PageLayout) -> list[Plane]:
        flat = self.memory.numpy()
        planes: list[Plane] = []
        for group, (kind, layers) in enumerate(zip(self._kinds, pages.groups, strict=True)):
            for index, layer in enumerate(layers):
                (segment,) = layer.segments
                part = flat[segment.offset : segment.offset + segment.stride * pages.num_blocks]
                words = part.view(np.uint64).reshape(pages.num_blocks, -1)
                planes.append(Plane(group, kind, words, mask_of(self.number, group, index, self.weights)))
        return planes

    def change_weights(self) -> None:
        """Another model from here on: nothing that was computed before may be read again."""
        self.weights += 1
        self.planes = self._planes(self.pages)

    # --- a step of the model ----------------------------------------------------------------------------------------

    def migrate(self, work: Sequence[Work]) -> None:
        """Queue what the runner does before the connector's fence."""
        moves = [move for share in work for move in share.migrate]
        if moves:
            self._queue_moves(moves)

    def forward(self, work: Sequence[Work]) -> SimEvent:
        """Queue the forward.

        Returns:
            When the sampled tokens are known.
        """
        planes = self.planes

        def run() -> None:
            for share in work:
                self._check(share, planes)
                _write(share, planes)

        self.device.compute.submit(run)
        return self.device.compute.record()

    def settle(self, work: Sequence[Work]) -> None:
        """Queue what follows verification."""
        moves = [move for share in work for move in share.settle]
        if moves:
            self._queue_moves(moves)

    def _queue_moves(self, moves: Sequence[Move]) -> None:
        planes = self.planes

        def run() -> None:
            for move in moves:
                for plane in planes:
                    if plane.group == move.group and move.target:
                        plane.words[move.target] = plane.words[move.source]

        self.device.compute.submit(run)

    def _check(self, share: Work, planes: Sequence[Plane]) -> None:
        states = dict(share.read_state)
        for plane in planes:
            if plane.kind == "state":
                block = states.get(plane.group)
                if block is not None:
                    self._expect(share, plane, plane.words[block], share.tags[share.start - 1], share.start - 1, block)
                continue
            first = 0 if plane.kind == "full" else max(0, share.start - WINDOW + 1)
            if first >= share.start:
                continue
            lead = first // BLOCK
            table = share.tables[plane.group][lead : -(-share.start // BLOCK)]
            found = plane.words[table].reshape(-1)[first - lead * BLOCK : share.start - lead * BLOCK]
            self._expect(share, plane, found, share.tags[first : share.start], first, table)

    def _expect(self, share: Work, plane: Plane, found: Words, tags: Any, first: int, blocks: Any) -> None:
        """`first`: the position whose tag comes first."""
        right = (found ^ plane.mask) == tags
        if not right.all():
            self.wrong.append(
                f"{share.request_id} on rank {self.number} computes [{share.start}, {share.end}) and reads a wrong tag"
                f" in {plane.name()}, from position {first} in blocks {blocks}, word {int(np.argmin(right))}"
            )

    # --- time -------------------------------------------------------------------------------------------------------

    def run_some(self, random: Random, steps: int) -> None:
        """Streams and the copy thread advance in the order that chance chooses."""
        compute, streams = self.device.compute, self.device.streams
        for _ in range(steps):
            if self.queue is not None and random.random() < 0.3:
                self.queue.run_one()
            elif not any(stream.work for stream in streams):
                continue
            stream = random.choice(streams)
            if stream is not compute and self.slow and random.random() < 0.95:
                continue
            stream.step()

    def run_until(self, event: SimEvent, random: Random) -> None:
        """What a host does that waits for the device.

        Raises:
            AssertionError: the event does not come.
        """
        compute: SimStream = self.device.compute
        for _ in range(_PATIENCE):
            if event.done():
                return
            if not compute.step():
                random.choice(self.device.streams).step()
        raise AssertionError(f"rank {self.number}: the device waits for something that nobody submits")

    def finish(self) -> None:
        """Everything that can run does."""
        while True:
            self.device.run()
            if self.queue is None or not self.queue.run_one():
                return


def _write(share: Work, planes: Sequence[Plane]) -> None:
    positions = np.arange(share.start, share.end)
    for plane in planes:
        if plane.kind == "state":
            for group, block, tokens in share.write_states:
                if group == plane.group and block:
                    plane.words[block] = share.tags[tokens - 1] ^ plane.mask
            continue
        blocks = share.tables[plane.group][positions // BLOCK]
        plane.words[blocks, positions % BLOCK] = share.tags[share.start : share.end] ^ plane.mask
