"""What the page keeps and shows when something is missing, moved or reloaded."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from outrider.viewer.server import _FIRST, _META, PAGE
from tests.training.recorded_run import REASON
from tests.viewer.pages.browser.places import place, row_with, until
from tests.viewer.pages.serving import Served, serving

At = Callable[..., Any]


def test_filters_and_scroll_are_kept_by_back_and_reload(served: Served, at: At) -> None:
    page = at("all")
    page.get_by_label("outcome").select_option("tool_fault")
    until(page, "location.hash.includes('outcome=tool_fault')")
    page.set_viewport_size({"width": 700, "height": 300})
    page.mouse.wheel(0, 200)
    until(page, "/y=[1-9]/.test(location.hash)")
    scrolled = page.evaluate("scrollY")
    total = page.locator("[data-total]").get_attribute("data-total")
    page.locator("table.rollouts td.n a").first.evaluate("one => one.click()")
    page.wait_for_selector(".turn")
    page.go_back()
    page.wait_for_selector(f'[data-total="{total}"]')
    until(page, f"scrollY === {scrolled}")
    page.reload()
    page.wait_for_selector(f'[data-total="{total}"]')
    until(page, f"scrollY === {scrolled}")
    assert page.get_by_label("outcome").input_value() == "tool_fault"
    assert REASON in page.locator("table.rollouts").inner_text()


def test_the_settings_of_curves_are_in_the_address(at: At) -> None:
    page = at("curves?x=tokens&smoothing=0.5&open=loss")
    page.wait_for_selector('.plot[aria-label*="over policy tokens"]')
    assert page.locator("details[open] [data-metric='loss/policy']").count() == 1
    page.get_by_label("x axis").select_option("calls")
    until(page, "location.hash.includes('x=calls')")
    page.reload()
    page.wait_for_selector('.plot[aria-label*="over tool calls"]')
    assert page.locator("input[type=range]").input_value() == "0.5"


def test_constant_charts_are_folded_and_sections_are_in_order(served: Served, at: At) -> None:
    page = at("curves")
    titles = page.locator(".charts h2").all_inner_texts()
    order = ["held-out", "reward", "entropy", "group", "method", "mismatch"]
    assert titles == [title for title in order if title in titles] and len(titles) >= 5
    values = served.data("curves")["values"]
    constant = [name for name, own in values.items() if len(set(own)) == 1 and own[0] is not None]
    for name in constant:
        assert not page.locator(f'[data-metric="{name}"]').is_visible()
    assert page.evaluate("document.documentElement.scrollHeight") < 4000


def test_runs_that_differ_in_the_seed_are_one_mean_with_a_band(
    served: Served, recorded: Path, tmp_path: Path, open_page: At
) -> None:
    for seed in (11, 12):
        run = shutil.copytree(recorded, tmp_path / f"seed-{seed}")
        config = (run / "config.toml").read_text()
        (run / "config.toml").write_text(config.replace("seed = 3", f"seed = {seed}", 1))
    with serving([tmp_path]) as pair:
        page = open_page(f"{pair.address}#/run/{pair.ids[0]}/curves?over={pair.ids[1]}")
        page.wait_for_selector('[data-metric="reward/mean"] .plot[aria-label*="mean of 2 seeds"]')
        for selector in (".plot:not([aria-label*=seeds])", ".plot[aria-label*=seeds]"):
            page.get_by_role("button", name="mean of 2 seeds").click()
            page.wait_for_selector(f'[data-metric="reward/mean"] {selector}')
        page.get_by_label("mean of seeds").uncheck()
        page.wait_for_selector('[data-metric="reward/mean"] .plot[aria-label*="seed-12: from"]')
        page.close()


def test_the_healthy_range_is_a_band(at: At) -> None:
    page = at("all")

    def with_range(route: Any) -> None:
        answer = route.fetch()
        curves = answer.json()
        for about in curves["metrics"].values():
            about |= {"low": -1e9, "high": None}
        route.fulfill(response=answer, body=json.dumps(curves))

    pixels = """() => { const canvas = document.querySelector('[data-metric="reward/mean"] canvas');
        return [...canvas.getContext('2d').getImageData(canvas.width - 30, 20, 1, 1).data]; }"""
    found = []
    for is_changed in (False, True):
        if is_changed:
            page.route("**/data/curves.json*", with_range)
        page.goto(page.url.split("#")[0] + page.url[page.url.index("#") :].replace("/all", "/curves"))
        page.reload()
        page.wait_for_selector('[data-metric="reward/mean"] canvas')
        page.wait_for_timeout(100)
        found.append(page.evaluate(pixels))
    assert found[0] != found[1]


def test_the_numbers_of_a_token_appear_at_the_pointer(served: Served, at: At) -> None:
    row = row_with(served, kind="hybrid", sort="num_tokens", descending="1")

    def long(route: Any) -> None:
        answer = route.fetch()
        tokens = answer.json()
        for node in tokens["nodes"].values():
            for name, own in node.items():
                node[name] = own * 300
        route.fulfill(response=answer, body=json.dumps(tokens))

    page = at("all")
    page.route("**/data/tokens.json*", long)
    page.goto(f"{page.url.split('#')[0]}#/run/{served.ids[0]}/rollout/{place(row)}/{row['rollout']}")
    page.wait_for_selector(".tokens .t")
    token = page.locator(".tokens").last.locator(".t").nth(40)
    token.hover()
    reading = page.locator(".tokens").last.locator("xpath=..").locator(".reading")
    reading.wait_for()
    boxes = token.bounding_box(), reading.bounding_box()
    assert abs(boxes[0]["y"] - boxes[1]["y"]) < 80 and "entropy" in reading.inner_text()


def test_answers_and_failed_calls_are_columns_a_filter_and_an_ending(served: Served, at: At) -> None:
    row = row_with(served, kind="on-policy", sort="num_turns", descending="1")
    new = {
        "answer": "42 lamps", "targets": ["43", "44"], "reward_parts": {"exact_match": 0, "format": 0.5},
        "reason": "the answer is another number", "num_failed_calls": 2,
    }  # fmt: skip
    call = {"name": "search", "arguments": "the lamp", "status": "timeout", "seconds": 2.5}
    requested, values = [], dict.fromkeys(new)  # an older run has none

    def answer_with(route: Any) -> None:
        requested.append(route.request.url)
        answer = route.fetch()
        found = answer.json()
        for one in found.get("rows", found.get("rollouts")):
            one.update(values)
        for node in found.get("nodes", []):
            node["metadata"]["tool_calls"] = [call] * (node["origin"] == "policy")
        route.fulfill(response=answer, body=json.dumps(found))

    page = at(f"step/{row['where']}")
    page.route("**/data/rollouts.json*", answer_with)
    page.route("**/data/group.json*", answer_with)
    page.reload()
    page.wait_for_selector("table.rollouts tbody tr")
    assert "Answer" not in page.locator("table.rollouts thead").inner_text()
    values = new
    page.reload()
    page.get_by_label("failed calls").select_option("any")
    until(page, "location.hash.includes('failed=any')")
    until(page, "document.querySelector('select[name=failed]').value === 'any'")
    assert "failed=any" in requested[-1]
    head = page.locator("table.rollouts thead").inner_text()
    assert "Answer" in head and "Failed" in head
    assert "42 lamps" in page.locator("table.rollouts tbody").inner_text()
    page.goto(f"{page.url.split('#')[0]}#/run/{served.ids[0]}/rollout/{place(row)}/{row['rollout']}")
    page.wait_for_selector(".ending")
    words = page.locator(".ending").inner_text()
    for text in ("42 lamps", "43 · 44", "exact match 0 · format 0.5", "the answer is another number"):
        assert text in words
    calls = page.locator(".turn.policy .calls").first.inner_text()
    assert "timeout" in calls and "search the lamp" in calls and "2.5 s" in calls
    page.goto(f"{page.url.split('#')[0]}#/run/{served.ids[0]}/group/{place(row)}")
    page.wait_for_selector("table.group")
    assert "42 lamps" in page.locator("table.group").inner_text()


@pytest.fixture
def bare(chromium: Any) -> Iterator[Any]:
    """A page whose browser may complain of a refused request."""
    context = chromium.new_context()
    yield context.new_page()
    context.close()


def test_an_unknown_run_keeps_the_header(served: Served, bare: Any) -> None:
    bare.goto(f"{served.address}#/run/nothing/curves")
    bare.wait_for_selector(".fault")
    assert bare.locator("h1").inner_text() == "Not shown"
    bare.locator("header .brand").click()
    bare.wait_for_selector("h1:has-text('Runs')")


def test_a_cut_file_keeps_the_way_to_the_other_steps(recorded: Path, tmp_path: Path, bare: Any) -> None:
    run = shutil.copytree(recorded, tmp_path / "run")
    for folder in ("traces", "rollouts"):
        path = run / folder / "step-000002.parquet"
        path.write_bytes(path.read_bytes()[:100])
    with serving([run]) as cut:
        bare.goto(f"{cut.address}#/run/{cut.ids[0]}/step/step-000002")
        bare.wait_for_selector(".fault")
        assert bare.locator("h1").inner_text() == "Step 2"
        bare.get_by_label("behind: step 3").click()
        bare.wait_for_selector("h1:has-text('Step 3')")
        bare.close()


def test_runs_are_named_in_titles_and_told_apart(recorded: Path, tmp_path: Path, open_page: At) -> None:
    for name in ("a/run", "b/run", "実験"):
        shutil.copytree(recorded, tmp_path / name, ignore=shutil.ignore_patterns("checkpoints", "traces"))
    with serving([tmp_path]) as found:
        page = open_page(found.address)
        names = page.locator("table.runs th[scope=row] a").all_inner_texts()
        assert sorted(names) == ["a/run", "b/run", "実験"]
        page.get_by_role("link", name="実験").click()
        page.wait_for_selector("header .name")
        assert page.locator("header .name").inner_text() == "実験"
        until(page, "document.title.includes('実験')")
        page.close()


def test_a_bundle_opened_as_a_file_says_that_it_needs_a_server(bare: Any, tmp_path: Path) -> None:
    folder = shutil.copytree(PAGE, tmp_path / "page")
    text = (PAGE / "index.html").read_text()
    (folder / "index.html").write_text(text.replace(_FIRST, f"{_FIRST}\n{_META}"))
    bare.goto((folder / "index.html").as_uri())
    bare.wait_for_selector("text=A bundle needs a file server", timeout=10_000)
