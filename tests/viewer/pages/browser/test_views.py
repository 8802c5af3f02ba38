"""Each view on a real recorded run: what is read there is what is on disk."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import outrider
from outrider.metrics import declared_metric
from outrider.viewer.run_reader import read_alarms
from tests.training.recorded_run import REASON
from tests.viewer.pages.browser.places import place, row_with, until
from tests.viewer.pages.serving import Served

At = Callable[..., Any]


def test_runs_show_status_method_task_score_tokens_and_alarm(several: Served, open_page: At) -> None:
    page = open_page(several.address)
    page.wait_for_selector("tbody tr:nth-child(3)")
    first = page.locator("tbody tr").first.inner_text()
    for text in ("finished", "combined", "tools", "%", "3 / 3", "ALARM"):
        assert text in first
    compare = page.get_by_role("link", name="Compare the chosen")
    assert page.locator("a.button").get_attribute("href") is None
    page.get_by_label("choose rapo").check()
    page.get_by_label("choose empo2").check()
    with page.context.expect_page() as opened:
        compare.click()
    opened.value.wait_for_load_state()
    assert "compar" in opened.value.title().lower() or "compar" in opened.value.inner_text("body").lower()
    assert opened.value.locator("script").count() == 0


def test_curves_show_every_metric_with_the_registrys_words(served: Served, at: At) -> None:
    page = at("curves")
    curves = served.data("curves")
    names = ["held-out score", *curves["values"], *curves["cold_start"]["values"]]
    cards = page.locator("[data-metric]")
    assert sorted(cards.evaluate_all("all => all.map(one => one.dataset.metric)")) == sorted(names)
    for name in ("reward/mean", "entropy/token_mean"):
        words = page.locator(f'[data-metric="{name}"]').inner_text()
        assert declared_metric(name).meaning in words and declared_metric(name).healthy_range in words
    page.get_by_label("find a metric").fill("reward/mean")
    until(page, "document.querySelectorAll('[data-metric]').length === 1")
    plot = page.locator('[data-metric="reward/mean"] .plot')
    before = plot.get_attribute("aria-label")
    page.get_by_label("x axis").select_option("tokens")
    page.wait_for_selector('.plot[aria-label*="over policy tokens"]')
    assert "over step" in before
    page.get_by_label("smoothing").fill("0.8")
    page.wait_for_selector(".plot canvas")


def test_a_click_on_a_point_opens_its_step(at: At) -> None:
    page = at("curves")
    canvas = page.locator('[data-metric="reward/mean"] .u-over')
    canvas.wait_for()
    box = canvas.bounding_box()
    page.mouse.move(box["x"] + box["width"] - 2, box["y"] + box["height"] / 2)
    page.mouse.click(box["x"] + box["width"] - 2, box["y"] + box["height"] / 2)
    page.wait_for_selector("h1:has-text('Step 3')")


def test_several_runs_lie_over_each_other(several: Served, open_page: At) -> None:
    page = open_page(f"{several.address}#/run/{several.ids[0]}/curves")
    page.get_by_label("rapo").check()
    page.wait_for_selector('[data-metric="reward/mean"] .plot[aria-label*="rapo: from"]')
    page.get_by_role("button", name="rapo").click()
    page.wait_for_selector('[data-metric="reward/mean"] .plot:not([aria-label*="rapo: from"])')
    page.reload()
    page.wait_for_selector('[data-metric="reward/mean"] .plot')
    assert page.get_by_label("rapo").is_checked()
    assert page.get_by_role("button", name="rapo").get_attribute("aria-pressed") == "false"


def test_a_step_filters_by_histogram_and_kind_and_sorts(served: Served, at: At) -> None:
    page = at("step/step-000001")
    rows = page.locator("table.rollouts tbody tr")
    assert rows.count() == 8
    page.locator("button.bar", has=page.locator("span")).last.click()
    until(page, "document.querySelectorAll('table.rollouts tbody tr').length < 8")
    rows_there = served.data("rollouts", where="step-000001")["rows"]
    best = max(row["episode_return"] for row in rows_there if row["episode_return"] is not None)
    assert page.locator("[data-total]").get_attribute("data-total") == str(
        served.data("rollouts", where="step-000001", low=str(best - 0.05))["total"]
    )
    page.get_by_role("button", name=re.compile("show all")).click()
    until(page, "document.querySelectorAll('table.rollouts tbody tr').length === 8")
    page.get_by_label("outcome").select_option("tool_fault")
    until(page, "document.querySelectorAll('table.rollouts tbody tr').length === 1")
    assert REASON in rows.first.inner_text()
    page.get_by_label("outcome").select_option("")
    page.get_by_role("button", name="Tokens").click()
    page.wait_for_selector("th[aria-sort=descending]:has-text('Tokens')")
    heads = page.locator("table.rollouts thead th").all_inner_texts()
    cells = [row.locator("th, td").nth(heads.index("Tokens")) for row in rows.all()]
    tokens = [int(cell.inner_text()) for cell in cells]
    assert tokens == sorted(tokens, reverse=True) and len(tokens) == 8


def test_search_goes_over_all_steps_and_opens_the_turn(served: Served, at: At) -> None:
    page = at("step/step-000001")
    page.get_by_label("in all steps").check()
    page.keyboard.press("Escape")
    page.get_by_label("Search in text").fill("where is")
    page.wait_for_selector(".hits li")
    assert page.locator(".hits li").count() == len(served.data("search", words="where is")["hits"])
    page.locator(".hits a").first.click()
    page.wait_for_selector(".turn.prompt")


def test_a_group_shows_splices_by_origin_and_folds_their_provenance(served: Served, at: At) -> None:
    page = at(f"group/{place(row_with(served, kind='hybrid'))}")
    splice = page.locator(".chip.buffer").first
    assert "similarity" not in splice.inner_text()
    splice.locator("summary").click()
    assert re.search(r"similarity -?\d\.\d{3} · from given/\w+#\d", splice.inner_text())
    assert splice.evaluate("one => getComputedStyle(one).borderLeftColor") != page.locator(
        ".chip.policy"
    ).first.evaluate("one => getComputedStyle(one).borderLeftColor")
    page = at(f"group/{place(row_with(served, kind='tips'))}")
    assert re.search(
        r"written by rollout tasks-\d/\d at step \d", page.locator(".chip.memory").first.text_content()
    )


def test_a_group_has_a_table_with_the_equation_of_each_advantage(served: Served, at: At) -> None:
    row = row_with(served, kind="hybrid", sort="advantage", descending="1")
    page = at(f"group/{place(row)}")
    group = served.data("group", where=row["where"], trace=row["trace_id"])
    equations = 0
    for one in group["rollouts"]:
        text = page.locator(f'[data-row="{one["rollout"]}"]').inner_text()
        why = group["advantages"]["rollouts"].get(str(one["rollout"]), {"equation": ""})
        assert why["equation"] in text and one["kind"] in text
        shown = "–" if one["advantage"] is None else f"{abs(one['advantage']):.3g}"
        assert shown in text
        equations += bool(why["equation"])
    assert equations > 0 and group["advantages"]["formula"] in page.locator(".facts").inner_text()
    leaf = page.locator("[data-leaf]").first
    assert leaf.evaluate("one => getComputedStyle(one).position") == "sticky"
    top = "[...document.querySelectorAll('.tree, table.group')].map(one => one.getBoundingClientRect().top)"
    assert page.evaluate(top) == sorted(page.evaluate(top))  # the table comes first


def test_two_rollouts_side_by_side_from_the_first_different_token(served: Served, at: At) -> None:
    row = row_with(served, kind="hybrid")
    page = at(f"group/{place(row)}")
    for number in (row["rollout"], (row["rollout"] + 1) % 4):
        page.get_by_label(f"choose rollout {number}").check()
    page.get_by_role("link", name=re.compile("side by side")).click()
    page.wait_for_selector("[data-column] mark")
    given = {"where": row["where"], "trace": row["trace_id"]}
    nodes = {one["node_id"]: one for one in served.data("group", **given)["nodes"]}
    texts = []
    for number in (row["rollout"], (row["rollout"] + 1) % 4):
        tokens = served.data("tokens", **given, rollout=str(number))["nodes"]
        path = sorted(map(int, tokens))
        texts.append(
            [
                piece
                for node in path
                if nodes[node]["origin"] == "policy"
                for piece in tokens[str(node)]["tokens"]
            ]
        )
    first = next(i for i, (one, other) in enumerate(zip(*texts, strict=False)) if one != other)
    marked = page.locator("[data-column] mark").all_inner_texts()
    assert marked == [texts[0][first], texts[1][first]]


def test_a_rollout_is_a_chat_with_values_for_every_token(served: Served, recorded: Path, at: At) -> None:
    row = row_with(served, kind="hybrid", sort="num_turns", descending="1")
    page = at(f"rollout/{place(row)}/{row['rollout']}", permissions=["clipboard-read", "clipboard-write"])
    assert page.locator(".turn").count() >= row["num_turns"] + 2
    assert page.locator(".turn.environment details[open]").count() == 0
    page.locator(".turn.environment summary").first.click()
    assert page.locator(".turn.environment details[open]").count() == 1
    given = {"where": row["where"], "trace": row["trace_id"], "rollout": str(row["rollout"])}
    tokens = served.data("tokens", **given)["nodes"]
    first = next(number for number in sorted(tokens, key=int) if tokens[number]["ratios"])
    pre = page.locator(f'pre[data-node="{first}"]')
    looks = {}
    for name in ("entropy", "logprob", "advantage", "ratio", "gap"):
        page.locator("select[name=shade]").select_option(name)
        looks[name] = pre.locator(".t").evaluate_all("all => all.map(one => one.className)")
        assert not any("none" in look for look in looks[name])
    assert looks["entropy"] != looks["advantage"]
    pre.locator(".t").first.hover()
    text = page.locator(f'.turn[data-node="{first}"] .reading').inner_text()
    assert all(name in text for name in ("entropy", "log-prob", "advantage", "ratio", "gap"))
    assert f"{tokens[first]['entropies'][0]:.3g}"[:4] in text
    page.get_by_role("button", name="Copy as JSON").click()
    until(page, "document.getElementById('told').textContent === 'copied as JSON'")
    copied = json.loads(page.evaluate("navigator.clipboard.readText()"))
    assert copied["node_id"] == row["node_id"] and copied["turns"][-1]["node_id"] == row["node_id"]
    page.get_by_text("Play again").click()
    assert page.locator(".command").inner_text() == f"outrider replay {recorded} --step {row['step']}"


def test_a_fault_is_shown_with_its_reason_and_its_turns(served: Served, at: At) -> None:
    row = row_with(served, outcome="tool_fault")
    page = at(f"rollout/{place(row)}/{row['rollout']}")
    assert REASON in page.locator(".fault").inner_text()
    assert page.locator(".turn.policy").count() == row["num_turns"]


def test_memory_is_searched_and_tells_what_was_shown_when(served: Served, at: At) -> None:
    page = at("memory/2")
    held = served.data("memory", step="2")
    assert f"Tips: {held['tips']['total']}" in page.locator(".columns").inner_text()
    assert f"(revision {held['steps']['revision']})" in page.locator(".columns").inner_text()
    assert page.locator(".shown li").count() == len(served.data("shown", step="2"))
    page.get_by_label("Search in memories").fill("the lamp")
    few = served.data("memory", step="2", words="the lamp")["steps"]["total"]
    until(page, f"[...document.querySelectorAll('.items')].at(-1).children.length === {few}")
    page.get_by_role("button", name="Nearest steps").click()
    page.wait_for_selector("h2:has-text('Nearest steps')")
    near = served.data("neighbours", step="2", memory="steps", words="the lamp")
    assert f"{near[0]['similarity']:.3f}" in page.locator(".shown").first.inner_text()
    page.get_by_role("button", name="shown when?").first.click()
    page.wait_for_selector("h2:has-text('was shown')")


def test_what_if_shows_siblings_without_the_splice_and_the_differences(served: Served, at: At) -> None:
    row = row_with(served, kind="hybrid")
    page = at(f"counter/{place(row)}/{row['rollout']}")
    point = page.locator('[data-point="retrieved step"]').first
    group = served.data("group", where=row["where"], trace=row["trace_id"])
    siblings = {one["rollout"]: one for one in group["rollouts"] if one["num_splices"] == 0}
    rows = point.locator("tbody tr").all()
    shown = [entry.locator("th").inner_text() for entry in rows]
    assert len(shown) >= 3 and shown[0] == f"{row['rollout']} (with)" and shown[-1].startswith("mean of")
    for entry, name in zip(rows[1:-1], shown[1:-1], strict=True):
        other = siblings[int(name)]["episode_return"]
        text = entry.locator("td").nth(2).inner_text()
        if other is None or row["episode_return"] is None:
            assert text == "–"
        else:
            assert float(text) == row["episode_return"] - other
        assert re.fullmatch(r"[+-]?[\d.e-]+", entry.locator("td").nth(3).inner_text())


def test_alarms_lead_to_their_step(recorded: Path, at: At) -> None:
    page = at("")
    found = read_alarms(recorded)
    assert page.locator("ol.alarms li").count() == len(found)
    before = [alarm["text"] for alarm in found if alarm["step"] is None]
    assert page.locator("ol.alarms li", has_text="before training").count() == len(before)
    step = next(alarm["step"] for alarm in found if alarm["step"] is not None)
    page.locator("ol.alarms a").last.click()
    page.wait_for_selector(f"h1:has-text('Step {step}')")


def test_a_task_is_shown_over_steps_and_evaluations(served: Served, recorded: Path, at: At) -> None:
    run = outrider.load_run(recorded)
    tables = [run.evaluation_rollouts(number) for number in (0, 1)]
    held_out = {row["task_key"] for table in tables for row in table.to_pylist()}
    trained = [row for step in run.steps() for row in run.rollouts(step).to_pylist()]
    task = next(row["task_key"] for row in trained if row["task_key"] in held_out)
    page = at(f"task/{task}")
    places = page.locator("[data-place]").evaluate_all("all => all.map(one => one.dataset.place)")
    steps = {f"step-{row['step']:06d}" for row in trained if row["task_key"] == task}
    assert set(places) == steps | {"evaluation-000", "evaluation-001"}
    assert places[0] == "evaluation-000"
    [rollouts, num_places] = re.findall(r"\d+ \w+", page.locator("p.quiet").first.inner_text())
    for text in (rollouts, num_places):
        assert text.endswith("s") == (text.split()[0] != "1")
    assert page.locator(".mark-of").count() == sum(row["task_key"] == task for row in trained) + 2
