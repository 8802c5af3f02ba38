"""Packs: a changed byte is found wherever it is, every score follows from its tasks, and nothing of the
machine goes along.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.cli import main
from outrider.errors import ConfigError, DataError, PackError
from outrider.evaluation.compare import compare
from outrider.evaluation.pack_replay import Replayed, cheapest_first
from outrider.evaluation.packs import (
    CHECKSUM,
    EXACT,
    MANIFEST,
    TABLES,
    checksum_line,
    first_difference,
    make_pack,
    portable,
    read_manifest,
    verify,
)
from outrider.evaluation.results import SampleResult, write_results
from outrider.rollout.evaluate import interval
from outrider.types import Outcome
from tests.evaluation.pack_runs import write_exact, write_questions, write_run

BETTER, WORSE = [1.0, 1.0, 1.0, 1.0, 0.0, 1.0], [0.0, 1.0, 0.0, 0.0, 0.0, 0.5]


def add_files(root: Path) -> list[Path]:
    """Two seeds of two algorithms, one of which starts from another's weights, and exact results."""
    data = write_questions(root / "data")
    first = write_run(root / "runs" / "rapo-0", data, scores=BETTER, algorithm="rapo")
    start = str(first / "checkpoints" / "step-000000")
    write_exact(root / "toys" / "lock", "grpo", [0.0, 0.0, 0.0])
    return [
        first,
        write_run(root / "runs" / "rapo-1", data, scores=BETTER[::-1], algorithm="rapo", seed=1),
        write_run(root / "runs" / "grpo-0", data, scores=WORSE, start=start),
        write_run(root / "runs" / "grpo-1", data, scores=WORSE, seed=1),
        write_exact(root / "toys" / "lock", "rapo", [0.9, 0.95, 0.97]),
    ]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("packs")
    make_pack(add_files(root), root / "pack", commands=["python -m benchmarks.learning"])
    return root


@pytest.fixture
def pack(made: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    subprocess.run(["cp", "-r", made / "pack", tmp_path / "pack"], check=True)
    return tmp_path / "pack"


def resealed(pack: Path, change: Callable[[dict[str, Any]], None] = lambda manifest: None) -> Path:
    """The pack with hashes that fit what it holds now: as somebody would make it who wants to be believed."""
    manifest = json.loads((pack / MANIFEST).read_text())
    names = [path.relative_to(pack).as_posix() for path in pack.rglob("*") if path.is_file()]
    manifest["files"] = {
        name: {"num_bytes": (pack / name).stat().st_size,
               "sha256": hashlib.sha256((pack / name).read_bytes()).hexdigest()}
        for name in names if name not in (MANIFEST, CHECKSUM)
    }  # fmt: skip
    change(manifest)
    (pack / MANIFEST).write_text(json.dumps(manifest))
    (pack / CHECKSUM).write_bytes(checksum_line((pack / MANIFEST).read_bytes()))
    return pack


def refused(pack: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """The one line with which the command ends."""
    capsys.readouterr()
    assert main(["verify", str(pack), "--no-replay"]) == 1
    [line] = capsys.readouterr().err.splitlines()
    return line


def test_an_unchanged_pack_is_verified(pack: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(pack), "--no-replay"]) == 0
    printed = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "8 evaluations, 2 rows of exact returns, 4 runs' costs" in printed


@pytest.mark.parametrize("name", ["demo-avx2.pack", "toys-quest.pack"])
def test_packs_of_earlier_versions_are_verified(name: str) -> None:
    """They have panels and comparisons as well."""
    verify(Path(__file__).parents[2] / "records" / "packs" / name)


def test_every_byte_of_every_file_counts(pack: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for file in sorted(path for path in pack.rglob("*") if path.is_file()):
        before = file.read_bytes()
        file.write_bytes(before[:-2] + bytes([before[-2] ^ 1]) + before[-1:])
        assert file.relative_to(pack).as_posix() in refused(pack, capsys), file
        file.write_bytes(before)
    assert main(["verify", str(pack), "--no-replay"]) == 0


@given(data=st.data())
def test_a_single_changed_byte_is_an_error(made: Path, data: st.DataObject) -> None:
    pack = made / "pack"
    file = data.draw(st.sampled_from(sorted(path for path in pack.rglob("*") if path.is_file())))
    before = file.read_bytes()
    at, bit = data.draw(st.integers(0, len(before) - 1)), data.draw(st.integers(0, 7))
    try:
        file.write_bytes(before[:at] + bytes([before[at] ^ (1 << bit)]) + before[at + 1 :])
        with pytest.raises(PackError, match=file.name):
            read_manifest(pack)
    finally:
        file.write_bytes(before)


def test_a_renamed_moved_cut_extended_or_linked_file_is_an_error(pack: Path, tmp_path: Path) -> None:
    def link(file: Path) -> Path:
        outside = shutil.move(file, tmp_path / f"outside-{file.name}")
        file.symlink_to(outside)
        return file

    def write(file: Path, content: bytes) -> Path:
        file.write_bytes(content)
        return file

    changes: list[Callable[[Path], Path]] = [
        lambda file: file.rename(file.with_name(f"{file.name}x")),
        lambda file: file.rename(file.with_name(file.name.upper())),
        lambda file: file.rename(pack / "runs" / file.name),
        lambda file: write(file, file.read_bytes()[:-1]),
        lambda file: write(file, file.read_bytes() + b"\n"),
        link,
    ]
    for file in sorted(path for path in pack.rglob("*") if path.is_file()):
        before = file.read_bytes()
        for change in changes:
            changed = change(file)
            with pytest.raises(PackError):
                read_manifest(pack)
            changed.unlink()
            file.write_bytes(before)
    read_manifest(pack)
    link(pack / "runs")
    with pytest.raises(PackError, match="runs is a link"):
        read_manifest(pack)


def test_a_pack_of_another_version_and_machine_is_verified(pack: Path) -> None:
    """Its recipes may have settings that do not exist here, and its runs are compared all the same."""
    for name in ("rapo-0", "rapo-1", "grpo-0", "grpo-1"):
        recipe = pack / "runs" / name / "config.toml"
        recipe.write_text(recipe.read_text() + '[later]\nsetting = "new"\n')

    def change(manifest: dict[str, Any]) -> None:
        manifest |= {"outrider": "99.0", "packed_on": {"processor": "another", "instruction sets": "sve2"}}
        for run in manifest["runs"].values():
            run["versions"] = {"outrider": "99.0", "torch": "9.0", "processor": "another"}

    assert verify(resealed(pack, change)).manifest.outrider == "99.0"
    groups = compare(sorted((pack / "runs").iterdir())).groups
    assert [len(group.runs) for group in groups if group.label == "rapo"] == [2]


def test_missing_and_added_files_are_named(pack: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (pack / "runs" / "note.txt").write_text("mine")
    assert "runs/note.txt was added" in refused(pack, capsys)
    (pack / "runs" / "note.txt").unlink()
    (pack / "runs" / "grpo-0" / "metrics.jsonl").unlink()
    assert "runs/grpo-0/metrics.jsonl is missing" in refused(pack, capsys)


def test_links_and_other_files_are_refused(
    pack: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = pack / "runs" / "grpo-0" / "metrics.jsonl"
    target.rename(tmp_path / "outside.jsonl")
    target.symlink_to(tmp_path / "outside.jsonl")
    assert "is a link" in refused(pack, capsys)
    target.unlink()
    os.mkfifo(target)
    assert "no plain file" in refused(pack, capsys)


@pytest.mark.parametrize(
    "name", ["../outside", "/etc/passwd", "runs/../../outside", "runs\\x", "a//b", "", "./x", "runs/.."]
)
def test_names_that_lead_out_of_the_folder_are_refused(
    pack: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    resealed(pack, lambda manifest: manifest["files"].update({name: {"num_bytes": 0, "sha256": "0" * 64}}))
    assert f"{MANIFEST} is malformed: files" in refused(pack, capsys)
    resealed(pack, lambda manifest: manifest["runs"].update({name: next(iter(manifest["runs"].values()))}))
    assert f"{MANIFEST} is malformed: runs" in refused(pack, capsys)


BROKEN: list[tuple[str, str, str]] = [
    (MANIFEST, "[", "is malformed"),
    (MANIFEST, "[" * 100_000, "is malformed"),
    (MANIFEST, "{}", "format"),
    (MANIFEST, '{"format": "outrider pack 9"}', "outrider pack 1"),
    (TABLES, "[" * 100_000, TABLES),
    (TABLES, "{}", TABLES),
    (EXACT, "{", f"{EXACT}:1"),
    (EXACT, '{"toy": "../x"}', f"{EXACT}:1"),
    ("runs/grpo-0/config.toml", "seed = ", "runs/grpo-0/config.toml"),
    ("runs/grpo-0/config.toml", "seed = " + "[" * 10_000, "runs/grpo-0/config.toml"),
    ("runs/grpo-0/evaluations.jsonl", "null\n", "evaluations.jsonl:1"),
    ("runs/grpo-0/evaluations.jsonl", '{"metric": {"score": {"value": "x"}}}\n', "evaluations.jsonl:1"),
    ("runs/grpo-0/evaluations.jsonl", '{"metric": {"score": {"value": NaN}}, "step": 1e999}\n',
     "evaluations.jsonl:1"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "content", "says"), BROKEN)
def test_a_malformed_file_is_one_line(
    pack: Path, name: str, content: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (pack / name).write_text(content)
    if name == MANIFEST:
        (pack / CHECKSUM).write_bytes(checksum_line(content.encode()))
    else:
        resealed(pack)
    assert says in refused(pack, capsys)


def test_code_that_a_pack_names_is_not_imported(
    pack: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where it lies in the pack, and the pack in the current folder."""
    (pack / "evil.py").write_text("raise SystemExit('imported')\n")
    recipe = pack / "runs" / "grpo-0" / "config.toml"
    text = recipe.read_text()
    kind = next(line for line in text.splitlines() if line.startswith("type = "))
    recipe.write_text(text.replace(kind, 'type = "pack.evil:E"', 1))
    monkeypatch.chdir(pack.parent)
    output = refused(resealed(pack), capsys)
    assert "names 'pack.evil:E': code is never imported from a pack" in output


def changed_line(file: Path, number: int, change: Callable[[dict[str, Any]], None]) -> None:
    lines = file.read_text().splitlines()
    record = json.loads(lines[number])
    change(record)
    lines[number] = json.dumps(record)
    file.write_text("\n".join(lines) + "\n")


def test_scores_that_do_not_match_the_tasks_are_an_error(
    pack: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whoever changes results and hashes together still has to make everything else fit."""
    file = pack / "runs" / "grpo-0" / "evaluations.jsonl"
    before = file.read_bytes()
    changed_line(file, 1, lambda line: line["metric"]["score"].update(value=0.9))
    assert "runs/grpo-0/evaluations.jsonl:2: score is 0.9" in refused(resealed(pack), capsys)
    file.write_bytes(before)
    changed_line(file, 1, lambda line: line["metric"]["score"].update(ci_high=0.9))
    assert "ci_high is 0.9" in refused(resealed(pack), capsys)
    file.write_bytes(before)
    changed_line(file, 1, lambda line: line["task_scores"].update({"tasks-0": 1.0}))
    assert "evaluations.jsonl:2: score is" in refused(resealed(pack), capsys)
    file.write_bytes(before)
    metrics = pack / "runs" / "grpo-0" / "metrics.jsonl"
    changed_line(metrics, 0, lambda line: line.update({"tokens/policy": 1.0}))
    assert "tables.json: " in (said := refused(resealed(pack), capsys)) and "policy tokens" in said


def test_tables_that_do_not_match_the_results_are_an_error(
    pack: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tables = json.loads((pack / TABLES).read_text())
    tables["costs"][0]["seed"] = "7"
    (pack / TABLES).write_text(json.dumps(tables))
    assert "tables.json: costs[0].seed is '7'" in refused(resealed(pack), capsys)
    changed_line(pack / EXACT, 0, lambda line: line["result"].update(expected_return=0.5))
    assert "tables.json" in refused(resealed(pack), capsys)


def test_a_pack_has_no_paths_of_the_machine(made: Path) -> None:
    texts = {
        path.relative_to(made / "pack").as_posix(): path.read_text()
        for path in (made / "pack").rglob("*")
        if path.is_file()
    }
    assert not [name for name, text in texts.items() if str(made) in text or str(Path.cwd()) in text]
    recipe = texts["runs/grpo-0/config.toml"]
    assert (
        'initial_checkpoint = "pack:rapo-0/checkpoints/step-000000"' in recipe
        and 'path = ".../sha256-' in recipe
    )
    assert '"of pack:rapo-0/checkpoints/step-000000"' in texts["runs/grpo-0/evaluations.jsonl"]
    assert not [name for name in texts if name.endswith(".safetensors")]


def test_other_content_under_one_name_stays_another_setting(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "tasks.jsonl").write_text(folder)
    paths = [str(tmp_path / folder / "tasks.jsonl") for folder in ("a", "b", "gone")]
    trees = [portable({"environment": {"path": path, "tools": ["search"]}}, {}) for path in paths]
    shown = [tree["environment"]["path"] for tree, _ in trees]
    assert len(set(shown)) == 3 and all(one.endswith("/tasks.jsonl") for one in shown)
    assert [inputs["environment.path"].sha256 is None for _, inputs in trees] == [False, False, True]
    assert all(tree["environment"]["tools"] == ["search"] for tree, _ in trees)


def test_weights_are_packed_only_on_request(tmp_path: Path) -> None:
    paths = add_files(tmp_path)[:3]
    for step in ("step-000000", "step-000002"):
        checkpoint = paths[0] / "checkpoints" / step
        checkpoint.mkdir(parents=True)
        (checkpoint / "masters.safetensors").write_bytes(step.encode())
        state = {
            "step": 2,
            "checksums": {"masters.safetensors": 1},
            "memory": "/home/me",
            "versions": {"torch": "2"},
        }
        (checkpoint / "state.json").write_text(json.dumps(state))
    plain = make_pack(paths, tmp_path / "plain")
    assert plain.runs["rapo-0"].versions == {"torch": "2"} and not any(
        "checkpoints" in name for name in plain.files
    )
    heavy = make_pack(paths, tmp_path / "heavy", weights=True)
    assert {name for name in heavy.files if "checkpoints" in name} == {
        f"runs/rapo-0/checkpoints/{step}/{name}"
        for step in ("step-000000", "step-000002") for name in ("masters.safetensors", "state.json")
    }  # fmt: skip
    assert "/home/me" not in (tmp_path / "heavy/runs/rapo-0/checkpoints/step-000002/state.json").read_text()
    verify(tmp_path / "heavy")


def test_evaluations_of_task_sets_are_packed_and_scored_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "gsm8k"
    run.mkdir()
    results = [
        SampleResult(task_key=f"t{n}", sample=0, outcome=Outcome.FINISHED, score=float(n > 1), success=n > 1,
                     prediction=str(n), metrics={"em": 1.0}, detail="private")
        for n in range(4)
    ]  # fmt: skip
    write_results(run / "results.jsonl", {"metric": "math", "rules": "default", "panel_hash": "ab"}, results)
    counts = {
        "num_samples": 1,
        "num_tasks": 4,
        "num_left_out": 0,
        "num_owed": 4,
        "num_unjudged": 0,
        "tasks": "gsm8k",
    }
    scores = {
        name: dict(
            zip(
                ("value", "ci_low", "ci_high", "num_tasks"),
                (fmean(tasks), *interval(tasks, binary=True), 4),
                strict=True,
            )
        )
        for name, tasks in {"mathematically equal": [0.0, 0.0, 1.0, 1.0], "em": [1.0] * 4}.items()
    }
    (run / "summary.json").write_text(json.dumps({"panel_hash": "ab", "scores": scores, **counts}))
    (run / "evaluation.toml").write_text('tasks = "gsm8k"\n[model]\nname = "tiny"\n')
    manifest = make_pack([run], tmp_path / "pack")
    assert manifest.runs["gsm8k"].checkpoint_rule == "the model itself, no training"
    (run / "evaluation.toml").write_text('tasks = "gsm8k"\n[endpoint]\nbase_url = "http://127.0.0.1:9/v1"\n')
    rules = {
        name: make_pack([run], tmp_path / name, checkpoint_rule=rule).runs["gsm8k"].checkpoint_rule
        for name, rule in (("served", None), ("stated", "best on valid"))
    }
    assert rules == {
        "served": "the model that an endpoint served, its training unknown", "stated": "best on valid"
    }  # fmt: skip
    assert "private" not in (tmp_path / "pack/runs/gsm8k/results.jsonl").read_text()
    assert len(verify(tmp_path / "pack").tables["panels"]) == 2
    changed_line(
        tmp_path / "pack/runs/gsm8k/results.jsonl", 1, lambda line: line.update(score=1.0, success=True)
    )
    assert "mathematically equal.value is" in refused(resealed(tmp_path / "pack"), capsys)


def test_unsuitable_folders_are_an_error_and_leave_nothing(tmp_path: Path) -> None:
    paths = add_files(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="is no run"):
        make_pack([tmp_path / "empty"], tmp_path / "pack")
    with pytest.raises(DataError, match="given twice"):
        make_pack([paths[4], paths[4]], tmp_path / "pack")
    (paths[1] / "config.toml").write_text("")  # a full disk cut it
    with pytest.raises(DataError, match="no resolved recipe"):
        make_pack(paths[1:2], tmp_path / "pack")
    changed_line(paths[0] / "evaluations.jsonl", 1, lambda line: line["metric"]["score"].update(value=0.1))
    with pytest.raises(PackError, match=r"rapo-0/evaluations.jsonl:2: score is 0.1"):
        make_pack(paths[:1], tmp_path / "pack")
    assert not (tmp_path / "pack").exists() and not list(tmp_path.glob(".*partial"))
    with pytest.raises(ConfigError, match="never overwritten"):
        make_pack(paths[1:2], tmp_path / "empty")


def test_a_pack_is_the_same_wherever_it_is_made(tmp_path: Path) -> None:
    packs = []
    for place in ("here", "there"):
        make_pack(add_files(tmp_path / place), tmp_path / f"{place}-pack")
        packs.append((tmp_path / f"{place}-pack" / CHECKSUM).read_bytes())
    assert packs[0] == packs[1]


LEAVES = st.none() | st.booleans() | st.integers(-9, 9) | st.floats(-9, 9) | st.text(max_size=3)
TREES = (
    LEAVES
    | st.lists(LEAVES, max_size=3)
    | st.dictionaries(st.text(max_size=2), st.lists(LEAVES, max_size=2), max_size=3)
)


@given(tree=TREES)
def test_a_tree_differs_from_no_copy_of_itself(tree: Any) -> None:
    assert first_difference(tree, json.loads(json.dumps(tree))) is None
    assert first_difference({"a": [tree, 1]}, {"a": [tree, 1.1]}) is not None
    assert first_difference([tree], [tree, tree]) is not None
    assert first_difference({"a": True}, {"a": 1}) is not None


def test_rows_agree_by_their_digits_or_their_interval() -> None:
    def agrees(found: float) -> bool:
        return Replayed(row="r", recorded=0.1, low=0.2, high=0.3, measured=found, num_different=None).agrees

    output = Replayed(row="r", recorded=0.1, low=0.05, high=0.3, measured=0.2, num_different=None)
    assert output.sentence == "r: 10.0 % [5.0, 30.0] in the pack, 20.0 % replayed: it agrees"
    toy = Replayed(
        row="r", recorded=0.1, low=0.05, high=0.3, measured=0.2, num_different=None, is_share=False
    )
    assert (
        toy.sentence == "r: expected return (no share) 0.1 [0.05, 0.3] in the pack, 0.2 replayed: it agrees"
    )
    assert agrees(0.1004) and agrees(0.25) and not agrees(0.102) and not agrees(0.31)


def test_the_cheapest_row_is_replayed_by_default(made: Path) -> None:
    rows = cheapest_first(made / "pack", verify(made / "pack"))
    assert rows[:6] == [f"lock/{method}-{seed}" for method in ("grpo", "rapo") for seed in range(3)]
    assert rows[6:] == ["grpo-1", "rapo-0", "rapo-1", "grpo-0"]  # the last one needs the weights of another


def test_verifying_without_a_replay_imports_no_torch(made: Path) -> None:
    code = (
        "import sys; from outrider.cli import main; "
        f"assert main(['verify', {str(made / 'pack')!r}, '--no-replay']) == 0; "
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=120)


def checkpoint_rules(pack: Path) -> dict[str, str | None]:
    return {name: run.checkpoint_rule for name, run in read_manifest(pack).runs.items()}


def test_a_pack_states_the_rule_that_chose_each_checkpoint(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Scores of trainings are those of the final step; a chosen checkpoint needs the user's rule."""
    assert set(checkpoint_rules(made / "pack").values()) == {"final step"}
    data = write_questions(tmp_path / "data")
    checkpoints = [tmp_path / "training" / "checkpoints" / f"step-{step:06d}" for step in (1, 2)]
    runs = []
    for checkpoint in checkpoints:
        checkpoint.mkdir(parents=True)
        run = write_run(tmp_path / "runs" / checkpoint.name, data, scores=BETTER, start=str(checkpoint))
        config = run / "config.toml"
        config.write_text(config.read_text().replace("num_steps = 2", "num_steps = 0"))
        lines = (run / "evaluations.jsonl").read_text().splitlines(keepends=True)
        (run / "evaluations.jsonl").write_text(lines[0])
        (run / "metrics.jsonl").unlink()
        runs.append(str(run))
    pack = tmp_path / "pack"
    assert main(["pack", *runs, "--out", str(pack)]) == 2
    assert "step-000001 evaluates a checkpoint that is not known to be the last" in capsys.readouterr().err
    assert not pack.exists()
    assert main(["pack", *runs, "--out", str(pack), "--checkpoint-rule", "best of two on valid"]) == 0
    assert checkpoint_rules(pack) == {
        "step-000001": "best of two on valid", "step-000002": "last checkpoint of its training",
    }  # fmt: skip
    capsys.readouterr()
    assert main(["verify", str(pack), "--no-replay"]) == 0
    printed = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "best of two on valid (1); last checkpoint of its training (1)" in printed


def test_a_pack_without_a_rule_is_not_verified(pack: Path, capsys: pytest.CaptureFixture[str]) -> None:
    resealed(pack, lambda manifest: manifest["runs"]["grpo-0"].pop("checkpoint_rule"))
    assert "runs.grpo-0 states no rule that chose its checkpoint" in refused(pack, capsys)
    resealed(pack, lambda manifest: manifest["runs"]["grpo-0"].update(checkpoint_rule=""))
    assert f"{MANIFEST} is malformed: runs.grpo-0.checkpoint_rule" in refused(pack, capsys)


def test_a_training_that_was_not_evaluated_at_its_end_is_not_scored_at_the_final_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write_questions(tmp_path / "data")
    run = write_run(tmp_path / "grpo", data, scores=BETTER)
    lines = (run / "evaluations.jsonl").read_text().splitlines(keepends=True)
    (run / "evaluations.jsonl").write_text(lines[0])
    make_pack([run], tmp_path / "pack")
    assert checkpoint_rules(tmp_path / "pack") == {"grpo": "last evaluation of an unfinished training"}
    verify(tmp_path / "pack")
    resealed(
        tmp_path / "pack", lambda manifest: manifest["runs"]["grpo"].update(checkpoint_rule="final step")
    )
    assert "runs.grpo was not evaluated at its final step" in refused(tmp_path / "pack", capsys)
