"""Where the points of a protocol are printed: comparisons, reports, cards and packs."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from outrider.cli import main
from outrider.commands.protocol import find_difference
from outrider.config import to_toml
from outrider.errors import ConfigError, DataError
from outrider.evaluation.compare import compare, load_run
from outrider.evaluation.compare_report import html_page, markdown_page
from outrider.evaluation.hub import find_base, model_card
from outrider.evaluation.packs import make_pack, verify
from outrider.evaluation.tasks import config_of_run
from outrider.protocols import find_protocol, nested_settings, run_difference
from outrider.runs import Run
from outrider.training.settings import RunSettings
from outrider.viewer.report import write_report
from outrider.viewer.run_reader import read_run
from tests.evaluation.pack_runs import write_questions, write_run
from tests.evaluation.test_compare import make_run
from tests.viewer.synthetic_run import write_run as write_synthetic_run

NAME = "verl-agent-alfworld"


def window(num_steps: int) -> list[str]:
    return ['environment.context = "window"', f"environment.window.steps = {num_steps}"]


def record_of(run: Path, protocol: str = NAME, **changes: int) -> None:
    """Write the record of a run that names a protocol, with other rollout settings than it."""
    tree = nested_settings(find_protocol(protocol).settings())
    tree["rollout"] |= changes
    tree |= {"protocol": protocol, "protocol_sha256": find_protocol(protocol).sha256, "seed": 0}
    (run / "config.toml").write_text(to_toml(tree))


def test_comparison_marks_runs_of_two_protocols(tmp_path: Path) -> None:
    """SEED#2, #6: a window of 5 steps and 30 turns, beside baselines with 2 steps and 50 turns."""
    runs = [
        make_run(tmp_path / name, settings=[*window(steps), f"rollout.max_turns = {turns}"])
        for name, steps, turns in (("a", 2, 50), ("b", 5, 30))
    ]
    text = markdown_page(compare(runs))
    assert "Groups, NOT OF ONE PROTOCOL (history_steps 5 \\| 2; max_turns 30 \\| 50)" in text
    table = text.split("Points of the protocol that differ")[1]
    assert "| history_steps | 5 | 2 |" in table
    assert "NOT OF ONE PROTOCOL" in html_page(compare(runs))


def test_comparison_under_one_protocol_has_no_mark(tmp_path: Path) -> None:
    runs = [
        make_run(tmp_path / algorithm, algorithm=algorithm, settings=window(2))
        for algorithm in ("grpo", "gigpo")
    ]
    text = markdown_page(compare(runs))
    assert "NOT OF ONE PROTOCOL" not in text
    assert "Points of the protocol that differ" not in text
    named = [
        make_run(tmp_path / f"n-{algorithm}", algorithm=algorithm, settings=[f'protocol = "{NAME}"'])
        for algorithm in ("grpo", "gigpo")
    ]
    text = markdown_page(compare(named))
    assert "NOT OF ONE PROTOCOL" not in text
    assert "| algorithm | gigpo | grpo |" in text.split("Points of the protocol that differ")[1]


def test_report_compares_the_run_with_its_protocol(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_synthetic_run(tmp_path, num_steps=2)
    assert "<h2>Protocol</h2>" not in write_report(run).read_text()
    record_of(run, max_turns=30)
    page = write_report(run).read_text()
    block = page.split("<h2>Protocol</h2>")[1].split("<h2>")[0]
    assert "this run and verl-agent-alfworld: " in block
    assert "1 differ, 5 cannot be expressed" in block
    assert "<td>max_turns</td><td>differs</td><td>30</td><td>50</td>" in block
    assert main(["report", str(run), "--protocol", "opid-alfworld"]) == 0
    printed = capsys.readouterr().out
    assert "this run and opid-alfworld: " in printed
    assert "history_steps: differs" in printed
    assert main(["report", str(run), "--protocol", "nobody"]) == 2


def test_record_of_another_version_of_a_protocol(tmp_path: Path) -> None:
    record_of(tmp_path)
    file = tmp_path / "config.toml"
    difference = run_difference(file)
    assert difference is not None
    assert difference.left == "this run"
    file.write_text(file.read_text().replace(find_protocol(NAME).sha256, "0" * 64))
    changed = run_difference(file)
    assert changed is not None
    assert changed.left == "this run (of another version of the protocol)"
    file.write_text(file.read_text().replace(NAME, "removed-since"))
    assert run_difference(file) is None
    with pytest.raises(ConfigError, match="unknown protocol"):
        run_difference(file, "removed-since")


def test_record_that_was_edited_by_hand(tmp_path: Path) -> None:
    """A byte order mark is skipped, and a typing error is an error of one line."""
    run = make_run(tmp_path / "run", settings=[f'protocol = "{NAME}"'])
    file = run / "config.toml"
    readers: list[Callable[[], object]] = [
        lambda: run_difference(file),
        lambda: find_difference(str(run), NAME),
        lambda: Run(run).config,
        lambda: load_run(run, "run").record,
        lambda: config_of_run(str(run)),
    ]
    text, values = file.read_text(), [read() for read in readers]
    assert None not in values
    file.write_text(text, encoding="utf-8-sig")
    assert [read() for read in readers] == values
    file.write_text(f"{text}seed = = 1\n")
    for read in readers[:-1]:
        with pytest.raises(DataError, match=r"config\.toml"):
            read()
    assert readers[-1]() is None


def test_pack_contains_the_difference(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "run", write_questions(tmp_path / "data"), scores=[1.0] * 6)
    config = run / "config.toml"
    config.write_text(f'protocol = "verl-agent-search"\n{config.read_text()}')
    assert main(["pack", str(run), "--out", str(tmp_path / "pack")]) == 0
    assert "verl-agent-search: " in capsys.readouterr().out
    written = json.loads((tmp_path / "pack" / "runs" / "run" / "protocol.json").read_text())
    assert {"point": "context", "status": "differs"}.items() <= next(
        row for row in written["rows"] if row["point"] == "context"
    ).items()
    verify(tmp_path / "pack")


def test_pack_of_a_run_without_a_protocol_is_unchanged(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", write_questions(tmp_path / "data"), scores=[1.0] * 6)
    manifest = make_pack([run], tmp_path / "pack")
    assert not any(name.endswith("protocol.json") for name in manifest.files)


def test_card_contains_the_difference() -> None:
    tree = {"environment": {"type": "gym"}, "algorithm": {"type": "grpo"}, "model": {"name": "acme/base"}}
    record = {"protocol": NAME, "protocol_sha256": find_protocol(NAME).sha256}
    empty = read_run(Path("/nowhere"))
    cards = [
        model_card(
            "a/b", RunSettings.model_validate(own), empty, step=1, base=find_base("acme/base"), template=""
        )
        for own in (tree, tree | record)
    ]
    assert "## Protocol" not in cards[0]
    assert f"this run and {NAME}: " in cards[1].split("## Protocol")[1].split("## Load")[0]
