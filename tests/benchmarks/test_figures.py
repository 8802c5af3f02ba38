"""Figures in documents: written from their records, and named where they differ."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.figure_records import Score, render_all
from benchmarks.figures import differences, documents, main, rewritten
from benchmarks.markdown_table import MethodTable, with_columns

from outrider.errors import DataError, PackError
from outrider.evaluation.packs import make_pack
from outrider.types import Json
from tests.evaluation.pack_runs import write_exact, write_questions, write_run

ROOT = Path(__file__).parents[2]
ORIGIN: dict[str, Json] = {"source": "a test", "command": "none"}
TABLE: dict[str, Json] = {
    "kind": "cells",
    "columns": ["method", "a|b"],
    "rows": [["GRPO", "0.5"], ["RAPO", "0.9"]],
}
DOCUMENT = """# Title

The score is <!-- figure: demo/end -->28.0 % [21.4,
35.7]<!-- /figure --> here.

<!-- figures: lock -->

| method | a\\|b |
| --- | --- |
| GRPO | 0.5 |
| RAPO | 0.9 |

<!-- /figures -->

More text.
"""


def write_record(root: Path, name: str, record: dict[str, Json]) -> None:
    (root / "records").mkdir(exist_ok=True)
    (root / "records" / f"{name}.json").write_text(json.dumps(ORIGIN | record))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text("# Nothing here\n")
    (tmp_path / "docs" / "page.md").write_text(DOCUMENT)
    write_record(tmp_path, "lock", TABLE)
    write_record(
        tmp_path,
        "demo",
        {"kind": "values", "values": {"end": {"percent": 28.0, "num_tasks": 150}, "steps": "5"}},
    )
    return tmp_path


def test_every_record_is_used_in_a_document() -> None:
    marks = re.findall(
        r"<!-- figures?: (\S+) -->",
        "".join(path.read_text() for path in documents(ROOT)),
    )
    league = json.loads((ROOT / "records" / "league.json").read_text())["tasks"]
    assert {name.partition("/")[0] for name in marks} | {task["record"] for task in league} == {
        file.stem for file in (ROOT / "records").glob("*.json")
    }


def test_line_breaks_are_no_difference(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--check", "--root", str(root)]) == 0
    assert main(["--root", str(root)]) == 0 and (root / "docs" / "page.md").read_text() == DOCUMENT
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("before", "after", "line", "said"),
    [("28.0 %", "29.0 %", 3, "demo/end: recorded '28.0 % [21.4, 35.7]', written '29.0 % [21.4, 35.7]'"),
     ("35.7", "35.8", 4, "recorded '% [21.4, 35.7]', written '% [21.4, 35.8]'"),
     ("| RAPO | 0.9 |", "| RAPO | 0.8 |", 11, "written 'RAPO | 0.8 |'"),
     ("| RAPO | 0.9 |\n", "", 10, "recorded '0.5 | | RAPO | 0.9 |', written '0.5 |'"),
     ("| RAPO | 0.9 |", "| RAPO | 0.9 |\n| GIGPO | 1 |", 12, "written '0.9 | | GIGPO | 1 |'")],
)  # fmt: skip
def test_differences_are_named_by_document_and_line_and_corrected(
    root: Path, before: str, after: str, line: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    page = root / "docs" / "page.md"
    page.write_text(DOCUMENT.replace(before, after))
    assert main(["--check", "--root", str(root)]) == 1
    [told] = capsys.readouterr().out.splitlines()
    assert told.startswith(f"docs/page.md:{line}: ") and said in told
    assert page.read_text() == DOCUMENT.replace(before, after)
    assert main(["--root", str(root)]) == 0
    assert page.read_text() == DOCUMENT or "28.0 % [21.4, 35.7]<!--" in page.read_text()
    assert main(["--check", "--root", str(root)]) == 0


@pytest.mark.parametrize(
    ("text", "said"),
    [("x\n<!-- figures: lock -->\n| a |\n", "page.md:2: <!-- figures: lock --> has no other half"),
     ("<!-- figure: demo/end -->1<!-- /figures -->", "has no other half"),
     ("<!-- /figure -->", "has no other half"),
     ("<!-- figure: demo/end -->1 <!-- figure: demo/steps -->2<!-- /figure -->", "has no other half"),
     ("a\nb <!-- figure: demo/start -->1<!-- /figure -->", "page.md:2: no record has the figure demo/start")],
)  # fmt: skip
def test_unpaired_marks_are_refused(
    root: Path, text: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (root / "docs" / "page.md").write_text(text)
    assert main(["--root", str(root)]) == 1
    assert said in capsys.readouterr().err and (root / "docs" / "page.md").read_text() == text


def test_malformed_records_are_named(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for record in (
        {"kind": "magic"},
        {"kind": "cells"},
        {"kind": "values", "values": {"a": {"percent": 101, "num_tasks": 1}}},
    ):
        write_record(root, "other", record)  # type: ignore[arg-type]
        assert main(["--check", "--root", str(root)]) == 1
        assert "other.json" in capsys.readouterr().err


def test_wilson_intervals() -> None:
    assert Score(percent=28.0, num_tasks=150).text == "28.0 % [21.4, 35.7]"
    assert Score(percent=0.0, num_tasks=200).text == "0.0 % [0.0, 1.9]"


@pytest.fixture
def packed(root: Path) -> Path:
    """Recorded scores, and records of a pack: seeds of two algorithms, and a toy."""
    data = write_questions(root / "data")
    runs = []
    for seed, solved in enumerate((3, 4)):
        runs.append(
            write_run(
                root / f"rapo-{seed}",
                data,
                scores=[1.0] * solved + [0.0] * (6 - solved),
                algorithm="rapo",
                seed=seed,
            )
        )
        runs.append(write_run(root / f"grpo-{seed}", data, scores=[1.0] + [0.0] * 5, seed=seed))
    toys = [write_exact(root / "lock", "grpo", [0.0] * 10), write_exact(root / "lock", "rapo", [0.95] * 10)][
        :1
    ]
    (root / "records" / "packs").mkdir()
    make_pack([*runs, *toys], root / "records" / "packs" / "first")
    names = {"before": "before", "RAPO": "after RAPO"}
    views: dict[str, Json] = {
        form: {"form": form, "corner": "seed", "names": dict(names)} for form in ("seeds", "intervals")
    }
    seeds: list[Json] = [
        {"label": str(seed), "percent": {"before": 0.0, "RAPO": percent}, "policy_tokens": {"RAPO": 2000}}
        for seed, percent in enumerate((50.0, 66.7))
    ]
    write_record(root, "seeds", {"kind": "scores", "num_tasks": 6, "views": views, "seeds": seeds})
    write_record(
        root,
        "toy",
        {"kind": "toys", "pack": "first", "toy": "lock", "methods": ["grpo", "rapo"], "num_seeds": 10},
    )
    write_record(root, "runs", {"kind": "factbook", "pack": "first", "methods": ["grpo", "rapo"]})
    return root


def test_tables_follow_from_a_pack(packed: Path) -> None:
    figures = render_all(packed / "records")
    assert figures["seeds/seeds"].splitlines()[2:] == [
        "| 0 | 0.0 | 50.0 |",
        "| 1 | 0.0 | 66.7 |",
        "| mean | 0.0 | 58.4 |",
    ]
    assert "| 0 | 0.0 [0.0, 39.0] | 50.0 [18.8, 81.2] (2,000) |" in figures["seeds/intervals"]
    assert "| RAPO | 10 | 0.950 |" in figures["toy/all"] and "**RAPO** scores higher" in figures["toy/all"]
    assert "| RAPO | 0.950 [0.950, 0.950] | wins |" in figures["toy"]
    short, _, full = figures["runs"].partition("<details markdown>")
    assert "| RAPO | 2 | 58.3 |" in figures["runs/all"] and "| no winner |\n" in short
    assert figures["runs/all"] in full and "\n\n- " in full


def write_league(root: Path, **readme: list[str]) -> None:
    tasks: list[Json] = [
        {"task": name, "model": "m", "record": name, "page": f"{name}.md", "readme": readme.get(name, [])}
        for name in ("runs", "toy")
    ]
    write_record(root, "league", {"kind": "league", "tasks": tasks})


def test_the_league_has_the_rows_of_its_records_and_no_verdict_for_sketches(packed: Path) -> None:
    write_league(packed, toy=["RAPO"])
    figures = render_all(packed / "records")
    lines = figures["league"].splitlines()
    assert lines[0].count("|") == lines[2].count("|") and len(lines) == 6
    assert re.fullmatch(
        r"\| \[runs\]\(runs.md\) \| m \| RAPO \| 58.3 % \[\S+, \S+\] \| 2 \| 201 \| 40 \| sketch \|", lines[3]
    )
    assert lines[5] == "| [toy](toy.md) | m | RAPO | 0.950 [0.950, 0.950] | 10 | 60 |  | wins |"
    assert lines[4].endswith("| 60 |  | baseline |")
    assert figures["league/readme"].splitlines()[2:] == [lines[5].replace("(toy", "(docs/toy")]


@pytest.mark.parametrize(
    ("readme", "message"),
    [({"runs": ["RAPO"]}, "needs at least 10 seeds"), ({"toy": ["PPO"]}, "toy.json has no method PPO")],
)
def test_sketches_and_unknown_methods_are_refused_in_readme(
    packed: Path, readme: dict[str, list[str]], message: str
) -> None:
    write_league(packed, **readme)
    with pytest.raises(DataError, match=message):
        render_all(packed / "records")


def test_a_method_that_the_benchmarks_do_not_have_is_named_by_its_record(packed: Path) -> None:
    write_league(packed)
    data = packed / "data"
    run = write_run(packed / "mine-0", data, scores=[1.0] * 6, algorithm="gigpo")
    make_pack([run], packed / "records" / "packs" / "strange")
    record: dict[str, Json] = {
        "kind": "factbook", "pack": ["first", "strange"], "methods": ["grpo", "mine"],
        "names": {"mine": "Mine"},
    }  # fmt: skip
    write_record(packed, "runs", record)
    figures = render_all(packed / "records")
    assert "| Mine | 100.0 % (one seed) | 1 | 200 |" in figures["league"]
    assert "| Mine | 1.000 | 0: 1.000 |" in figures["runs/returns"]


def test_runs_of_one_method_with_different_settings_are_refused(packed: Path) -> None:
    run = write_run(packed / "grpo-2", packed / "data", scores=[1.0] * 6, seed=2)
    config = run / "config.toml"
    config.write_text(config.read_text().replace("num_steps = 2", "num_steps = 2\ntasks_per_step = 3"))
    make_pack([run], packed / "records" / "packs" / "second")
    write_record(
        packed, "runs", {"kind": "factbook", "pack": ["first", "second"], "methods": ["grpo", "rapo"]}
    )
    with pytest.raises(DataError, match="runs of grpo have different settings"):
        render_all(packed / "records")


def test_a_wide_table_can_be_short_with_all_columns_folded(root: Path) -> None:
    assert with_columns(["a", "b"], [["1", "2"]], []) == "| a | b |\n| --- | --- |\n| 1 | 2 |"
    write_record(root, "lock", TABLE | {"shown": ["a|b"], "notes": ["x"]})
    [short, full, notes] = re.split(r"\n\n<details.*\n\n|\n\n- ", render_all(root / "records")["lock"])
    assert short == "| a\\|b |\n| --- |\n| 0.5 |\n| 0.9 |"
    assert full.splitlines()[-1] == "| RAPO | 0.9 |" and notes == "x\n\n</details>"
    write_record(root, "lock", TABLE | {"shown": ["c"]})
    with pytest.raises(DataError, match=r"lock.json: there is no 'c'"):
        render_all(root / "records")


def test_seeds_have_a_column_if_they_differ_and_a_loser_is_named() -> None:
    header = ("method", "seeds", "interquartile mean %", "against GRPO")
    rows = [
        ("GRPO", "5", "3", ""),
        ("A", "4", "1", "**GRPO** scores higher"),
        ("B", "not defined: x", "", ""),
    ]
    assert MethodTable(header, rows).short().splitlines()[:5] == [
        "| method | seeds | interquartile mean % [95 % interval] | against GRPO |",
        "| --- | --- | --- | --- |",
        "| GRPO | 5 | 3 | baseline |",
        "| A | 4 | 1 | loses |",
        "| B |  |  | not defined |",
    ]


def test_a_changed_byte_of_a_pack_is_an_error(packed: Path) -> None:
    file = packed / "records/packs/first/exact.jsonl"
    file.write_bytes(file.read_bytes().replace(b"0.95", b"0.96", 1))
    with pytest.raises(PackError, match=r"exact.jsonl was changed"):
        render_all(packed / "records")


def test_a_pack_without_the_method_is_named(packed: Path) -> None:
    write_record(
        packed, "toy", {"kind": "toys", "pack": "first", "toy": "lock", "methods": ["ppo"], "num_seeds": 1}
    )
    with pytest.raises(DataError, match=r"toy.json: there is no 'ppo'"):
        render_all(packed / "records")


@pytest.mark.slow
def test_the_documents_agree_with_the_records_and_the_check_needs_no_torch() -> None:
    code = (
        "import sys; from benchmarks.figures import main; assert main(['--check']) == 0; "
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


def test_other_text_is_unchanged() -> None:
    text = "a <!-- a comment --> b\n"
    assert rewritten(text, {}, document="x") == text and differences(text, {}, document="x") == []


def test_marks_in_a_block_of_code_are_examples() -> None:
    text = (
        "```markdown\n<!-- figure: gone -->1<!-- /figure -->\n<!-- figures: gone -->\n```\n"
        "<!-- figure: a -->1<!-- /figure -->\n"
    )
    assert rewritten(text, {"a": "2"}, document="x") == text.replace("a -->1", "a -->2")
    [one] = differences(text, {"a": "2"}, document="x")
    assert (one.line, one.recorded, one.written) == (5, "2", "1")
