"""The counterfactual of tips: one who reads them gains by what they say, one who does not gains nothing, and
all from one memory.
"""

import json
import random
import re
from pathlib import Path

import pytest
from benchmarks.tips_counterfactual import (
    KEPT,
    REMOVED,
    SHUFFLED,
    Play,
    gain_table,
    main,
    score_table,
    shifted,
)

from benchmarks import tips_counterfactual as counterfactual
from outrider.config import load_settings
from outrider.engines.base import Request
from outrider.engines.scripted import ScriptedEngine
from outrider.environments.text_games import render_action
from outrider.errors import ConfigError
from outrider.memory.embedders import HashEmbedder
from outrider.trace import Trace
from outrider.training.cold_start import expert_rollouts, replay_with_tips
from outrider.training.components import Components
from outrider.training.settings import RunSettings
from outrider.training.setup import build
from outrider.types import Origin
from tests.tiny import tiny_model

RECIPE = Path(__file__).parents[2] / "recipes" / "house-empo2.toml"
SMALL = (
    "num_threads=1", "model.trained_layers=1", "environment.num_train=2", "environment.num_test=3",
    "evaluation.num_tasks=18", "algorithm.memory.embedder=hash", "algorithm.memory.max_tip_tokens=90",
    "algorithm.memory.max_shown_tokens=300", "algorithm.memory.max_prompt_tokens=300",
    "rollout.max_response_tokens=2000", "rollout.max_observation_tokens=300", "rollout.max_turn_tokens=40",
    "cold_start.num_examples=6", "update.max_tokens=4096",
)  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    language_model = tiny_model(context=4096)
    language_model.model.config._attn_implementation = "sdpa"
    language_model.model.generation_config.eos_token_id = 1
    language_model.model.save_pretrained(folder)
    language_model.tokenizer.save_pretrained(folder)
    return f"model.name={folder}"


def parts_of(model: str, folder: Path, *changes: str) -> Components:
    settings = load_settings(RunSettings, file=RECIPE, overrides=[*SMALL, model, *changes])
    return build(
        settings,
        buffer_path=folder / "b",
        resumed=False,
        on_tokens=lambda number: None,
        note=lambda text: None,
    )


def searcher(*, reads: bool) -> ScriptedEngine:
    """Goes where a tip says the thing is; without one, or without reading, into a room by chance."""

    def say(request: Request, context: str) -> str:
        turn = int(request.request_id.split("/")[-1])
        doors = re.findall(r"You are in the hall\. Doors: ([a-z, ]+)\.", context)[0].split(", ")
        goal = re.findall(r"You look for the (\w+)\.", context)[-1]
        told = re.search(
            rf"open (\w+): In the \w+ in the (\w+) is the {goal}\.", context.partition("</tip>")[0]
        )
        place = re.findall(r"You see: (\w+)\.", context)
        room = random.Random(request.seed).choice(doors)
        if told and reads:
            room, place = told[2], [told[1]]
        commands = (f"go {room}", f"open {place[-1] if place else 'nothing'}", f"take {goal}")
        return render_action(commands[min(turn, 2)])

    return ScriptedEngine(tokenizer=tiny_model().tokenizer, script=say, context_length=4096)


@pytest.mark.slow
@pytest.mark.parametrize("reads", [True, False])
def test_only_a_reader_of_true_tips_gains(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reads: bool
) -> None:
    parts = parts_of(model, tmp_path)
    parts.engine = searcher(reads=reads)
    monkeypatch.setattr(counterfactual, "imitate_experts", lambda parts, **display: None)
    played = Play(parts=parts, embedder=HashEmbedder(), num_rounds=12).run()
    scores = {line: sum(found.values()) / len(found) for line, found in played["scores"].items()}
    assert played["num_tips"] > 3 * 6 and played["shown_an_episode"][KEPT] > 1
    if reads:
        assert scores[KEPT] > 0.75 and scores[REMOVED] < 0.5 and scores[SHUFFLED] < 0.5
    else:
        assert played["scores"][KEPT] == played["scores"][REMOVED] == played["scores"][SHUFFLED]


def test_tips_are_exchanged_between_worlds() -> None:
    found = shifted(["b", "a", "c", "a"])
    assert found == {"a": "b", "b": "c", "c": "a"}
    with pytest.raises(ConfigError, match="one buffer"):
        shifted(["all", "all"])


def test_a_seed_runs_once_and_other_settings_are_refused(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--recipe", str(RECIPE), "--out", str(tmp_path), "--seeds", "1", "--rounds", "1", *SMALL, model]
    assert main([*given, "rollout.max_turns=3", "evaluation.num_tasks=3"]) == 0
    first = capsys.readouterr()
    assert "6 of 6 expert rollouts solved" in first.err
    assert "| seed | no tips | tips of other worlds | tips |" in first.out
    held = json.loads((tmp_path / "seed-0.json").read_text())
    assert set(held["scores"]) == {REMOVED, SHUFFLED, KEPT} and all(
        len(one) == 3 for one in held["scores"].values()
    )

    def refuse(*arguments: object, **others: object) -> None:
        raise AssertionError("played again")

    monkeypatch.setattr(counterfactual, "play_seed", refuse)
    assert main([*given, "rollout.max_turns=3", "evaluation.num_tasks=3"]) == 0
    assert capsys.readouterr().out == first.out
    assert main([*given, "rollout.max_turns=4", "evaluation.num_tasks=3"]) == 2
    assert "other settings" in capsys.readouterr().err
    assert main([*given[:2], "--out", str(tmp_path / "grpo"), "--seeds", "1", *SMALL, model,
                 "algorithm={type='grpo'}", "cold_start.tip_share=0"]) == 2  # fmt: skip


def test_tables() -> None:
    seeds = {0: {REMOVED: {"a": 0.0, "b": 0.0}, SHUFFLED: {"a": 0.0, "b": 1.0}, KEPT: {"a": 1.0, "b": 1.0}}}
    assert score_table(seeds).splitlines()[2:] == [
        "| 0 | 0.0 | 50.0 | 100.0 |",
        "| mean | 0.0 | 50.0 | 100.0 |",
    ]
    assert gain_table(seeds).splitlines()[2].startswith("| 0 | +100.0 [")


def shown(trace: Trace) -> str:
    return "".join(node.message.content for node in trace.nodes if node.origin is Origin.MEMORY)


def test_the_cold_start_has_tips_in_a_share_of_the_examples(model: str, tmp_path: Path) -> None:
    parts = parts_of(model, tmp_path, "cold_start.tip_share=0.5", "cold_start.num_examples=8")
    tasks = parts.train_tasks[:8]
    expert = {task.key: parts.task_set.expert(task, 0) for task in tasks}
    plain = expert_rollouts(parts, tasks, lambda task: expert[task.key], training_step=0)
    assert not any(map(shown, plain))
    traces = replay_with_tips(parts, plain, lambda task: expert[task.key])
    assert [trace.task.key for trace in traces] == [task.key for task in tasks]
    told = [trace for trace in traces if shown(trace)]
    assert len(told) == 4 and all(trace.leaves[0].success for trace in traces)
    for trace in told:
        assert f"is the {trace.task.metadata['thing']}." in shown(trace)
    again = replay_with_tips(parts, plain, lambda task: expert[task.key])
    assert [shown(trace) for trace in again] == [shown(trace) for trace in traces]
    assert len(parts.algorithm.tips.memory) == 0  # type: ignore[attr-defined]  # training begins with none
    none = parts_of(model, tmp_path, "cold_start.tip_share=0")
    assert replay_with_tips(none, plain, lambda task: expert[task.key]) == plain


def test_tip_examples_require_tips_of_the_environment() -> None:
    for change in ("algorithm.memory.writer=policy", "algorithm={type='grpo'}"):
        with pytest.raises(ConfigError, match="tip_share"):
            load_settings(RunSettings, file=RECIPE, overrides=[change])
