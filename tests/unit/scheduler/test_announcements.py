"""What is announced is what the server acknowledged, under the tokens that it was computed from."""

from __future__ import annotations

from lmcache_mp_safe.announcements import Announcements, News, ObjectsGone, ObjectStored
from lmcache_mp_safe.identity import PrefixDigests
from lmcache_mp_safe.testing.world import BLOCK, FULL, STATE, FakeRequest, World, prompt

CHUNK = 2 * BLOCK


def stored(news: list[News]) -> list[ObjectStored]:
    return [one for one in news if isinstance(one, ObjectStored)]


def world_with_a_prompt(length: int = 3 * BLOCK) -> tuple[World, list[News]]:
    world = World((FULL, STATE), chunk_tokens=CHUNK)
    world.run(FakeRequest("r", prompt(length)), step_tokens=BLOCK)
    return world, world.half.take_announcements()


def test_every_acknowledged_object_is_announced_once_with_its_tokens_and_its_parent() -> None:
    world, news = world_with_a_prompt(5 * BLOCK)
    tokens = prompt(5 * BLOCK)
    assert len(news) == len(stored(news)) == world.half.counters["objects_stored"] == 7
    digests = PrefixDigests(lambda start, end: tokens[start:end], lambda start, end: None, CHUNK)
    chunks = {one.digest: one for one in stored(news) if one.group == 0 and one.end % CHUNK == 0}
    assert [chunks[digests.chunk(index)].parent for index in (0, 1)] == [None, digests.chunk(0)]
    spans = {(one.start, one.end) for one in stored(news)}
    assert spans == {(0, BLOCK), (0, CHUNK), (CHUNK, CHUNK + BLOCK), (CHUNK, 2 * CHUNK), (2 * CHUNK, 5 * BLOCK)}
    for one in stored(news):
        assert list(one.source.tokens(one.start, one.end)) == tokens[one.start : one.end]  # type: ignore[attr-defined]
        assert one.parent == (digests.chunk(one.start // CHUNK - 1) if one.start else None)


def test_nothing_is_announced_before_the_server_has_acknowledged_it() -> None:
    world = World((FULL,), chunk_tokens=CHUNK)
    world.wire.refuse_commits = True
    world.run(FakeRequest("r", prompt(3 * BLOCK)), step_tokens=BLOCK)
    assert world.half.take_announcements() == []


def test_what_a_lookup_does_not_find_is_withdrawn_and_announced_again_when_it_is_stored_again() -> None:
    world, news = world_with_a_prompt()
    world.wire.evict()
    world.matched(FakeRequest("again", prompt(3 * BLOCK + 1)))
    gone = {digest for one in world.half.take_announcements() if isinstance(one, ObjectsGone) for digest in one.digests}
    assert gone
    assert gone <= {one.digest for one in stored(news)}
    world.run(FakeRequest("third", prompt(3 * BLOCK)), step_tokens=BLOCK)
    assert gone <= {one.digest for one in stored(world.half.take_announcements())}


def test_a_lost_server_and_a_reset_withdraw_everything() -> None:
    for end in ("restart", "reset"):
        world, news = world_with_a_prompt()
        if end == "restart":
            world.wire.restart_server()
            world.plan()
        else:
            world.half.reset()
        withdrawn = [one for one in world.half.take_announcements() if isinstance(one, ObjectsGone)]
        assert {digest for one in withdrawn for digest in one.digests} == {one.digest for one in stored(news)}
        assert {one.group for one in withdrawn} == {0, 1}


def test_the_oldest_are_withdrawn_when_there_are_too_many() -> None:
    announcements = Announcements(capacity=2)
    source = FakeRequest("r", prompt(8))
    objects = [ObjectStored(bytes([n]), None, source, 0, 4, group=n) for n in range(3)]  # type: ignore[arg-type]
    for one in [*objects, objects[-1]]:
        announcements.stored(one)
    assert announcements.take() == [*objects, ObjectsGone((objects[0].digest,), 0)]
    announcements.gone([objects[0].digest, b"unknown"])
    assert announcements.take() == []
