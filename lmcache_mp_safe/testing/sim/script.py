"""What happens in a world, drawn from its seed: conversations that share beginnings, clients that leave, faults."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from lmcache_mp_safe.testing.sim.settings import Settings
from lmcache_mp_safe.testing.sim.tokens import BLOCK

_ROUND = 100  # steps until the world is brought to rest
_MOST_TURNS = 5
_SALTS = ("", "", "", "tenant")

# kind -> weight; only those that lose or delay nothing happen in a tidy world
_TIDY = {"evict": 3, "fill": 1, "slow": 4, "squeeze": 3, "flip": 2, "reset": 1}
_ROUGH = {**_TIDY, "weather": 6, "freeze": 2, "die": 1, "restart": 3, "clear": 2, "time": 3}


def length(prompt: str) -> int:
    """Tokens of a prompt."""
    return sum(int(part.split(":")[1]) for part in prompt.split(","))


class Script:
    """Commands, for as long as they are asked for.

    Attributes:
        _prompts: prompts that were used, to be asked again or continued.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._random = Random(f"script {settings.seed}")
        self._names = 0
        # What vLLM can admit at all. It counts a window of the whole prompt while steps are under way.
        blocks = settings.blocks // 2 - 2 if settings.shape == "window" else settings.blocks - 16
        self._longest = min(200, blocks * BLOCK)
        self._free_names: list[str] = []
        self._live: list[str] = []
        self._prompts: list[tuple[str, int, str]] = []
        self._undone: list[str] = []
        self._rate = self._random.choice((0.15, 0.3, 0.5))
        self._faults = self._random.choice((0.0, 0.02, 0.06))

    def commands(self, steps: int) -> Iterator[str]:
        """So many steps, with what happens between them; at rest at the end, and now and then before."""
        done = 0
        while done < steps:
            for _ in range(min(_ROUND, steps - done)):
                yield from self._between()
                yield "step"
                done += 1
            self._undone.clear()
            yield "calm"
            yield "drain"
            self._live.clear()
            if self._random.random() < 0.3:
                yield "fault reset"

    def _between(self) -> Iterator[str]:
        random = self._random
        if random.random() < self._rate:
            yield self._arrival()
        if self._live and random.random() < 0.03:
            name = self._live.pop(
                random.randrange(max(0, len(self._live) - 6), len(self._live))
            )  # older ones have ended
            self._free_names.append(name)
            yield f"abort {name}"
        if random.random() < 0.08:
            yield "fault forget"
        if random.random() < self._faults:
            yield self._fault()
        elif self._undone and random.random() < 0.1:
            yield self._undone.pop(random.randrange(len(self._undone)))

    def _arrival(self) -> str:
        random = self._random
        if self._free_names and random.random() < 0.3:
            name = self._free_names.pop()
        else:
            self._names += 1
            name = f"r{self._names}"
        self._live.append(name)
        prompt, turns, salt = self._prompt()
        if length(prompt) > self._longest:
            prompt, turns = f"{random.randrange(3)}:{random.randrange(8, self._longest)}", 1
        self._prompts.append((prompt, turns, salt))
        del self._prompts[:-12]
        return f"arrive {name} prompt={prompt} max={random.choice((1, 2, 4, 12))} salt={salt}"

    def _prompt(self) -> tuple[str, int, str]:
        """A prompt, how many turns it has, and its salt."""
        random = self._random
        if self._prompts and random.random() < 0.75:
            prompt, turns, salt = random.choice(self._prompts)
            if turns < _MOST_TURNS and random.random() < 0.6:
                return (
                    f"{prompt},out:{random.randrange(1, 12)},{random.randrange(100)}:{random.randrange(1, 30)}",
                    turns + 1,
                    salt,
                )
            return prompt, turns, salt
        beginning = f"{random.randrange(3)}:{random.choice((8, 16, 24, 40, 56))}"
        return f"{beginning},{random.randrange(100)}:{random.randrange(1, 70)}", 1, random.choice(_SALTS)

    def _fault(self) -> str:
        random = self._random
        kinds = _TIDY if self._settings.tidy else _ROUGH
        kind = random.choices(list(kinds), weights=list(kinds.values()))[0]
        match kind:
            case "evict":
                return f"fault evict share={random.choice((0.2, 0.5, 1.0))}"
            case "fill":
                return f"fault fill objects={random.choice((4, 16, 64))}"
            case "flip":
                return f"fault flip objects={random.choice((1, 8, 64))}"
            case "slow":
                rank = random.randrange(self._settings.ranks)
                self._undone.append(f"fault slow rank={rank} on=0")
                return f"fault slow rank={rank}"
            case "squeeze":
                self._undone.append("fault release")
                return f"fault squeeze blocks={random.choice((4, 8, 16))}"
            case "weather":
                self._undone.append("fault weather")
                lose, late = random.choice((0.0, 0.02, 0.2)), random.choice((0.0, 0.3, 0.8))
                late_s = random.choice((0.05, 1.0, 5.0, 20.0))
                return f"fault weather lose={lose} late={late} late_s={late_s} twice={random.choice((0.0, 0.2))}"
            case "freeze":
                self._undone.append("fault freeze on=0")
            case "die":
                self._undone.append("fault restart")
            case "time":
                return f"fault time s={random.choice((2, 11, 61, 250, 610, 4000))}"
            case "clear":
                return f"fault clear force={random.choice((0, 1, 1))}"
        return f"fault {kind}"
