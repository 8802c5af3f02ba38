"""Keys, widths, light and dark, readers of screens; and text that wants to be more than text."""

import json
import re
import threading
from collections.abc import Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from outrider.cli import main
from outrider.types import Origin, Outcome
from outrider.viewer.records import (
    ROLLOUT_SCHEMA,
    ROLLOUTS,
    SCHEMA,
    StepFiles,
    TraceRow,
    rollouts_from_traces,
    step_file,
)
from tests.viewer.pages.browser.conftest import AXE
from tests.viewer.pages.browser.places import VIEWS, place, row_with, until, views
from tests.viewer.pages.serving import Served, serving

At = Callable[..., Any]
ATTACK = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"
TURNED, ESCAPED = "abc\u202egnp.exe\u2066", "\x1b[2J\x1b]0;owned\x07 bell"


def test_j_and_k_walk_the_rollouts(served: Served, at: At) -> None:
    page = at("step/step-000001")
    order = page.locator("table.rollouts tbody tr").evaluate_all("all => all.map(one => one.dataset.rollout)")
    page.keyboard.press("j")
    page.keyboard.press("j")
    page.keyboard.press("k")
    page.keyboard.press("Enter")
    page.wait_for_selector(".turn")
    shown = page.url.rpartition("/rollout/")[2]
    page.keyboard.press("j")
    until(page, f"!location.hash.endsWith({json.dumps(shown)})")
    where, step, group, rollout = order[1].split("/")
    assert page.url.endswith(f"/rollout/{where}/{group}/{rollout}") and step == "1"


def test_slash_searches_g_opens_the_group_and_arrows_go_through_steps(served: Served, at: At) -> None:
    page = at("step/step-000002")
    page.keyboard.press("/")
    assert page.evaluate("document.activeElement.type") == "search"
    page.keyboard.type("jk/g")
    assert page.get_by_label("Search in text").input_value() == "jk/g"
    page.keyboard.press("Escape")
    page.keyboard.press("ArrowRight")
    page.wait_for_selector("h1:has-text('Step 3')")
    page.keyboard.press("ArrowLeft")
    page.wait_for_selector("h1:has-text('Step 2')")
    row = row_with(served, kind="hybrid")
    page = at(f"rollout/{place(row)}/{row['rollout']}")
    page.keyboard.press("g")
    page.wait_for_selector(".tree")


@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("width", [640, 390])  # 640: a window of 1280 at a zoom of 200 %
def test_nothing_is_wider_than_the_window(served: Served, at: At, name: str, width: int) -> None:
    page = at(views(served)[name], width=width)
    wide = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
    assert page.evaluate(wide) <= 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_readers_of_screens_meet_no_violation(served: Served, open_page: At, scheme: str) -> None:
    if not AXE.is_file():
        pytest.skip("axe-core is not here: make test-viewer fetches it from npm")
    source = AXE.read_text(encoding="utf-8")
    addresses = {name: f"#/run/{served.ids[0]}/{path}" for name, path in views(served).items()}
    for name, path in {**addresses, "runs": ""}.items():
        page = open_page(f"{served.address}{path}", scheme=scheme)
        page.wait_for_timeout(50)  # the first charts are drawn when they are seen
        page.evaluate(source)
        found = page.evaluate("axe.run()")["violations"]
        assert [(one["id"], [node["html"][:90] for node in one["nodes"][:3]]) for one in found] == [], name
        page.close()


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A run whose model, tasks and tools write what they should not."""
    run = tmp_path_factory.mktemp("hostile") / "run"
    run.mkdir()
    (run / "config.toml").write_text('[algorithm]\ntype = "<b onclick=x>rapo</b>"\n')
    for name in ("metrics.jsonl", "evaluations.jsonl"):
        (run / name).write_text("")
    (run / "notes.jsonl").write_text(json.dumps({"step": 1, "text": f"ALARM: {ATTACK}{TURNED}"}) + "\n")
    key = f"{ATTACK}/../..?#%00"
    common = {"step": 1, "task_key": key, "trace_id": "1/0", "rollout": 0}
    rows = [
        TraceRow(**common, node_id=0, parent_id=-1, origin=Origin.PROMPT, text=ATTACK + TURNED),
        TraceRow(
            **common, node_id=1, parent_id=0, origin=Origin.POLICY, text=ATTACK + ESCAPED,
            tokens=(ATTACK, TURNED, ESCAPED), logprobs=(-1.0,) * 3, entropies=(1.0,) * 3,
            metadata=json.dumps({"tools": [ATTACK], "__proto__": {"owned": 1}}),
        ),
        TraceRow(
            **common, node_id=2, parent_id=1, origin=Origin.BUFFER, text=ATTACK,
            metadata=json.dumps({"similarity": 0.5, "source": ATTACK, "agent": TURNED}),
        ),
        TraceRow(
            **common, node_id=3, parent_id=2, origin=Origin.ENVIRONMENT, text="x" * 1_000_000 + ATTACK,
            outcome=Outcome.FINISHED, episode_return=float("inf"), advantage=0.5, hybrid=True,
            metadata=json.dumps({"help": [{"source": "sibling", "text": f"{TURNED} {ATTACK}", "tokens": 9}]}),
        ),
    ]  # fmt: skip
    StepFiles(run / "traces").write_rows(step_file(1), rows, SCHEMA)
    StepFiles(run / ROLLOUTS).write_rows(step_file(1), list(rollouts_from_traces(rows)), ROLLOUT_SCHEMA)
    with serving([run]) as found:
        yield found


@pytest.mark.parametrize(
    "path",
    [
        "step/step-000001",
        "group/step-000001/0",
        "rollout/step-000001/0/0",
        "counter/step-000001/0/0",
        "memory/1",
        "curves",
        "all",
        "",
    ],
)
def test_hostile_text_is_text(hostile: Served, open_page: At, path: str) -> None:
    page = open_page(f"{hostile.address}#/run/{hostile.ids[0]}/{path}")
    page.wait_for_timeout(100)  # long enough for a picture that fails to load
    assert page.locator(".fault").count() == 0
    assert page.locator("script").count() == 1 and page.locator("img").count() == 0
    assert "owned" not in page.title().replace("title='owned'", "")
    words = page.inner_text("body")
    assert not set(words) & {"\u202e", "\u2066", "\x1b", "\x07"}
    assert page.evaluate("({}).owned === undefined")


def test_what_the_teacher_saw_is_folded(hostile: Served, open_page: At) -> None:
    page = open_page(f"{hostile.address}#/run/{hostile.ids[0]}/rollout/step-000001/0/0")
    block = page.locator("details.teacher")
    assert not block.locator("pre").is_visible()
    block.locator("summary").click()
    assert block.locator("summary").text_content() == "What the teacher saw sibling · 9 tokens"
    assert block.locator("pre").inner_text().endswith(ATTACK)


def test_a_turn_of_a_megabyte_is_folded_and_comes_whole(hostile: Served, open_page: At) -> None:
    page = open_page(f"{hostile.address}#/run/{hostile.ids[0]}/rollout/step-000001/0/0")
    page.locator(".turn.environment summary").click()
    words = page.locator(".turn.environment pre")
    assert len(words.text_content()) < 10_000
    page.get_by_role("button", name="more letters").click()
    until(page, "document.querySelector('.turn.environment pre').textContent.length > 1000000")
    assert words.text_content().endswith(ATTACK)


@pytest.fixture(scope="module")
def bundled(recorded: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a file server in a bundle's folder."""
    folder = tmp_path_factory.mktemp("bundle") / "page"
    assert main(["view", str(recorded), "--bundle", str(folder)]) == 0
    assert main(["view", str(recorded), "--bundle", str(folder)]) == 2  # never over what is there

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            """Nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()


@pytest.mark.parametrize("name", VIEWS)
def test_a_bundle_shows_the_same_without_our_server(
    served: Served, at: At, bundled: str, open_page: At, name: str
) -> None:
    path = views(served)[name]
    ours = _lines(at(path))
    page = open_page(f"{bundled}#/run/{served.ids[0]}/{path}")
    assert _lines(page) == ours and len(ours) > 3


def _lines(page: Any) -> list[str]:
    """What is read there; only a server finds nearest neighbours, and names its host and its folders."""
    lines = [line.strip() for line in page.inner_text("main").splitlines()]
    lines = [
        re.sub(", host [^,]*|[^ ]*/", "", line) if "host" in line or ".../" in line else line
        for line in lines
    ]
    return [line for line in lines if line and not line.startswith("Nearest ")]


def test_a_bundle_filters_and_searches_by_itself(served: Served, bundled: str, open_page: At) -> None:
    page = open_page(f"{bundled}#/run/{served.ids[0]}/all")
    assert page.locator("[data-total]").get_attribute("data-total") == str(served.data("rollouts")["total"])
    page.get_by_label("kind").select_option("hybrid")
    hybrids = served.data("rollouts", kind="hybrid")["total"]
    page.wait_for_selector(f'[data-total="{hybrids}"]')
    page.get_by_label("Search in text").fill("where is")
    page.wait_for_selector(".hits li")
    assert page.locator(".hits li").count() == len(served.data("search", words="where is")["hits"])
