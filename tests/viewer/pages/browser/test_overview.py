"""The first tab of a run: eight answers in one window, for everybody, from this machine alone."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from outrider.viewer import overview
from outrider.viewer.report import write_report
from tests.viewer.pages.browser.conftest import AXE
from tests.viewer.pages.serving import Served, serving
from tests.viewer.planted_run import EFFECT, FINDINGS, write_planted_run
from tests.viewer.synthetic_run import write_run

WIDE = "document.documentElement.scrollWidth - document.documentElement.clientWidth"


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A healthy run, and one with as many problems as the page shows."""
    root = tmp_path_factory.mktemp("planted")
    runs = [write_planted_run(root / name, is_bad=name == "b-bad") for name in ("a-good", "b-bad")]

    def is_bad(run: Path) -> bool:
        return run.name == "b-bad"

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(overview, "find_problems", lambda run: list(FINDINGS) if is_bad(run) else [])
        other = replace(EFFECT, kind="tips", text=EFFECT.text.replace("a retrieved step", "tips"))
        patch.setattr(overview, "effects", lambda run: [EFFECT, other] if is_bad(run) else [EFFECT])
        with serving(runs) as served:
            yield served


@pytest.mark.parametrize("number", [0, 1])
def test_eight_questions_are_answered_without_scrolling(
    planted: Served, open_page: Callable[..., Any], number: int
) -> None:
    page = open_page(f"{planted.address}#/run/{planted.ids[number]}")
    page.set_viewport_size({"width": 1280, "height": 800})
    questions = page.locator(".answers h2").all_inner_texts()
    assert len(questions) == 8 and all(question.endswith("?") for question in questions)
    ends = page.locator(".answers .card").evaluate_all(
        "all => all.map(e => e.getBoundingClientRect().bottom)"
    )
    assert max(ends) <= 800
    cut = page.locator(".answers :is(section, p, ol, li)").evaluate_all(
        "all => all.filter(e => e.scrollWidth > e.clientWidth + 1)"
        ".filter(e => e.clientWidth).map(e => e.outerHTML)"
    )
    assert cut == []
    assert page.locator("header a[aria-current]").inner_text() == "Overview"
    page.locator(".answers a", has_text="by advantage").click()
    page.wait_for_selector("h1:has-text('Step 6')")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_readers_of_screens_meet_no_violation(
    planted: Served, open_page: Callable[..., Any], scheme: str
) -> None:
    if not AXE.is_file():
        pytest.skip("axe-core is not here: make test-viewer fetches it from npm")
    page = open_page(f"{planted.address}#/run/{planted.ids[1]}", scheme=scheme)
    page.evaluate(AXE.read_text(encoding="utf-8"))
    violations = page.evaluate("axe.run()")["violations"]
    assert [(one["id"], [node["html"][:90] for node in one["nodes"]]) for one in violations] == []
    charts = page.locator("main svg").evaluate_all("all => all.map(e => e.getAttribute('aria-label'))")
    assert len(charts) == 6 and all(label and "last" in label for label in charts)
    for width in (640, 390):  # 640: a zoom of 200 %
        page.set_viewport_size({"width": width, "height": 800})
        assert page.evaluate(WIDE) <= 0


def test_focus_stays_on_its_link_when_the_run_changes(tmp_path: Path, open_page: Callable[..., Any]) -> None:
    run = write_planted_run(tmp_path / "run", is_bad=False)
    with serving([run]) as served:
        page = open_page(f"{served.address}#/run/{served.ids[0]}")
        page.locator(".answers a").first.focus()
        href = page.evaluate("document.activeElement.href")
        with (run / "evaluations.jsonl").open("a") as stream:
            stream.write("damaged\n")
        page.wait_for_selector(".notes:has-text('evaluations.jsonl')")
        assert page.evaluate("document.activeElement.href") == href
        page.close()  # else the server waits for it


def test_a_report_has_landmarks_and_fits_a_narrow_window(tmp_path: Path, chromium: Any) -> None:
    run = write_run(tmp_path / "run", num_steps=4)
    lines = (run / "evaluations.jsonl").read_text().replace("after training", "L" * 400)
    (run / "evaluations.jsonl").write_text(lines)
    page = chromium.new_page(viewport={"width": 390, "height": 800}, bypass_csp=True)
    page.goto(write_report(run).as_uri())
    page.evaluate(
        "document.querySelectorAll('details').forEach(e => { e.open = true });"
        "document.querySelectorAll('.node .soft').forEach(e => { e.textContent = 'x'.repeat(400) })"
    )
    assert page.locator(".node .soft").count() > 0
    assert page.evaluate(WIDE) <= 0
    if AXE.is_file():
        page.evaluate(AXE.read_text(encoding="utf-8"))
        violations = page.evaluate("axe.run()")["violations"]
        assert [(one["id"], [node["html"][:90] for node in one["nodes"]]) for one in violations] == []
    page.close()
