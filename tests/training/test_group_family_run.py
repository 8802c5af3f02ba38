"""Every method of the group family end to end with a tiny real model; supervised fine-tuning as a run of its
own.
"""

import json
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from outrider.config import load_settings
from outrider.environments.tool_qa.environment import ToolEnvironment, ToolsConfig
from outrider.training.policy import Policy
from outrider.training.run_dir import RunDirectory
from outrider.training.settings import OptimizerSettings, RunSettings
from outrider.training.setup import run_training
from outrider.training.update import measure_kl, rollout_paths
from outrider.types import Step
from tests.tiny import tiny_model
from tests.training.test_pack_update import double_precision, eager, padded_logprobs, random_trace  # noqa: F401
from tests.training.tool_run import write_tool_run

HYBRID = 'type = "rapo"\ngroup_size = 4\nnum_hybrid = 2'
NUM_STEPS = 2


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = write_tool_run(tmp_path_factory.mktemp("family"))
    path.write_text(path.read_text().replace(HYBRID, ""))
    return path


def train(recipe: Path, name: str, *overrides: str) -> Path:
    settings = load_settings(
        RunSettings, file=recipe, overrides=["evaluation.every=0", f"train.num_steps={NUM_STEPS}", *overrides]
    )
    run = recipe.parent / name
    run_training((RunDirectory.create(run, settings), settings), progress="none", on_start=lambda stop: None)
    return run


def records(run: Path, kind: str = "train") -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == kind]


def weights(run: Path, step: int) -> dict[str, torch.Tensor]:
    return load_file(run / "checkpoints" / f"step-{step:06d}" / "masters.safetensors")


def moved(run: Path) -> bool:
    before, after = weights(run, 0), weights(run, NUM_STEPS)
    return any(not torch.equal(before[name], after[name]) for name in before)


PLUS = "algorithm.type=reinforce++"
GRPO = "algorithm.type=grpo"
RUNS: dict[str, list[str]] = {
    "reinforce++, groups of one": [PLUS, "algorithm.group_size=1", "train.tasks_per_step=6"],
    "reinforce++ with a KL in the reward": [
        PLUS, "algorithm.preset=reinforce++-verl", "algorithm.group_size=2"],
    "reinforce++-baseline": [PLUS, "algorithm.preset=reinforce++-baseline-official",
                             "algorithm.group_size=4"],
    "batch std": [GRPO, "algorithm.advantage_std=batch", "algorithm.group_size=4"],
    "dapo": [
        GRPO, "algorithm.preset=dapo-official", "algorithm.group_size=3", "algorithm.overlong.max_tokens=40",
        "algorithm.overlong.buffer=40", "algorithm.dynamic_sampling.max_extra_batches=1",
    ],
    "gppo": [GRPO, "algorithm.preset=gppo-paper", "algorithm.group_size=4", "update.num_epochs=2"],
    "gspo": [GRPO, "algorithm.preset=gspo", "algorithm.group_size=4", "update.num_mini_batches=2"],
    "cispo": [GRPO, "algorithm.preset=cispo-official", "algorithm.group_size=4", "update.num_mini_batches=2"],
    "rloo": [GRPO, "algorithm.preset=rloo-trl", "algorithm.group_size=4"],
    "dr-grpo": [GRPO, "algorithm.preset=dr-grpo", "algorithm.group_size=4", "algorithm.max_length=300"],
    # one rollout in 15 passes
    "rejection": ["algorithm.type=rejection", "algorithm.group_size=12", "algorithm.threshold=0.5"],
    "engine masks": [GRPO, "algorithm.group_size=4", "algorithm.sampler_rejection={upper = 2.0}"],
}  # fmt: skip


FAST = ("dapo",)  # tests/golden plays a preset of every method


@pytest.mark.parametrize(
    "name", [*FAST, *(pytest.param(name, marks=pytest.mark.slow) for name in RUNS if name not in FAST)]
)
def test_a_method_trains_and_one_seed_gives_the_same_weights(recipe: Path, name: str) -> None:
    folder = name.replace(" ", "-").replace(",", "")
    run = train(recipe, folder, *RUNS[name])
    found = records(run)
    assert len(found) == NUM_STEPS and moved(run)
    for record in found:
        assert record["rollout/num_masked"] == 0 and record["grad/num_skipped"] == 0
    if name.startswith("rejection"):
        assert any(
            0 < record["rejection/kept_fraction"] <= record["rejection/passed_fraction"] < 1
            for record in found
        )
        assert all(record["loss/policy"] >= 0 for record in found if "loss/policy" in record)
    if name == "dapo":
        assert sum(record["group/num_extra_batches"] for record in found) > 0
        assert all(
            record["group/num"] - record["group/num_dropped"] + record["group/num_missing"] == 2
            for record in found
        )
        assert all(record["reward/overlong_mean"] < 0 for record in found if record["group/num_missing"] < 2)
        # the environment's, without the punishment
        assert all(record["reward/max"] in (0.0, 1.0) for record in found)
    if name == "gppo":
        assert all(record["loss/positive_nll"] > 0 for record in found if record["reward/success_rate"] > 0)
    if "KL" in name:
        assert found[0]["reward/kl_mean"] == 0.0 and found[1]["reward/kl_mean"] != 0.0
        assert "loss/kl" not in found[0]  # the reference serves the reward alone
    if name in ("dapo", "reinforce++ with a KL in the reward"):
        again = train(recipe, f"{folder}-again", *RUNS[name])
        first, second = weights(run, NUM_STEPS), weights(again, NUM_STEPS)
        assert all(torch.equal(first[one], second[one]) for one in first)


def test_dynamic_sampling_continues_from_its_cursor_to_the_same_bits(recipe: Path) -> None:
    """As a kill after step 1 of 3 leaves it: the newest checkpoint is older than metrics and traces. Kills:
    test_resume.py.
    """
    run = train(
        recipe,
        "cursor",
        *RUNS["dapo"],
        "train.num_steps=3",
        "train.checkpoint_every=1",
        "train.keep_checkpoints=9",
    )
    states = [
        json.loads((run / "checkpoints" / f"step-{step:06d}" / "state.json").read_text()) for step in range(4)
    ]
    cursors = [state["task_cursor"] for state in states]
    # further than the step's number times its tasks
    assert cursors[0] == 0 and cursors[3] > 6 and cursors == sorted(cursors)
    killed = recipe.parent / "cursor-killed"
    shutil.copytree(run, killed)
    for step in (2, 3):
        shutil.rmtree(killed / "checkpoints" / f"step-{step:06d}")
    resumed = (RunDirectory(killed), load_settings(RunSettings, file=killed / "config.toml"))
    run_training(resumed, progress="none", on_start=lambda stop: None)
    for name in ("masters.safetensors", "optimizer.safetensors", "state.json"):
        place = Path("checkpoints") / "step-000003" / name
        assert (run / place).read_bytes() == (killed / place).read_bytes(), name
    clock = ("time/", "speed/", "memory/")
    first, second = (
        [
            {name: value for name, value in record.items() if not name.startswith(clock)}
            for record in records(one)
        ]
        for one in (run, killed)
    )
    assert first == second and len(first) == 3


def test_a_step_without_a_single_group_is_said_and_survived(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = load_settings(
        RunSettings,
        file=recipe,
        overrides=[
            "evaluation.every=0", "train.num_steps=1", GRPO, "algorithm.group_size=2", "rollout.max_turns=1",
            "rollout.max_turn_tokens=1", "algorithm.dynamic_sampling.max_extra_batches=1",
        ],
    )  # fmt: skip
    run = recipe.parent / "nothing"
    run_training((RunDirectory.create(run, settings), settings), progress="plain", on_start=lambda stop: None)
    [record] = records(run)
    assert record["group/num_missing"] == 2.0 and record["group/fraction_without_signal"] == 1.0
    assert "2 of 2 groups are missing after 1 extra batches" in "".join(capsys.readouterr())
    before, after = weights(run, 0), weights(run, 1)
    assert all(torch.equal(before[name], after[name]) for name in before)


def _expert(self: ToolEnvironment) -> list[Step]:
    task = self.task
    thing = task.question.removeprefix("Where is the ").removesuffix("?")
    return [
        Step(text=f"<search>{thing}</search>", observation=""),
        Step(text=f"<answer>{task.answers[0]}</answer>", observation="", is_terminal=True),
    ]


def test_fine_tuning_alone_is_a_run_with_an_evaluation_after_it(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ToolEnvironment, "expert", _expert)
    monkeypatch.setattr(ToolsConfig, "has_experts", True)
    options = [
        "train.num_steps=0",
        "cold_start.num_examples=6",
        "cold_start.batch_size=6",
        "cold_start.num_epochs=8",
        GRPO,
    ]
    run = train(recipe, "sft", *options, "algorithm.kl_weight=0.1", "cold_start.learning_rate=1e-3")
    losses = [record["sft/loss"] for record in records(run, "sft")]
    assert len(losses) == 8 and losses[-1] < losses[0] and not records(run)
    labels = [json.loads(line)["label"] for line in (run / "evaluations.jsonl").read_text().splitlines()]
    assert labels == ["before training", "after cold start"]
    assert weights(run, 0) and (run / "report.html").exists()
    capsys.readouterr()
    # this process holds its lock
    resumed = (RunDirectory(run), load_settings(RunSettings, file=run / "config.toml"))
    run_training(resumed, progress="plain", on_start=lambda stop: None)
    assert "this run is finished" in "".join(capsys.readouterr())
    assert len((run / "evaluations.jsonl").read_text().splitlines()) == 2
    # Its weights are where another run begins.
    after = train(
        recipe,
        "after-sft",
        GRPO,
        f"model.initial_checkpoint={run / 'checkpoints' / 'step-000000'}",
        "train.num_steps=1",
    )
    assert all(torch.equal(value, weights(run, 0)[name]) for name, value in weights(after, 0).items())


def test_a_cold_start_goes_on_without_the_experts_that_hang(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    release = threading.Event()

    def hangs(self: ToolEnvironment) -> list[Step]:
        if self.task.key.endswith("-1"):
            release.wait(60)
        return _expert(self)

    monkeypatch.setattr(ToolEnvironment, "expert", hangs)
    monkeypatch.setattr(ToolsConfig, "has_experts", True)
    options = [
        "train.num_steps=0",
        "cold_start.num_examples=6",
        "cold_start.batch_size=6",
        GRPO,
        "train.max_retries=0",
    ]
    settings = load_settings(RunSettings, file=recipe, overrides=[*options, "train.expert_timeout_s=1"])
    run = recipe.parent / "hanging"
    run_training((RunDirectory.create(run, settings), settings), progress="plain", on_start=lambda stop: None)
    release.set()
    told = "".join(capsys.readouterr())
    assert (
        "cold start: 1 of 6 expert rollouts were lost to faults: the expert of " in told
        and "no answer within 1 s" in told
    )
    assert "5 of 6 expert rollouts solved their task" in told and records(run, "sft")


def test_the_measured_kl_is_that_of_two_plain_passes() -> None:
    traces = [random_trace(seed, key=str(seed)) for seed in range(3)]
    for trace in traces:
        for node in trace.nodes:
            node.credit = None  # it is measured before there is any
    policy = Policy(tiny_model(dtype=torch.float64), OptimizerSettings())
    reference = Policy(tiny_model(dtype=torch.float64, seed=9), OptimizerSettings()).frozen_copy()
    for max_tokens in (1, 60, 10_000):
        measure_kl(policy, reference, traces, max_tokens=max_tokens)
        paths = rollout_paths(traces)
        with torch.no_grad():
            ours, theirs = (padded_logprobs(eager(one.language_model), paths) for one in (policy, reference))
        for path, mine, other in zip(paths, ours, theirs, strict=True):
            found = [value for node in path.nodes if node.trainable for value in node.kl]
            assert found == pytest.approx((mine - other).tolist(), abs=1e-9)
    assert all(node.credit is None for trace in traces for node in trace.nodes)
