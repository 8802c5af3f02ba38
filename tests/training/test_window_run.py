"""Runs with a prompt for every turn: trained, stopped and resumed, replayed, and evaluated at an endpoint."""

import shutil
from pathlib import Path

import pytest

from outrider.cli import main
from outrider.config import load_settings
from outrider.environments.base import make_task_set
from outrider.environments.house import HouseConfig
from outrider.environments.window import WindowSettings
from outrider.errors import CheckpointError, ConfigError
from outrider.planning.memory import make_workload
from outrider.rollout.experts import play_experts
from outrider.rollout.settings import Limits
from outrider.trace import split_contexts
from outrider.training.cold_start import successful_paths
from outrider.training.packing import pack
from outrider.training.settings import RunSettings
from outrider.training.update import rollout_paths
from tests.rollout.test_window_rollouts import TOKENIZER, ids_of, play, prompts
from tests.training.short_runs import assert_same, begin, interrupted, records, resume
from tests.training.tool_run import write_house_model

RECIPE = """
seed = 0
num_threads = 1
[model]
name = "{root}/model"
precision = "float32"
device = "cpu"
[environment]
type = "house"
num_train = 2
num_test = 1
max_moves = 4
house = {{num_rooms = 2, num_things = 2}}
context = "window"
window = {{steps = 2, prompt = "{root}/prompt", parse = "tag-only", max_prompt_tokens = 2000}}
[algorithm]
type = "gigpo"
group_size = 4
invalid_penalty = 0.1
[rollout]
max_turns = 4
max_turn_tokens = 1
max_response_tokens = 1
[train]
tasks_per_step = 2
num_steps = 2
[evaluation]
num_tasks = 1
at_start = false
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("window")
    write_house_model(folder / "model")
    (folder / "prompt").mkdir()
    texts = {
        "first": "{observation}\n{actions}\n",
        "later": "{task} {history}\n{observation}\n{actions}\n",
        "step": "{observation} {action}",
    }
    for name, text in texts.items():
        (folder / "prompt" / f"{name}.txt").write_text(text)
    (folder / "recipe.toml").write_text(RECIPE.format(root=folder))
    return folder


@pytest.fixture(scope="module")
def whole(root: Path) -> Path:
    begin(root / "recipe.toml", root / "run")
    return root / "run"


def settings_of(root: Path, *overrides: str) -> RunSettings:
    return load_settings(RunSettings, file=root / "recipe.toml", overrides=overrides)


def test_a_run_trains_one_sample_a_turn_with_the_log_probs_of_the_engine(whole: Path) -> None:
    for record in records(whole):
        assert record["rollout/num_restarts"] > 0
        assert record["gap/logprob_max"] < 1e-5


def test_a_run_resumes_with_the_same_bits(whole: Path) -> None:
    copy = interrupted(whole)
    resume(copy)
    assert_same(whole, copy)
    shutil.rmtree(copy)


def test_another_prompt_is_noticed_on_resume(whole: Path, root: Path) -> None:
    copy, file = interrupted(whole), root / "prompt" / "later.txt"
    before = file.read_text()
    file.write_text("Look: " + before)
    try:
        with pytest.raises(CheckpointError, match=r"environment\.window\.prompt/later\.txt"):
            resume(copy)
    finally:
        file.write_text(before)
        shutil.rmtree(copy)


def test_a_recorded_rollout_can_be_replayed(whole: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(whole), "--step", "1"]) == 0
    assert "same                 │ 8" in capsys.readouterr().out


def test_the_tokens_of_an_update_are_those_of_an_independent_count() -> None:
    """The prompt and the reply of every turn, rendered and tokenized apart from the rollout."""
    trace, _ = play()
    [(_, path)] = trace.rollouts()
    for node in path:
        if node.trainable:
            node.credit = (1.0,) * len(node.token_ids)
    (batch,) = pack(rollout_paths([trace]), max_tokens=100_000)
    replies = [
        len(TOKENIZER.encode(node.message.content)) + 1 for node in path if node.trainable
    ]  # and its end
    shown = prompts()[:4]
    assert len(replies) == len(split_contexts(path[:-1])) == 4
    assert batch.num_tokens == sum(len(ids_of(text)) for text in shown) + sum(replies)
    assert len(batch.token_T) == sum(replies)


def test_a_plan_and_a_dry_run_count_samples(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = settings_of(root)
    work = make_workload(settings, prompt_tokens=100_000)
    assert (work.context, work.contexts) == (2001, 4) and settings.max_rollout_tokens == 4
    assert main(["train", str(root / "recipe.toml"), "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "fields that they do not use: num_shown, skills, step, steps_taken" in out
    assert "at most 32 a step, of at most 2,001 tokens" in out and "at most 32 response tokens" in out
    assert "first prompt of house/" in out and "| You are in the hall." in out


def test_a_prompt_beyond_the_positions_of_the_model_is_refused(root: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"max_prompt_tokens = 4096 and rollout.max_turn_tokens = 1 are together"
    ):
        begin(root / "recipe.toml", root / "refused", "environment.window.max_prompt_tokens=4096")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("algorithm.type=rapo", "algorithm.num_hybrid=2"), "rapo shows retrieved steps inside a growing"),
        (("algorithm.type=lamer",), "lamer shows reflections in later episodes"),
        (("algorithm.type=grpo", "algorithm.prefix={}"), "algorithm.prefix begins conversations"),
        (("algorithm.type=grpo", "algorithm.observation_nll=0.1"), "set 0"),
        (
            ("engine={type='retrospex',critic='x'}", "evaluation.at_start=true", "train.num_steps=0"),
            "reads plain messages",
        ),
        (("cold_start.num_examples=1", "cold_start.retrieve_share=0.5"), "cold_start.retrieve_share shows"),
        (("evaluation.num_trials=2", "evaluation.memory=reflexion"), "shows plans in the first prompt"),
    ],
)
def test_what_needs_a_growing_conversation_says_so(
    overrides: tuple[str, ...], message: str, root: Path
) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        settings_of(root, "algorithm={type='grpo'}", *overrides)
    assert "\n" not in str(error.value) and "window" in str(error.value)
    assert "program" not in str(error.value)


def test_experts_teach_windows() -> None:
    """A cold start imitates every turn in the prompt that a policy would see, in a form that is valid."""
    window = WindowSettings(parse="verl-agent-30", max_prompt_tokens=4000)
    task_set = make_task_set(HouseConfig(context="window", window=window))
    limits = Limits(max_turns=8, max_turn_tokens=100, max_response_tokens=100)
    traces = play_experts(
        tasks=task_set.tasks("train")[:2], expert=lambda task: task_set.expert(task, 0),
        factory=task_set.make(), tokenizer=TOKENIZER, limits=limits, stop=(), run_seed=0,
        context_length=8192,
    )  # fmt: skip
    for path in successful_paths(traces):
        contexts = split_contexts(path.nodes)
        assert len(contexts) > 1 and all(len(context) == 2 for context in contexts)
        assert not any(node.metadata["invalid"] for context in contexts for node in context[1:])
        assert all(node.credit for node in path.nodes if node.trainable)
