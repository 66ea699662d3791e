"""The phases of a probe; `benchmarks/probe/__init__.py` says what each is for. Each returns what it found."""

from __future__ import annotations

import functools
import itertools
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from benchmarks.probe.options import Options
from benchmarks.probe.report import Comparison, Entries, Result, say
from benchmarks.probe.server import Stall
from benchmarks.probe.watch import Watch
from lmcache_mp_safe.testing.audit import Audit, audit
from lmcache_mp_safe.testing.engine import Answer, Engine
from lmcache_mp_safe.testing.oracle import Tokens, Turn, compare, recompute, sessions, words
from lmcache_mp_safe.testing.server import LMCacheServer

_TAIL = 32  # tokens behind a boundary that is asked for
_RESET_S = 30.0
_AUDITED = ("stored", "in_slots", "loaded", "ownerless")
_Found = dict[str, Any]


class Probe:
    """One engine, and what its phases share."""

    def __init__(self, options: Options, engine: Engine, server: LMCacheServer | None, watch: Watch) -> None:
        self.options = options
        self.engine = engine
        self._server = server
        self._watch = watch
        self._random = random.Random(options.seed)
        self._salts = (f"fresh-{number}" for number in itertools.count())
        self._references: dict[Tokens, Answer] = {}
        self._local: dict[Tokens, Answer] = {}  # answers of `apc`
        self._audit: Audit | None = None
        self._runs = itertools.count()

    def run(self, result: Result) -> None:
        """All phases, in the order of the options."""
        for name in self.options.phases:
            if name in ("ext", "multi", "race", "decode") and self._server is None:
                continue
            for words_, phase in self._parts(name):
                self._run_phase(words_, phase, result)

    def _parts(self, name: str) -> list[tuple[str, Callable[[], _Found]]]:
        if name == "race":
            return [(f"race {stall}", functools.partial(self.race, stall)) for stall in self.options.race_stalls]
        return [(name, getattr(self, name))]

    def _run_phase(self, name: str, phase: Callable[[], _Found], result: Result) -> None:
        begin = time.monotonic()
        self._watch.begin_phase()
        audited, counters = self._audited(), self._our_counters()
        if self._audit is not None and name in result.phases:
            name = f"{name}, audited"
        found = phase()
        if self._server is not None:
            self.engine.drain(_RESET_S)
        found["seconds"] = round(time.monotonic() - begin, 1)
        found["counts"] = self._watch.of_phase() | dict(self._our_counters() - counters)
        if self._audit is not None and name != "audit":
            found["audit"] = self._audited_since(audited)
        result.phases[name] = found
        say(name, found)

    # --- asking -----------------------------------------------------------------------------------------------------

    def ask(self, prompt: Tokens, salt: str, tokens: int) -> Answer:
        (answer,) = self.engine.generate([prompt], tokens, salts=[salt])
        return answer

    def ask_external(self, prompt: Tokens, salt: str, tokens: int) -> Answer:
        """With vLLM's own prefix cache emptied."""
        self.reset()
        return self.ask(prompt, salt, tokens)

    def recompute(self, prompt: Tokens, tokens: int) -> Answer:
        """From scratch, remembered."""
        if prompt not in self._references:
            self._references[prompt] = self.ask(prompt, next(self._salts), tokens)
        return self._references[prompt]

    def reset(self) -> None:
        self.engine.reset_prefix_cache(_RESET_S)

    @functools.cached_property
    def turns(self) -> list[Turn]:
        """The conversations, with their references."""
        options = self.options
        low, high = options.tokens(0.5 * options.turn_blocks), options.tokens(1.5 * options.turn_blocks)
        conversations = sessions(
            options.seed,
            count=options.sessions,
            turns=options.turns,
            system_tokens=options.tokens(options.first_blocks),
            turn_tokens=(low, high),
        )
        return recompute(self.engine, conversations, options.max_tokens)

    # --- one at a time ----------------------------------------------------------------------------------------------

    def ref(self) -> _Found:
        again = Comparison()
        for turn in self.turns[:: max(1, len(self.turns) // 4)]:
            answer = self.ask(turn.prompt, next(self._salts), self.options.max_tokens)
            again.add(_name(turn), turn.reference, answer)
        return {"recomputed": len(self.turns), "again": asdict(again)}

    def apc(self) -> _Found:
        found = Comparison()
        self.reset()
        for turn in self.turns:
            answer = self.ask(turn.prompt, "apc", self.options.max_tokens)
            self._local[turn.prompt] = answer
            found.add(_name(turn), turn.reference, answer)
        return {"against_ref": asdict(found)}

    def ext(self) -> _Found:
        found, against_local = Comparison(), Comparison()
        for turn in self.turns:
            answer = self.ask_external(turn.prompt, "ext", self.options.max_tokens)
            found.add(_name(turn), turn.reference, answer)
            local = self._local.get(turn.prompt)
            if local is not None and local.cached_tokens == answer.cached_tokens > 0:
                against_local.add(_name(turn), local, answer)
        return {"against_ref": asdict(found), "against_apc": asdict(against_local)}

    # --- all at once ------------------------------------------------------------------------------------------------

    def control(self) -> _Found:
        found = Comparison()
        for turns in self._rows():
            self._together(turns, [next(self._salts) for _ in turns], found)
        return {"against_ref": asdict(found)}

    def multi(self) -> _Found:
        found = Comparison()
        salts = [f"multi-{next(self._runs)}" for _ in range(self.options.rounds)]
        with Stall(self._server, self.options.stall) as stall:
            for salt in salts:
                for turns in self._rows():
                    self.reset()
                    self._together(turns, [salt] * len(turns), found)
        self._store_alone([turn.prompt for turn in self.turns], "ext")
        texts = [turn.prompt for turn in self.turns if turn.number == self.options.turns - 1]
        entries = [self._entries(texts, [salt] * len(texts), ["ext"] * len(texts)) for salt in salts]
        return {"against_ref": asdict(found), "entries": _sum(entries), "stalls": stall.count}

    def _rows(self) -> list[list[Turn]]:
        """The turns that are taken at once."""
        return [[turn for turn in self.turns if turn.number == number] for number in range(self.options.turns)]

    def _together(self, turns: Sequence[Turn], salts: Sequence[str], found: Comparison) -> None:
        prompts = [turn.prompt for turn in turns]
        for turn, answer in zip(
            turns, self.engine.generate(prompts, self.options.max_tokens, salts=salts), strict=True
        ):
            found.add(_name(turn), turn.reference, answer)

    def race(self, words_: str) -> _Found:
        texts, run = self._race_texts, next(self._runs)
        alone = [f"alone-{number}" for number in range(len(texts))]
        for text, salt in zip(texts, alone, strict=True):
            self._store_alone([text], salt)
        rounds = [[f"race-{run}-{n}-{session}" for session in range(len(texts))] for n in range(self.options.rounds)]
        begin = time.monotonic()
        self._watch.begin_phase()
        with Stall(self._server, words_) as stall:
            for salts in rounds:
                self.engine.generate(texts, self.options.race_tokens, salts=salts)
                self.reset()
        ran = round(time.monotonic() - begin, 1)
        counts = self._watch.of_phase()
        entries = [self._entries(texts, salts, alone) for salts in rounds]
        return {"race_s": ran, "stalls": stall.count, "race_counts": counts, "entries": _sum(entries)}

    @functools.cached_property
    def _race_texts(self) -> list[Tokens]:
        length = self.options.tokens(self.options.race_blocks) + _TAIL
        return [words(self._random, length) for _ in range(self.options.race_sessions)]

    # --- entries ----------------------------------------------------------------------------------------------------

    def _store_alone(self, texts: Sequence[Tokens], salt: str) -> None:
        """Entries that nothing else was running beside; those that are there already are not stored again."""
        for text in texts:
            self.ask_external(text, salt, 1)

    def _entries(self, texts: Sequence[Tokens], salts: Sequence[str], alone: Sequence[str]) -> Entries:
        """Every boundary of these texts. `alone`: salts under which they were stored by themselves."""
        found = Entries()
        block = self.options.block_size
        for number, (text, salt, alone_salt) in enumerate(zip(texts, salts, alone, strict=True)):
            depths: list[int] = []
            for boundary in range(block, len(text) - _TAIL + 1, block):
                cut = text[: boundary + _TAIL]
                want = self.recompute(cut, 1)
                answer = self.ask_external(cut, salt, 1)
                depths.append(answer.external_tokens // block)
                found.boundaries += 1
                found.hits += answer.external_tokens > 0
                found.short_hits += 0 < answer.external_tokens < boundary
                if compare(want, answer) is None:
                    found.equal += 1
                else:
                    self._judge(found, f"{number} at {boundary // block}", want, answer, cut, alone_salt)
            found.depths.append(" ".join(map(str, depths)))
        return found

    def _judge(self, found: Entries, name: str, want: Answer, answer: Answer, cut: Tokens, alone_salt: str) -> None:
        """An answer from an entry that is not a recomputation's."""
        alone = self.ask_external(cut, alone_salt, 1)
        same_depth = alone.external_tokens == answer.external_tokens
        if same_depth and compare(alone, answer) is None:
            found.as_alone += 1
            return
        found.wrong += same_depth
        found.unmatched += not same_depth
        found.other_tokens += want.token_ids != answer.token_ids
        gap = abs(want.logprobs[0] - answer.logprobs[0])
        found.largest_gap = max(found.largest_gap, gap)
        depth = f"{answer.external_tokens // self.options.block_size} blocks deep"
        found.which.append(f"{name}, {depth}, gap {gap:.5f}{'' if same_depth else ', unmatched'}")

    # --- what decoding made -----------------------------------------------------------------------------------------

    def decode(self) -> _Found:
        """Long answers of all sessions at once, each asked again as a prompt: two local hits, then an external one.

        Some versions of vLLM keep no state that decoding made: the first to go on from there leaves one. Where the
        first local hit is not as deep as the external one, the second's blocks were computed anew by a prefill, and
        differ by rounding from what decoding made and the connector stored.
        """
        options, run = self.options, next(self._runs)
        prompts = [words(self._random, options.tokens(1.3)) for _ in range(options.sessions)]
        salts = [f"decode-{run}-{number}" for number in range(options.sessions)]
        told = self.engine.generate(prompts, options.tokens(options.decode_blocks), salts=salts)
        texts = [
            prompt + answer.token_ids + words(self._random, _TAIL) for prompt, answer in zip(prompts, told, strict=True)
        ]
        pairs = list(zip(texts, salts, strict=True))
        # All local ones first: an external one begins with a reset.
        local = [[self.ask(text, salt, options.max_tokens) for _ in range(2)] for text, salt in pairs]
        external = [self.ask_external(text, salt, options.max_tokens) for text, salt in pairs]
        as_decoded, as_prefilled, depths = Comparison(), Comparison(), []
        for number, (asked, answer) in enumerate(zip(local, external, strict=True)):
            depths.append(" ".join(map(_depth_words, [*asked, answer])))
            for wanted, found in zip(asked, (as_decoded, as_prefilled), strict=True):
                if wanted.local_tokens == answer.external_tokens > 0:
                    found.add(f"session {number}", wanted, answer)
                    break
        made = sum(one.external_tokens > len(prompt) for one, prompt in zip(external, prompts, strict=True))
        compared = {"against_local": asdict(as_decoded), "against_second_local": asdict(as_prefilled)}
        return {"hits_on_decoded": made, "sessions": len(prompts), "depths": depths} | compared

    # --- page bytes, and this package's own counts --------------------------------------------------------------------

    def audit(self) -> _Found:
        if self.options.connector != "safe" or self._audit is not None:
            return {}
        self._audit = audit(self.engine.worker_connector.worker_half, self.engine.connector.scheduler_half)
        return {"watching": True}

    def _audited(self) -> Mapping[str, int]:
        seen = self._audit
        return {} if seen is None else {"wrong": len(seen.wrong)} | {name: getattr(seen, name) for name in _AUDITED}

    def _audited_since(self, before: Mapping[str, int]) -> _Found:
        assert self._audit is not None
        found: _Found = {name: value - before.get(name, 0) for name, value in self._audited().items()}
        return found | ({"which": self._audit.wrong[before.get("wrong", 0) :][:5]} if found["wrong"] else {})

    def _our_counters(self) -> Counter[str]:
        """Those of the scheduler half, since the engine started."""
        return Counter(self.engine.connector.scheduler_half.counters if self.options.connector == "safe" else ())

    def left(self) -> _Found:
        """What is still held when everything is over: it must be nothing."""
        if self._server is None:
            return {}
        self.engine.drain(_RESET_S)
        self.reset()
        found: _Found = {"held_blocks": self.engine.held_blocks()}
        if self.options.connector == "safe":
            half = self.engine.connector.scheduler_half
            found |= {"pins": half.pinned_blocks, "pending": half.has_pending_work}
        return found


def _name(turn: Turn) -> str:
    return f"session {turn.session} turn {turn.number}"


def _depth_words(answer: Answer) -> str:
    return f"{answer.local_tokens}+{answer.external_tokens}"


def _sum(parts: Sequence[Entries]) -> _Found:
    found = asdict(parts[0])
    for part in map(asdict, parts[1:]):
        for name, value in part.items():
            found[name] = max(found[name], value) if name == "largest_gap" else found[name] + value
    return found
