"""Short runs of the algorithms with a tiny real model: equal bits, what a step records, and files on disk.

That no bit of any preset changes is held by tests/golden, and that a killed run ends in the same bits by
test_resume.py.
"""

import json
import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from outrider.algorithms.base import ObjectiveSettings
from outrider.config import load_settings, validate
from outrider.engines.local import cpu_kernels
from outrider.environments.tool_qa.environment import ToolEnvironment, ToolsConfig
from outrider.errors import ConfigError, DataError
from outrider.training.replay import replay_step
from outrider.training.run_dir import RunDirectory
from outrider.training.settings import RunSettings
from outrider.training.setup import run_training
from outrider.types import Origin, Step
from outrider.viewer.records import TraceReader
from tests.log_lines import messages
from tests.training.short_runs import labels, records, resume, same_weights, train
from tests.training.tool_run import write_demonstrations, write_tool_run

HYBRID = 'type = "rapo"\ngroup_size = 4\nnum_hybrid = 2'
GRPO = "algorithm.type=grpo"


@pytest.fixture(scope="module")
def rapo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recipe of RAPO."""
    path = write_tool_run(tmp_path_factory.mktemp("runs"))
    write_demonstrations(path.parent / "shown.jsonl")
    return path


@pytest.fixture(scope="module")
def recipe(rapo: Path) -> Path:
    """Without an algorithm."""
    path = rapo.with_name("plain.toml")
    path.write_text(rapo.read_text().replace(HYBRID, ""))
    return path


def test_one_seed_gives_equal_bits_and_another_seed_does_not(rapo: Path) -> None:
    """Whatever else drew random numbers, and with or without an evaluation before training."""
    first = train(rapo, "first", "train.num_steps=2")
    torch.manual_seed(99)
    torch.rand(7)
    np.random.seed(5)
    second = train(rapo, "second", "train.num_steps=2", "evaluation.at_start=false")
    other = train(rapo, "other", "train.num_steps=2", "seed=4")
    assert not same_weights(first, first, 0, 2), "nothing was learned, so nothing was compared"
    assert same_weights(first, second, 2) and not same_weights(first, other, 2)
    assert len(labels(first)) == 2 and labels(second) == labels(first)[1:]
    with pytest.raises(ConfigError, match="nothing to do"):
        load_settings(RunSettings, file=rapo, overrides=["train.num_steps=0", "evaluation.at_start=false"])
    # Which rollouts share a batch changes at most the last digits of a log-prob, and no token of these.
    alone = train(rapo, "alone", "train.num_steps=1", "train.max_concurrent=1")
    texts: list[dict[tuple[str, int], list[tuple[str, str]]]] = []
    for run in (first, alone):
        paths: dict[tuple[str, int], list[tuple[str, str]]] = {}
        for row in TraceReader(run / "traces").read(1):
            paths.setdefault((row.task_key, row.rollout), []).append((row.origin, row.text))
        texts.append(paths)
    assert texts[0] == texts[1]


def test_a_schedule_that_a_budget_may_cut_is_reported(rapo: Path) -> None:
    """A comparison at equal tokens has 100,000 steps, over which retrieval faded in no run."""
    fading = [
        "algorithm.retrieval.schedule=linear", "algorithm.retrieval.final_probability=0",
        "train.num_steps=50", "evaluation.at_start=false",
    ]  # fmt: skip
    lines = {}
    for name, options in {
        "cut": ["train.max_policy_tokens=1"],
        "own": ["train.max_policy_tokens=1", "algorithm.retrieval.schedule_steps=2"],
    }.items():
        run = train(rapo, f"faded-{name}", *fading, *options)
        lines[name] = [line["text"] for line in map(json.loads, (run / "notes.jsonl").open())]
    assert sum("does not reach final_probability" in line for line in lines["cut"]) == 1
    assert not any("does not reach final_probability" in line for line in lines["own"])


def test_bfloat16_trains_without_packed_layers_for_it(rapo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It crashed in the first rollout. From the rollout over the check of log-probs to the update."""
    monkeypatch.setattr(cpu_kernels, "can_pack", lambda dtype: False)
    run = train(rapo, "bfloat16", "train.num_steps=1", "model.precision=bfloat16")
    assert not same_weights(run, run, 0, 1)


OFF: dict[str, dict[str, Any]] = {
    "rapo": {"num_hybrid": 0, "group_size": 4},
    "empo2": {"memory_probability": 0, "intrinsic_coefficient": 0, "memory": {"embedder": "hash"}},
    "arpo": {"group_size": 4, "first_wave": 4},
    "combined": {},
    "gigpo": {"step_weight": 0.0, "normalization": "std"},
    "luffy": {"num_demonstrations": 0},
    "rollout_replay": {"fresh_share": 1.0},
}


@pytest.fixture(scope="module")
def run_of(rapo: Path) -> Any:
    """The run of an algorithm's settings, made once."""
    runs: dict[str, Path] = {}
    options = [
        "evaluation.every=0", "evaluation.at_start=false", "evaluation.num_tasks=1", "train.num_steps=2",
        "optimizer.learning_rate=3e-3",
    ]  # fmt: skip
    base = load_settings(RunSettings, file=rapo, overrides=options).model_dump(mode="json")

    def make(algorithm: dict[str, Any]) -> Path:
        settings = validate(RunSettings, {**base, "algorithm": algorithm})
        key = json.dumps(settings.algorithm.model_dump(mode="json"), sort_keys=True)
        if key not in runs:
            runs[key] = rapo.parent / f"off-{len(runs)}"
            opened = (RunDirectory.create(runs[key], settings), settings)
            run_training(opened, progress="none", on_start=lambda stop: None)
        return runs[key]

    return make


@pytest.mark.parametrize("method", OFF)
def test_switched_off_it_is_grpo_bit_for_bit(method: str, run_of: Any) -> None:
    """GRPO with the method's own defaults of the objective, which for some of them are not those of GRPO."""
    off = {"type": method, **OFF[method]}
    settings = validate(RunSettings, {"environment": {"type": "factbook"}, "algorithm": off}).algorithm
    shared = {*ObjectiveSettings.model_fields, "group_size"}
    objective = settings.model_dump(mode="json", include=shared)
    ours, grpo = run_of(off), run_of({"type": "grpo", **objective})
    assert same_weights(ours, grpo, 2) and not same_weights(grpo, grpo, 0, 2)


def test_branching_trains_whole_groups_that_share_turns_and_calls(recipe: Path) -> None:
    run = train(
        recipe, "arpo", "algorithm.type=arpo", "algorithm.preset=arpo", "algorithm.group_size=8",
        "algorithm.first_wave=5", "algorithm.base_probability=1.0", "algorithm.window=4",
        "train.num_steps=2", "train.tasks_per_step=6",
    )  # fmt: skip
    steps = records(run)
    for record in steps:
        assert record["rollout/num"] == 48 and record["rollout/num_masked"] == 0
        on_paths = record["rollout/tool_calls_per_leaf"] * 48
        assert record["rollout/num_tool_calls"] + record["rollout/num_tool_calls_shared"] == pytest.approx(
            on_paths
        )
    assert sum(record["branch/num_forks"] for record in steps) > 0
    assert sum(record["rollout/num_tool_calls_shared"] for record in steps) > 0
    rows = TraceReader(run / "traces").read(1)
    turns = [(row.trace_id, row.parent_id) for row in rows if row.origin is Origin.POLICY]
    prompts = {(row.trace_id, row.node_id) for row in rows if row.origin is Origin.PROMPT}
    assert any(turns.count(parent) > 1 for parent in turns if parent not in prompts)
    page = (run / "report.html").read_text()
    assert "Branching groups" in page and "left in front of it" in page and "advantage" in page
    assert replay_step(run, 2) == 0


def test_branching_is_refused_where_a_fork_would_not_be_exact(rapo: Path) -> None:
    branching = ["environment.type=scienceworld", "algorithm.type=arpo"]
    load_settings(RunSettings, file=None, overrides=branching)
    with pytest.raises(ConfigError, match="replay differently: find-animal"):
        load_settings(RunSettings, file=None, overrides=[*branching, "environment.deterministic=false"])
    hard = ["algorithm.branch.first_wave=5", "algorithm.group_size=8", "algorithm.branch.attribution=hard"]
    with pytest.raises(ConfigError, match="ratio_weight = 0"):
        load_settings(RunSettings, file=rapo, overrides=hard)


def test_luffy_trains_on_demonstrations_that_are_in_no_other_measure(recipe: Path) -> None:
    """The policy's own rollouts are those of a group without the demonstration."""
    more = ("optimizer.learning_rate=3e-3", "evaluation.num_tasks=1")
    luffy = (
        "algorithm.type=luffy",
        "algorithm.group_size=4",
        f"algorithm.demonstrations={recipe.parent / 'shown.jsonl'}",
    )
    run = train(
        recipe,
        "luffy",
        *luffy,
        "algorithm.preset=luffy-paper",
        *more,
        "train.num_steps=3",
        "train.keep_checkpoints=9",
    )
    steps = records(run)
    for record in steps:
        assert record["rollout/num"] == 6
        assert record["luffy/num_groups_without"] == record["luffy/num_faults"] == 0
        assert record["luffy/return_demonstration"] == record["luffy/fraction_solved"] == 1.0
        assert record["ratio/mean"] == pytest.approx(1.0, abs=1e-6)
        assert record.get("gap/logprob_max", 0.0) < 1e-3 and record["grad/num_skipped"] == 0
    trained = [record for record in steps if record.get("luffy/num_tokens")]
    assert trained and all(0 < record["luffy/probability_mean"] < 1 for record in trained)
    rows = TraceReader(run / "traces").read(1)
    shown = [row for row in rows if row.origin is Origin.DEMONSTRATION]
    # three turns in both groups
    assert len(shown) == 6 and not any(row.tokens or row.logprobs for row in shown)
    assert steps[0]["tokens/policy"] == sum(len(row.tokens) for row in rows if row.origin is Origin.POLICY)
    assert "demonstration" in (run / "report.html").read_text()
    assert replay_step(run, 1) == 0
    plain = train(recipe, "without", GRPO, "algorithm.group_size=3", *more, "train.num_steps=1")
    texts = [
        [
            (row.task_key, row.rollout, row.text)
            for row in TraceReader(one / "traces").read(1)
            if row.origin is Origin.POLICY
        ]
        for one in (run, plain)
    ]
    assert texts[0] == texts[1] and steps[0]["reward/mean"] == records(plain)[0]["reward/mean"]
    assert not same_weights(run, plain, 1)


def test_demonstrations_must_be_there_before_the_first_rollout(recipe: Path) -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.demonstrations"):
        load_settings(RunSettings, file=recipe, overrides=["algorithm.type=luffy"])
    write_demonstrations(recipe.parent / "foreign.jsonl", prefix="other")
    for name, reason in (
        ("lost", "cannot be read"),
        ("foreign", "no demonstration of a training task"),
    ):
        with pytest.raises(DataError, match=reason):
            train(
                recipe, name, "algorithm.type=luffy",
                f"algorithm.demonstrations={recipe.parent / name}.jsonl",
            )  # fmt: skip
        assert not (recipe.parent / name / "config.toml").exists()


def test_replay_trains_on_stored_groups_and_plays_fewer(recipe: Path) -> None:
    run = train(
        recipe, "replay", "algorithm.type=rollout_replay", "algorithm.selection=difficulty",
        "train.tasks_per_step=4", "algorithm.num_fresh_steps=2", "algorithm.group_size=4",
        "update.num_mini_batches=2", "optimizer.learning_rate=3e-3", "train.num_steps=5",
    )  # fmt: skip
    steps = records(run)
    assert [record["rollout/num"] for record in steps] == [16, 16, 8, 8, 8]
    assert steps[0]["replay/num_groups"] == 0 and sum(record["replay/num_groups"] for record in steps) >= 2
    for record in steps:
        assert record["group/num"] == record["rollout/num"] / 4
        assert record["replay/num_groups"] <= min(4 - record["group/num"], record["replay/num_eligible"])
        if record["replay/num_groups"]:
            assert record["replay/age_max"] >= record["replay/age_mean"] >= 1
            assert record["replay/weight_max"] >= record["replay/weight_mean"] > 0
            assert record["replay/num_tokens"] > 0
        assert record.get("gap/logprob_max", 0.0) < 1e-3  # of the fresh tokens alone
    assert "replay/estimate_mean" in steps[-1]
    assert replay_step(run, 5) == 0


TIPS = (
    "algorithm.type=empo2", "algorithm.group_size=4", "algorithm.memory.embedder=hash",
    "algorithm.memory.min_similarity=0.1", "algorithm.memory.max_shown_tokens=120",
    "algorithm.memory.max_tip_tokens=24",
)  # fmt: skip


@pytest.mark.parametrize("preset", ["empo2", pytest.param("empo2-alg1", marks=pytest.mark.slow)])
def test_empo2_trains_in_all_modes(recipe: Path, preset: str, capsys: pytest.CaptureFixture[str]) -> None:
    run = train(
        recipe, preset, *TIPS, f"algorithm.preset={preset}", "algorithm.memory_probability=0.7",
        "train.num_steps=6", progress="plain",
    )  # fmt: skip
    steps = records(run)
    groups = {
        mode: sum(record[f"tips/num_groups_{mode}"] for record in steps)
        for mode in ("plain", "tips_on", "tips_off")
    }
    assert sum(groups.values()) == 12 and all(groups.values())
    assert sum(record["tips/num_shown"] for record in steps) > 0 and steps[-1]["tips/memory_size"] > 0
    assert sum(record.get("tips/num_off_tokens", 0) for record in steps) > 0
    for record in steps:
        assert record["rollout/num_masked"] == 0
        assert record["gap/logprob_mean"] < 1e-4  # the engine is compared with the context that it saw
        if record.get("tips/num_off_tokens"):
            assert np.isfinite(record["tips/kl_acting_student"])
            assert 0 <= record["tips/masked_fraction"] <= 1
            if preset == "empo2-alg1":  # one step on data of the same weights: the denominator is its own
                assert record["tips/ratio_mean"] == pytest.approx(1.0, abs=1e-6)
    assert (run / "report.html").exists() and "NO TIPS" not in capsys.readouterr().out


def test_a_run_that_can_show_no_tip_warns_at_its_start(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Six tasks, two a step: after three steps none has been played twice."""
    options = ("algorithm.memory_probability=1", "algorithm.memory.scope=task", "train.num_steps=3")
    run = train(recipe, "no-tips", *TIPS, *options, progress="plain")
    [line] = [line for line in messages(capsys.readouterr().out) if line.startswith("NO TIPS")]
    assert "6 groups" in line and "6 tasks" in line and "algorithm.memory.scope" in line
    assert sum(record["tips/num_shown"] for record in records(run)) == 0


DAPO = (
    GRPO, "algorithm.preset=dapo-official", "algorithm.group_size=3", "algorithm.overlong.max_tokens=40",
    "algorithm.overlong.buffer=40", "algorithm.dynamic_sampling.max_extra_batches=1",
)  # fmt: skip


def test_dynamic_sampling_continues_from_its_cursor_to_the_same_bits(recipe: Path) -> None:
    """As a kill after step 1 of 3 leaves it: the newest checkpoint is older than metrics and traces."""
    options = ("train.num_steps=3", "train.checkpoint_every=1", "train.keep_checkpoints=9")
    run = train(recipe, "dapo", *DAPO, *options)
    steps = records(run)
    assert sum(record["group/num_extra_batches"] for record in steps) > 0
    for record in steps:
        groups = record["group/num"] - record["group/num_dropped"] + record["group/num_missing"]
        assert groups == 2 and record["rollout/num_masked"] == record["grad/num_skipped"] == 0
        # the environment's, without the punishment
        assert record["reward/max"] in (0.0, 1.0)
        assert record["group/num_missing"] == 2 or record["reward/overlong_mean"] < 0
    cursors = [
        json.loads((run / "checkpoints" / f"step-{step:06d}" / "state.json").read_text())["task_cursor"]
        for step in range(4)
    ]
    # further than the step's number times its tasks
    assert cursors[0] == 0 and cursors[3] > 6 and cursors == sorted(cursors)
    killed = Path(shutil.copytree(run, recipe.parent / "dapo-killed"))
    for step in (2, 3):
        shutil.rmtree(killed / "checkpoints" / f"step-{step:06d}")
    resume(killed)
    for name in ("masters.safetensors", "optimizer.safetensors", "state.json"):
        last = Path("checkpoints") / "step-000003" / name
        assert (run / last).read_bytes() == (killed / last).read_bytes(), name


@pytest.mark.slow
@pytest.mark.parametrize("method", ["rejection", "kl in the reward", "gppo", "echo"])
def test_measures_of_other_methods(recipe: Path, method: str) -> None:
    options = {
        # one rollout in 15 passes
        "rejection": ["algorithm.type=rejection", "algorithm.group_size=12", "algorithm.threshold=0.5"],
        "kl in the reward": [
            "algorithm.type=reinforce++", "algorithm.preset=reinforce++-verl", "algorithm.group_size=2",
        ],
        "gppo": [GRPO, "algorithm.preset=gppo-paper", "algorithm.group_size=4", "update.num_epochs=2"],
        "echo": [GRPO, "algorithm.observation_nll=0.1", "algorithm.group_size=4"],
    }  # fmt: skip
    steps = records(train(recipe, method.replace(" ", "-"), *options[method], "train.num_steps=2"))
    if method == "rejection":
        shares = [(one["rejection/kept_fraction"], one["rejection/passed_fraction"]) for one in steps]
        assert any(0 < kept <= passed < 1 for kept, passed in shares)
        assert all(one.get("loss/policy", 0) >= 0 for one in steps)
    elif method == "gppo":
        assert all(one["loss/positive_nll"] > 0 for one in steps if one["reward/success_rate"] > 0)
    elif method == "echo":
        assert all(one["loss/observation_nll"] > 0 for one in steps)
    else:
        assert steps[0]["reward/kl_mean"] == 0.0 and steps[1]["reward/kl_mean"] != 0.0
        assert "loss/kl" not in steps[0]  # the reference serves the reward alone


def test_lamer_trains_reflections_and_evaluates_single_episodes(recipe: Path) -> None:
    options = ("algorithm.num_episodes=2", "algorithm.max_reflection_tokens=12", "algorithm.group_size=4")
    run = train(recipe, "lamer", "train.num_steps=1", "algorithm.type=lamer", *options)
    [record] = records(run)
    assert record["rollout/num_restarts"] > 0 and record["lamer/shown_fraction"] == 1.0
    assert record["lamer/episodes"] == 1.0 + record["rollout/num_restarts"] / record["rollout/num"]
    assert record["gap/logprob_max"] < 1e-4  # the update computes the contexts that the engine saw
    assert not same_weights(run, run, 0, 1)
    reader = TraceReader(run / "traces")
    rows = reader.read(1)
    reflections = [row for row in rows if row.origin is Origin.POLICY and '"reflection"' in row.metadata]
    assert len(reflections) == record["rollout/num_restarts"]
    assert any(any(row.advantages) for row in reflections)
    assert not any('"episode"' in row.metadata for row in reader.read_evaluation(0))
    assert replay_step(run, 1) == 0


def test_a_step_without_a_single_group_is_reported_and_changes_nothing(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = train(
        recipe, "nothing", "train.num_steps=1", GRPO, "algorithm.group_size=2", "rollout.max_turns=1",
        "rollout.max_turn_tokens=1", "algorithm.dynamic_sampling.max_extra_batches=1", progress="plain",
    )  # fmt: skip
    [record] = records(run)
    assert record["group/num_missing"] == 2.0 and record["group/fraction_without_signal"] == 1.0
    assert "2 of 2 groups are missing after 1 extra batch" in "".join(capsys.readouterr())
    assert same_weights(run, run, 0, 1)


def solve(self: ToolEnvironment) -> list[Step]:
    thing = self.task.question.removeprefix("Where is the ").removesuffix("?")
    return [
        Step(text=f"<search>{thing}</search>", observation=""),
        Step(text=f"<answer>{self.task.answers[0]}</answer>", observation="", is_terminal=True),
    ]


SFT = (GRPO, "train.num_steps=0", "cold_start.num_examples=6", "cold_start.batch_size=6")


def test_fine_tuning_alone_is_a_run_with_an_evaluation_after_it(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ToolEnvironment, "expert", solve)
    monkeypatch.setattr(ToolsConfig, "has_experts", True)
    options = ("cold_start.num_epochs=8", "algorithm.kl_weight=0.1", "cold_start.learning_rate=1e-3")
    run = train(recipe, "sft", *SFT, *options)
    losses = [record["sft/loss"] for record in records(run, "sft")]
    assert len(losses) == 8 and losses[-1] < losses[0] and not records(run)
    assert [label for label, _ in labels(run)] == ["before training", "after cold start"]
    assert (run / "report.html").exists()
    capsys.readouterr()
    resume(run, progress="plain")
    assert "this run is finished" in "".join(capsys.readouterr()) and len(labels(run)) == 2
    # Its weights are where another run begins.
    first = f"model.initial_checkpoint={run / 'checkpoints' / 'step-000000'}"
    assert same_weights(run, train(recipe, "after-sft", GRPO, first, "train.num_steps=1"), 0)


def test_a_cold_start_continues_without_the_experts_that_hang(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    release = threading.Event()

    def hangs(self: ToolEnvironment) -> list[Step]:
        if self.task.key.endswith("-1"):
            release.wait(60)
        return solve(self)

    monkeypatch.setattr(ToolEnvironment, "expert", hangs)
    monkeypatch.setattr(ToolsConfig, "has_experts", True)
    run = train(recipe, "hanging", *SFT, "train.max_retries=0", "train.expert_timeout_s=1", progress="plain")
    release.set()
    output = "".join(capsys.readouterr())
    assert "cold start: 1 of 6 expert rollouts were lost to faults: the expert of " in output
    assert "no answer within 1 s" in output
    assert "5 of 6 expert rollouts solved their task" in output and records(run, "sft")
