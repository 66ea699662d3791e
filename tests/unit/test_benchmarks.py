"""The benchmarks' runner, and that every case can at least be asked whether it runs here."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.__main__ import CASES
from lmcache_mp_safe.bench.measure import percentile, summary
from lmcache_mp_safe.bench.runner import Case, Check, Row, WrongBytesError, markdown, run_case, run_cases


class Fine:
    key, description = "fine", "Copies nothing, quickly."

    def can_run(self) -> str | None:
        return None

    def run(self, quick: bool) -> Iterator[Row]:
        yield Row("a row", {"GB/s": 12.345678, "repeats": 1 if quick else 9}, (Check("share", 0.96, ">=", 0.95),))
        yield Row("another", {"us": 3}, (Check("us", 3.0, "<=", 2.0),))


class Nowhere(Fine):
    key = "nowhere"

    def can_run(self) -> str | None:
        return "there is no such device"


class Wrong(Fine):
    key = "wrong"

    def run(self, quick: bool) -> Iterator[Row]:
        yield Row("a row", {"GB/s": 1e6})
        raise WrongBytesError("3 wrong bytes")


def test_rows_are_written_with_machine_and_thresholds(tmp_path: Path) -> None:
    assert run_cases([Fine()], tmp_path, quick=True, command="python -m benchmarks fine") == 0
    result = json.loads((tmp_path / "fine.json").read_text())
    assert result["outcome"] == "done"
    assert result["header"]["command"] == "python -m benchmarks fine"
    assert {"date", "GPU", "CPU", "torch", "lmcache-mp-safe", "commit"} <= result["header"].keys()
    assert result["rows"][0]["values"] == {"GB/s": 12.345678, "repeats": 1}
    table = (tmp_path / "fine.md").read_text().splitlines()
    assert "| a row | 12.35 | 1 |  | pass: share 0.96 >= 0.95 |" in table
    assert "| another |  |  | 3 | FAIL: us 3 <= 2 |" in table


def test_threshold_that_is_missed_is_no_failure_unless_strict(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cases([Fine()], None) == 0
    assert "another: FAIL: us 3 <= 2" in capsys.readouterr().out
    assert run_cases([Fine()], None, strict=True) == 1


def test_case_that_cannot_run_says_why_and_overwrites_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "nowhere.json").write_text("of another machine")
    assert run_cases([Nowhere()], tmp_path) == 0
    assert "there is no such device" in capsys.readouterr().out
    assert (tmp_path / "nowhere.json").read_text() == "of another machine"


def test_wrong_bytes_are_a_failure_and_the_others_still_run(tmp_path: Path) -> None:
    assert run_cases([Wrong(), Fine()], tmp_path) == 1
    wrong = json.loads((tmp_path / "wrong.json").read_text())
    assert (wrong["outcome"], wrong["reason"]) == ("failed", "WrongBytesError: 3 wrong bytes")
    assert "3 wrong bytes" in (tmp_path / "wrong.md").read_text()
    assert json.loads((tmp_path / "fine.json").read_text())["outcome"] == "done"


def test_what_a_stopped_case_leaves_says_that_it_is_not_all(tmp_path: Path) -> None:
    class Stopped(Fine):
        def run(self, quick: bool) -> Iterator[Row]:
            yield Row("a row", {"GB/s": 1.0})
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_cases([Stopped()], tmp_path)
    assert json.loads((tmp_path / "fine.json").read_text())["outcome"] == "cut short"
    assert "outcome: cut short" in (tmp_path / "fine.md").read_text()


def test_a_case_without_rows_is_written_without_a_table() -> None:
    class Empty(Fine):
        def run(self, quick: bool) -> Iterator[Row]:
            yield from ()

    assert "---" not in markdown(run_case(Empty(), None, False, {}))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.key)
def test_every_case_says_whether_it_can_run(case: Case) -> None:
    reason = case.can_run()
    assert reason is None or reason
    assert case.description.endswith(".")


def test_keys_are_unique() -> None:
    assert len({case.key for case in CASES}) == len(CASES)


def test_percentiles_are_values_that_were_measured() -> None:
    values = [float(value) for value in range(1, 101)]
    assert [percentile(values, share) for share in (0.5, 0.99, 1.0)] == [50.0, 99.0, 100.0]
    assert percentile([7.0], 0.01) == 7.0


def test_a_drift_of_the_machine_cancels_out_of_the_pairs() -> None:
    # Each run is slower by 1 than the one before; the load adds 5.
    without, added = [], []
    for start in range(0, 40, 4):
        first, busy, again, last = start + 100, start + 106, start + 107, start + 103
        without += [first, last]
        added.append((busy + again - first - last) / 2)
    found = summary(without, added)
    assert (found.added, found.noise) == (5.0, 0.0)
