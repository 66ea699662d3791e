"""Does `verify` notice what it is there to notice? The whole run, against servers inside this process."""

from __future__ import annotations

from dataclasses import dataclass

from lmcache_mp_safe.verify.client import Client
from lmcache_mp_safe.verify.judge import Verdict
from lmcache_mp_safe.verify.run import Settings, Target, run
from lmcache_mp_safe.verify.stub import Fault, Stub
from lmcache_mp_safe.verify.traffic import generated

REQUESTS = 20
_WORDS = 200  # the stub's model is a hash of the whole prompt for each token
_FAULTY = 27  # of the 40 answers under test
_TIMEOUT_S = 30.0

# What one such answer among all must lead to.
EXPECTED: tuple[tuple[Fault | None, Verdict], ...] = (
    (None, Verdict.CLEAN),
    (Fault.NEAR_TIE, Verdict.CLEAN),
    (Fault.SHIFT, Verdict.SUSPICIOUS),
    (Fault.WRONG_STATE, Verdict.CORRUPT),
    (Fault.REPLACEMENT, Verdict.CORRUPT),
    (Fault.DRIFT, Verdict.CORRUPT),
    (Fault.NOT_A_NUMBER, Verdict.CORRUPT),
)


@dataclass(frozen=True)
class Trial:
    fault: Fault | None
    expected: Verdict
    found: Verdict
    why: str

    @property
    def ok(self) -> bool:
        return self.found is self.expected


async def self_test() -> list[Trial]:
    """One run for each thing that an answer can show."""
    return [await _trial(fault, expected) for fault, expected in EXPECTED]


async def _trial(fault: Fault | None, expected: Verdict) -> Trial:
    with_connector, without = Stub(fault, _FAULTY), Stub()
    async with (
        Client("http://subject.invalid", timeout_s=_TIMEOUT_S, transport=with_connector.transport()) as subject,
        Client("http://baseline.invalid", timeout_s=_TIMEOUT_S, transport=without.transport()) as baseline,
    ):
        settings = Settings(requests=REQUESTS)
        result = await run(
            Target(subject, "stub"), Target(baseline, "stub"), generated(0, _WORDS), settings, lambda *_: None
        )
    judgement = result.judgement()
    return Trial(fault, expected, judgement.verdict, judgement.why)
