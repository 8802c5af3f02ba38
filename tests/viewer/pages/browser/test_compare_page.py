"""The page of ``outrider compare``: picture, sentence, folded tests; for screen readers, and narrow."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.viewer.pages.browser.conftest import AXE
from tests.viewer.pages.serving import Served, serving

RUNS = Path(__file__).parents[4] / "records" / "packs" / "demo.pack" / "runs"


@pytest.fixture(scope="module")
def compared(chromium: Any) -> Iterator[tuple[Served, str]]:
    names = [f"{method}-{seed}" for method in ("grpo", "rapo", "sft") for seed in range(3)]
    with serving([RUNS / name for name in names]) as served:
        yield served, f"{served.address}compare?" + "&".join(f"run={run}" for run in served.ids)


def test_the_picture_and_the_sentence_come_before_the_tests_which_are_folded(
    compared: tuple[Served, str], open_page: Callable[..., Any]
) -> None:
    page = open_page(compared[1])
    assert page.locator("svg.seeds circle").count() == 9
    assert "(imitation only)" in page.locator("svg.seeds").get_attribute("aria-label")
    picture, sentences = (page.locator(name).first.bounding_box() for name in ("svg.seeds", "main > ul"))
    assert picture["y"] < sentences["y"] < 800 - sentences["height"]
    assert not page.get_by_text("p over seeds, Holm").is_visible()
    page.get_by_text("Differences", exact=True).click()
    assert page.get_by_text("p over seeds, Holm").is_visible()


@pytest.mark.parametrize(("scheme", "width"), [("light", 390), ("dark", 1280)])
def test_axe_finds_nothing_on_the_page_of_a_comparison(
    compared: tuple[Served, str], open_page: Callable[..., Any], scheme: str, width: int
) -> None:
    if not AXE.is_file():
        pytest.skip("axe-core is not here: make test-viewer fetches it from npm")
    page = open_page(compared[1], scheme=scheme, width=width)
    assert page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth") <= 0
    for details in page.locator("details").all():
        details.evaluate("one => one.open = true")
    page.evaluate(AXE.read_text(encoding="utf-8"))
    found = page.evaluate("axe.run()")["violations"]
    assert [(one["id"], [node["html"][:90] for node in one["nodes"][:3]]) for one in found] == []
