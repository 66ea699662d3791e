"""The page as a browser shows it."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path

import pytest

from lmcache_mp_safe.testing.browser import Browser
from lmcache_mp_safe.verify.checks import Answer
from lmcache_mp_safe.verify.client import Client
from lmcache_mp_safe.verify.page import page
from lmcache_mp_safe.verify.run import Result, Settings, Target, run
from lmcache_mp_safe.verify.stub import Fault, Stub
from lmcache_mp_safe.verify.traffic import generated

# Every drawing is wide, has axes with numbers and a mark for each answer, and no mark lies outside of it; text is dark
# on light; nothing is cut off at the right; nothing came from elsewhere.
_LOOK = """
const problems = [];
const inside = (inner, outer) =>
  inner.left >= outer.left - 1 && inner.right <= outer.right + 1 &&
  inner.top >= outer.top - 1 && inner.bottom <= outer.bottom + 1;
const overlap = (one, other) =>
  one.left < other.right && other.left < one.right && one.top < other.bottom && other.top < one.bottom;
const drawings = [...document.querySelectorAll("figure > svg")];
if (drawings.length !== 3) problems.push(`${drawings.length} drawings`);
for (const [number, drawing] of drawings.entries()) {
  const frame = drawing.getBoundingClientRect();
  if (frame.width < 300 || frame.height < 80) problems.push(`drawing ${number}: ${frame.width} x ${frame.height}`);
  const marks = [...drawing.querySelectorAll("circle")];
  if (marks.length < 24) problems.push(`drawing ${number}: ${marks.length} marks`);
  if (drawing.querySelectorAll("text").length < 12) problems.push(`drawing ${number}: axes without numbers`);
  const words = [...drawing.querySelectorAll("text")];
  for (const one of words) for (const other of words.slice(words.indexOf(one) + 1))
    if (overlap(one.getBoundingClientRect(), other.getBoundingClientRect()))
      problems.push(`drawing ${number}: ${one.textContent} lies on ${other.textContent}`);
  if (words.some(word => word.textContent.includes("e+"))) problems.push(`drawing ${number}: numbers with an exponent`);
  for (const mark of [...marks, ...words]) {
    if (!inside(mark.getBoundingClientRect(), frame)) problems.push(`drawing ${number}: outside: ${mark.outerHTML}`);
    if (["none", "rgb(0, 0, 0)"].includes(getComputedStyle(mark).fill)) problems.push(`no colour: ${mark.outerHTML}`);
  }
}
if (!document.querySelector(".verdict b").innerText) problems.push("no verdict");
const root = document.documentElement;
if (root.scrollWidth > root.clientWidth) problems.push(`${root.scrollWidth} px in ${root.clientWidth} px`);
const loaded = performance.getEntriesByType("resource").map(entry => entry.name);
if (loaded.length) problems.push(`loaded ${loaded}`);
return problems;
"""


@pytest.fixture(scope="module")
def found() -> Result:
    async def go() -> Result:
        async with (
            Client("http://with.invalid", timeout_s=10, transport=Stub(Fault.WRONG_STATE, 14).transport()) as tested,
            Client("http://without.invalid", timeout_s=10, transport=Stub().transport()) as baseline,
        ):
            targets = Target(tested, "stub"), Target(baseline, "stub")
            return await run(*targets, generated(0, 200), Settings(requests=12), lambda *_: None)

    return asyncio.run(go())


def look(browser: Browser, text: str, tmp_path: Path) -> list[str]:
    """What is wrong with the page."""
    file = tmp_path / "page.html"
    file.write_text(text)
    browser.complaints()
    browser.open(file)
    return [*browser.run(_LOOK), *browser.complaints()]


def test_page_is_drawn_whole_and_without_a_complaint(browser: Browser, found: Result, tmp_path: Path) -> None:
    assert look(browser, page(found), tmp_path) == []
    assert browser.run("return document.querySelector('.verdict b').innerText") == "corrupt"
    far = browser.run("return getComputedStyle(document.querySelector('circle.far')).fill")
    assert far == "rgb(192, 24, 43)"


@pytest.mark.parametrize("factor", [20, 3000])
def test_axes_of_long_prompts_can_be_read(browser: Browser, found: Result, tmp_path: Path, factor: int) -> None:
    def longer(answer: Answer) -> Answer:
        return dataclasses.replace(
            answer, prompt_tokens=answer.prompt_tokens * factor, cached_tokens=(answer.cached_tokens or 0) * factor
        )

    names = ("baseline", "control", "first", "again")
    rows = [dataclasses.replace(row, **{name: longer(getattr(row, name)) for name in names}) for row in found.rows]
    assert look(browser, page(dataclasses.replace(found, rows=rows)), tmp_path) == []


@pytest.mark.parametrize(
    ("whole", "broken"),
    [
        ("circle { fill-opacity", "circle { transform: translate(2000px, 0); fill-opacity"),
        ("svg { width: 100%", "svg { width: 10%"),
        ("font-size: 13px", "font-size: 40px"),
        ('<circle class="hit"', '<circle class="hot"'),
        ("<body>", '<body><img src="nowhere.png">'),
        ("<body>", "<body><script>nothing()</script>"),
        ("<body>", '<body><div style="width: 3000px">wide</div>'),
        ("<table>", "<!--"),
    ],
)
def test_page_that_is_broken_is_noticed(
    browser: Browser, found: Result, tmp_path: Path, whole: str, broken: str
) -> None:
    assert whole in page(found)
    assert look(browser, page(found).replace(whole, broken), tmp_path) != []
