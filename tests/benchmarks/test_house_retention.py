"""The experiment in the houses: wins, what the pilot selects, and how a stopped call continues."""

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from benchmarks.house_retention import (
    DISTILLED,
    EPOCHS,
    HOUSES,
    PANELS,
    RECIPE,
    Arm,
    Ledger,
    Note,
    ShiftedMemory,
    Study,
    arm_overrides,
    ceiling,
    ceiling_note,
    ceiling_table,
    final_arms,
    helped_successes,
    main,
    pilot_arms,
    play_panels,
    read_scores,
    stage_arms,
    stored_paths,
)
from benchmarks.house_verdict import (
    Panels,
    Scores,
    best_arm,
    gain,
    passes_pilot,
    retention,
    specific_rise,
    table,
    verdict,
)

from benchmarks import house_retention
from outrider.algorithms.base import ObjectiveSettings
from outrider.config import load_settings
from outrider.errors import ConfigError
from outrider.memory.embedders import HashEmbedder
from outrider.trace import Leaf, Trace
from outrider.training.settings import RunSettings
from outrider.types import Message, Origin, Outcome, Task

ROOT = Path(__file__).parents[2]


def panels(trained: float, *, helped: float = 0.4, new: float = 0.125) -> Panels:
    return Panels(trained=trained, helped=helped, new=new)


def scores(**trained: list[float]) -> dict[str, dict[int, Panels]]:
    """By arm and seed; the cold start scores 0.125 and tips lift it to 0.4."""
    arms = {"cold": [0.125] * max(map(len, trained.values()))} | trained
    return {arm: {seed: panels(value) for seed, value in enumerate(values)} for arm, values in arms.items()}


def test_gains_are_paired_by_seed() -> None:
    result = scores(grpo=[0.1, 0.2, 0.3], likelihood=[0.2, 0.3, 0.4])
    assert gain(result, "likelihood", "grpo").low == pytest.approx(0.1)
    result["likelihood"].pop(1)
    assert gain(result, "likelihood", "grpo").value == pytest.approx(0.1)


def test_retention_is_a_part_of_the_gain_of_tips() -> None:
    assert retention(scores(likelihood=[0.2625]), "likelihood") == pytest.approx(0.5)
    useless: Scores = {"cold": {0: panels(0.2, helped=0.2)}, "likelihood": {0: panels(0.3)}}
    assert math.isnan(retention(useless, "likelihood")) and verdict(useless, "likelihood").startswith("no")


GRPO = [0.14, 0.15, 0.16, 0.15, 0.14]
WIN = [0.30, 0.33, 0.32, 0.31, 0.30]
STRONG = [0.45, 0.43, 0.44, 0.42, 0.45]


@pytest.mark.parametrize(("values", "expected"), [(WIN, "win"), (STRONG, "strong win")])
def test_a_win(values: list[float], expected: str) -> None:
    assert verdict(scores(grpo=GRPO, likelihood=values, control=GRPO), "likelihood") == expected


def test_a_no_names_every_failed_condition() -> None:
    def outcome(change: dict[str, Any], **new: float) -> str:
        result = scores(**({"grpo": GRPO, "likelihood": WIN, "control": GRPO} | change))
        if new:
            result["likelihood"] = {
                seed: panels(one.trained, **new) for seed, one in result["likelihood"].items()
            }
        return verdict(result, "likelihood")

    assert "keeps 0.09 of the gain" in outcome({"likelihood": [0.15] * 5})
    assert "the interval over GRPO" in outcome({"grpo": [0.1, 0.5, 0.1, 0.5, 0.1]})
    assert "the interval over the control" in outcome({"control": WIN})
    assert outcome({}, new=0.4) == "no: new houses rise as much as the trained ones"
    assert outcome({}, new=0.05) == "no: new houses fall by 7.5 points"
    assert outcome({}, new=0.08) == "win"


def test_the_rise_on_trained_houses_is_compared_with_that_on_new_ones() -> None:
    result = scores(likelihood=[0.225, 0.325])
    result["likelihood"][1] = panels(0.325, new=0.225)
    specific, new = specific_rise(result, "likelihood")
    assert specific.value == pytest.approx(0.1) and new.value == pytest.approx(0.05)


def test_the_table_has_a_row_per_arm() -> None:
    header, rows = table(scores(grpo=GRPO, likelihood=WIN), {"grpo": "GRPO"})
    assert [row[0] for row in rows] == ["cold", "GRPO", "likelihood"] and len(header) == len(rows[0])
    assert rows[0][-1] == rows[1][-1] == "-" and rows[2][-1] == "win" and rows[2][2] == "31.2"


PILOT = {
    "grpo": [0.15, 0.16], "empo2": [0.2, 0.2], "divergence-0.3": [0.2, 0.2], "divergence-1": [0.3, 0.2],
    "likelihood-0.3": [0.22, 0.22], "likelihood-1": [0.3, 0.19],
}  # fmt: skip


def test_the_pilot_selects_weights_and_the_control() -> None:
    pilot = scores(**PILOT)
    names = [arm.name for arm in pilot_arms()]
    assert names == list(PILOT)
    assert passes_pilot(pilot, names[2:]) == ["likelihood-0.3"]  # 5 points in both seeds
    assert best_arm(pilot, names[2:]) == "divergence-1"
    by_name = {arm.name: arm for arm in final_arms(pilot)}
    assert list(by_name) == [
        "grpo", "empo2", "empo2-student", "divergence", "likelihood", "sdar", "echo", "control"
    ]  # fmt: skip
    assert by_name["divergence"].weight == by_name["likelihood"].weight == 1.0
    assert by_name["control"] == Arm(name="control", key="divergence", weight=1.0, is_control=True)


HAS_ECHO = "observation_nll" in ObjectiveSettings.model_fields


@pytest.mark.parametrize(
    "key", ["grpo", "empo2", "empo2-student", *DISTILLED, "sdar", *(["echo"] if HAS_ECHO else [])]
)
def test_every_arm_has_valid_settings(key: str) -> None:
    settings = load_settings(
        RunSettings, file=ROOT / RECIPE, overrides=[*HOUSES, *arm_overrides(key, 0.3), "train.num_steps=1"]
    )
    distill = settings.algorithm.distill
    assert (distill is not None) == (key in (*DISTILLED, "sdar"))
    if distill is not None:
        assert distill.help == ("tips",) and distill.weight == (0.01 if key == "sdar" else 0.3)


def test_the_control_reads_the_tips_of_another_house() -> None:
    memory = ShiftedMemory()
    [key] = HashEmbedder().embed(["a"])
    assert memory.add("house/6-6-1-0-0/train/3", key, "first", 1.0)
    assert memory.add("house/6-6-1-0-0/train/7", key, "last", 1.0)
    assert [tip.text for tip in memory.tips("house/6-6-1-0-0/train/4")] == ["first"]
    assert [tip.text for tip in memory.tips("house/6-6-1-0-0/train/0")] == ["last"]
    assert not memory.tips("house/6-6-1-0-0/train/3")
    twin = ShiftedMemory()
    twin.restore(*memory.snapshot())  # a resumed run shifts nothing twice
    assert twin.tips("house/6-6-1-0-0/train/4") == memory.tips("house/6-6-1-0-0/train/4")


# Results on disk


@pytest.fixture
def study(tmp_path: Path) -> Study:
    return Study(recipe=ROOT / RECIPE, out=tmp_path, overrides=())


def test_a_stored_result_is_not_computed_again(study: Study) -> None:
    assert study.ledger("part").complete("a", lambda: {"task": 1.0}) == {"task": 1.0}

    def refuse() -> None:
        raise AssertionError("computed again")

    again = study.ledger("part")
    assert again.complete("a", refuse) == {"task": 1.0} and "a" in again.entries["cpu_s"]
    with pytest.raises(ConfigError, match="other settings"):
        Study(recipe=study.recipe, out=study.out, overrides=("model.trained_layers=30",)).ledger("part")


def store(study: Study, name: str, **entries: Any) -> None:
    ledger = study.ledger(name)
    for key, value in entries.items():
        ledger.complete(key, lambda value=value: value)


def test_stages_need_the_one_before(study: Study) -> None:
    with pytest.raises(ConfigError, match="stage 1 needs a stage 0 that reached 25 %"):
        stage_arms(study, 1)
    store(study, "ceiling-100", **{"cold: A": {"t": 0.9}, "epoch 1: A": {"t": 0.2}})
    with pytest.raises(ConfigError, match="stage 1 needs"):
        stage_arms(study, 1)
    store(study, "ceiling-100", **{"epoch 2: A": {"t": 0.25}})
    assert stage_arms(study, 1) == pilot_arms()
    with pytest.raises(ConfigError, match="finished pilot"):
        stage_arms(study, 2)
    for arm, values in PILOT.items():
        for seed, value in enumerate(values, start=100):
            store(study, f"panels-1-{arm}-{seed}", **{name: {"t": value} for name in PANELS})
    assert [arm.name for arm in stage_arms(study, 2)][-1] == "control"
    assert read_scores(study, 1)["grpo"][101] == Panels(trained=0.16, helped=0.16, new=0.16)
    store(study, "panels-1-sdar-100", A={"t": 0.5})  # not finished
    assert "sdar" not in read_scores(study, 1)


def test_no_second_stage_after_a_failed_pilot(study: Study) -> None:
    for arm in pilot_arms():
        for seed in (100, 101):
            store(study, f"panels-1-{arm.name}-{seed}", **{name: {"t": 0.15} for name in PANELS})
    with pytest.raises(ConfigError, match="the result is a no"):
        stage_arms(study, 2)


def test_a_finished_ceiling_loads_no_model(
    study: Study, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    found = {f"epoch {epoch}: A": {"t": 0.1 * epoch} for epoch in EPOCHS}
    ends = {f"epoch {EPOCHS[-1]}: {panel}": {"t": 0.3} for panel in ("A+", "B")}
    helped = {"scores": {"t": 0.5}, "rollouts": [[0, []]]}
    store(study, "ceiling-100", **found, **ends, **{"epoch 1: loss": 0.5, "helped": helped})
    monkeypatch.setattr(house_retention, "cold_run", lambda study, seed: None)
    monkeypatch.setattr(house_retention, "checkpoint", lambda run: run)
    ledger = ceiling(study, 100, print)
    _, rows = ceiling_table({100: ledger})
    assert rows[1] == ["100", "epoch 1", "0.500", "10.0", "-", "-"] and rows[-1][3:] == [
        "80.0",
        "30.0",
        "30.0",
    ]
    note = ceiling_note(100, ledger)
    assert "50.0 % of 16 episodes per task succeed with tips; 1 successes with tips (1 different)" in note
    assert "best A 80.0 % after epoch 8, which passes the line of 25 %." in note
    record = tmp_path / "record.json"
    given = ["--recipe", str(study.recipe), "--out", str(study.out), "--stage", "0", "--status"]
    assert main([*given, "--records", str(record), "--source", "a test"]) == 0
    assert "| 100 | epoch 1 | 0.500 | 10.0 | - | - |" in capsys.readouterr().out
    assert json.loads(record.read_text(encoding="utf-8"))["kind"] == "cells"


def test_the_cold_start_fills_the_memory_also_if_its_panels_are_from_another_machine(
    study: Study, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled, played = [], []

    @contextmanager
    def opened(settings: RunSettings, note: Note) -> Iterator[str]:
        yield str(settings.model.initial_checkpoint)

    def fill_memory(parts: str, file: Path) -> None:
        filled.append(parts)
        file.touch()

    def play(parts: str, panel: str, memory: Path) -> dict[str, float]:
        played.append(parts)
        return {"t": 0.5}

    for name, double in (("opened", opened), ("fill_memory", fill_memory), ("play", play)):
        monkeypatch.setattr(house_retention, name, double)
    weights = [study.cold(100) / "checkpoints" / "step-000000", study.out / "arm" / "step-000060"]
    for folder in weights:
        folder.mkdir(parents=True)
    for _ in range(2):
        play_panels(study, study.ledger("panels-1-arm-100"), 100, weights[1], "arm", print)
    assert filled == [str(weights[0])] and played == 3 * [str(weights[1])]


def test_an_open_ceiling_is_no_verdict(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "x", {"cpu_s": {}, "epoch 1: A": {"t": 0.1}})
    assert ceiling_note(0, ledger).endswith("later epochs are not measured.")
    assert ceiling_note(0, Ledger(tmp_path / "x", {"cpu_s": {}})).endswith("no epoch is measured.")


def test_the_training_reads_helped_successes_without_their_tips(monkeypatch: pytest.MonkeyPatch) -> None:
    traces = [trace(success=True, helped=True), trace(success=True, helped=False), trace(success=False)]
    evaluation = SimpleNamespace(task_scores={"t": 1.0})
    monkeypatch.setattr(house_retention, "reader", lambda parts, memory: None)
    monkeypatch.setattr(house_retention, "play_panel", lambda *args, **options: (evaluation, traces))
    parts: Any = SimpleNamespace(train_tasks=[])
    found = json.loads(json.dumps(helped_successes(parts, Path("memory.npz"))))
    assert found == {
        "scores": {"t": 1.0},
        "rollouts": [[0, [["prompt", [1, 2]], ["prompt", [5]], ["policy", [6]]]]],
    }
    [path] = stored_paths(found["rollouts"])
    assert [node.token_ids for node in path.nodes] == [(1, 2), (5,), (6,)]
    assert [node.credit for node in path.nodes] == [None, None, (1.0,)]


def trace(*, success: bool, helped: bool = True) -> Trace:
    result = Trace(task=Task(key="t", question="q"), modes=("tips_on",))
    pieces = [(Origin.PROMPT, (1, 2)), (Origin.MEMORY, (3, 4)), (Origin.PROMPT, (5,)), (Origin.POLICY, (6,))]
    parent = None
    for origin, ids in pieces:
        if origin is Origin.MEMORY and not helped:
            continue
        values = {"logprobs": (-1.0,), "entropies": (1.0,)} if origin is Origin.POLICY else {}
        message = Message(role="user", content="")
        node = result.append(parent=parent, origin=origin, token_ids=ids, message=message, **values)
        parent = node.node_id
    outcome = next(one for one in Outcome if not one.is_fault)
    leaf = Leaf(node_id=parent, rollout=0, outcome=outcome, episode_return=float(success), success=success)
    result.finish(leaf)
    return result
