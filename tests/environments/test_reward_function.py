"""Reward functions with the arguments of TRL and of verl, in recipes with the papers' tags and with native
calls.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from outrider.config import validate
from outrider.environments.tool_qa.environment import ToolEnvironment, ToolsConfig
from outrider.environments.tool_qa.rewards import RewardFunction
from outrider.errors import (
    ConfigError,
    DataError,
    EnvironmentFault,
    InvalidResult,
    NonFiniteResult,
    ToolFault,
)
from outrider.plugins.listing import validate_references
from outrider.tools.base import ToolOutput
from outrider.types import Message, Task
from tests.tool_episodes import tool_factory

REWARDS = """
import math

from outrider.errors import ToolFault

seen = []


def trl(completions, ground_truth, **kwargs):
    seen.append({"completions": completions, "ground_truth": ground_truth, **kwargs})
    return [float(truth in str(completion)) for completion, truth in zip(completions, ground_truth)]


def verl(data_source, solution_str, ground_truth, extra_info=None):
    seen.append({"source": data_source, "text": solution_str, "truth": ground_truth, "extra": extra_info})
    return {"score": 2.5 if ground_truth in solution_str else -1, "length": len(solution_str)}


def short(solution_str, ground_truth):
    return len(solution_str)


def huge(solution_str, ground_truth):
    return {"score": 1.0, "product": 10**400, "size": 3, "note": "good"}


def needs_ids(completions, completion_ids):
    return [1.0]


def needs_log(completions, log_metric):
    return [1.0]


def neither(text):
    return 1.0


async def waits(completions, **kwargs):
    return [1.0]


def raises(completions, **kwargs):
    return [completions[1]]


def ends(completions, **kwargs):
    raise SystemExit(3)


def judges(completions, **kwargs):
    raise ExceptionGroup("several judges", [IndexError("odd"), ToolFault("no judge")])


def unsure_judges(completions, **kwargs):
    raise ExceptionGroup("several judges", [IndexError("odd"), KeyError("even")])


def many(completions, **kwargs):
    return [1.0, 2.0]


def text(solution_str):
    return "high"


def unscored(completions, **kwargs):
    return {"reward": 0.5}


class Waits:
    async def __call__(self, completions, **kwargs):
        return [1.0]


waits_too = Waits()


def inapplicable(completions, **kwargs):
    return [None]


def consuming(completions, keywords, **kwargs):
    for text, words in zip(completions, keywords):
        while words and words[-1] in text:
            words.pop()
    return [float(not words) for words in keywords]


def consuming_of_verl(solution_str, extra_info):
    words = extra_info["keywords"]
    while words and words[-1] in solution_str:
        words.pop()
    return float(not words)


def nan(solution_str):
    return math.nan
"""


class Sum:
    """A tool with one answer."""

    name = "python"

    def run_text(self, text: str) -> ToolOutput:
        return ToolOutput(text="5", failed=False)

    def close(self) -> None:
        """Nothing to release."""


ROW = {"prompt": "2 + 3?", "ground_truth": "5", "data_source": "sums", "extra_info": {"index": 7}}


@pytest.fixture(autouse=True)
def rewards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    (tmp_path / "my_rewards.py").write_text(REWARDS)
    (tmp_path / "rows.jsonl").write_text(json.dumps(ROW))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    sys.modules.pop("my_rewards", None)
    import my_rewards  # type: ignore[import-not-found]

    yield my_rewards
    sys.modules.pop("my_rewards", None)


def settings(name: str, **options: Any) -> ToolsConfig:
    table = {
        "type": "tools", "tools": ["python"], "train": {"path": "rows.jsonl", "question": "prompt"},
        "reward": {"function": f"my_rewards:{name}"}, **options,
    }  # fmt: skip
    return validate(ToolsConfig, table)


def play(config: ToolsConfig, *turns: str) -> Any:
    [task] = ToolEnvironment.tasks(config, "train")
    episode = tool_factory(tools=[], config=config)(task)
    episode.reset(0)
    for turn in turns:
        step = episode.step(Message(role="assistant", content=turn))
    return step, episode.result()


def test_a_function_of_trl_gets_completions_and_columns_and_its_list_is_the_reward(rewards: Any) -> None:
    step, result = play(settings("trl"), "<think>easy</think><answer>5</answer>")
    assert step.reward == result.episode_return == 1.0 and result.success
    [call] = rewards.seen  # once, although result() repeats the reward
    assert call.pop("prompts") == ["2 + 3?"]
    assert call == {
        "completions": ["<think>easy</think><answer>5</answer>"], "ground_truth": ["5"],
        "data_source": ["sums"], "extra_info": [{"index": 7}],
    }  # fmt: skip


def test_the_format_has_no_part_in_the_reward_of_a_function() -> None:
    for turn, reward in (("It is 5.", 1.0), ("It is 6.", 0.0)):
        step, result = play(settings("trl"), turn)
        assert step.reward == reward and result.success == (reward > 0)
        assert result.metrics["format_ok"] == 0.0


def test_a_conversational_prompt_makes_conversational_completions(
    rewards: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    prompt = [{"role": "system", "content": "Add."}, {"role": "user", "content": "2 + 3?"}]
    (tmp_path / "rows.jsonl").write_text(json.dumps({**ROW, "prompt": prompt}))
    path = {"path": "rows.jsonl", "question": "prompt.1.content"}
    _, result = play(settings("trl", train=path), "It is 5.")
    assert result.episode_return == 1.0
    assert rewards.seen[0]["prompts"] == [prompt]
    assert rewards.seen[0]["completions"] == [[{"role": "assistant", "content": "It is 5."}]]
    assert "rows.jsonl: 1 row has messages in front of the question that are no part" in caplog.text
    caplog.clear()
    play(settings("trl", train=path, system_prompt="Add. "), "It is 5.")
    assert "in front of the question" not in caplog.text
    with pytest.raises(DataError, match=r"is a list of messages.* such as prompt\.1\.content"):
        ToolEnvironment.tasks(settings("trl"), "train")


def test_a_function_of_verl_gets_source_text_truth_and_extra_info(rewards: Any, tmp_path: Path) -> None:
    row = {**ROW, "reward_model": {"ground_truth": "5", "style": "rule"}}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    _, result = play(settings("verl"), "It is 5.")
    assert result.episode_return == 2.5 and result.success
    assert rewards.seen == [{"source": "sums", "text": "It is 5.", "truth": "5", "extra": {"index": 7}}]
    assert play(settings("short"), "four")[1].episode_return == 4.0


def test_without_a_column_of_verl_the_accepted_answers_are_the_truth(rewards: Any) -> None:
    function = RewardFunction("my_rewards:verl")
    assert function.score(Task(key="a", question="q", answers=("5",)), "5") == (2.5, {"length": 1.0})
    assert rewards.seen[0] == {"source": "", "text": "5", "truth": "5", "extra": {}}
    columns = {"reward_model": {"style": "rule"}, "ground_truth": "5"}
    assert function.score(Task(key="a", question="q", metadata=columns), "5")[0] == 2.5


def test_results_of_tools_are_part_of_the_completion(rewards: Any) -> None:
    config = settings("verl")
    [task] = ToolEnvironment.tasks(config, "train")
    episode = tool_factory(tools=[Sum()], config=config)(task)
    episode.reset(0)
    episode.step(Message(role="assistant", content="<python>print(2 + 3)</python>"))
    episode.step(Message(role="assistant", content="<answer>5</answer>"))
    episode.result()
    assert "<result>\n5\n</result>" in rewards.seen[-1]["text"]


def test_questions_without_tools_end_with_the_first_turn() -> None:
    config = settings("trl", tools=[], protocol="hermes", prompt="short")
    assert ToolEnvironment.open_shared(config).system_prompt == r"Write the final answer as \boxed{...}."
    step, result = play(config, "It is 5.")
    assert step.done and result.episode_return == 1.0 and result.success
    with pytest.raises(ConfigError, match='without tools, set protocol = "hermes"'):
        settings("trl", tools=[])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("needs_ids", "needs 'completion_ids', which only TRL's trainer has"),
        ("needs_log", "needs 'log_metric', which only TRL's trainer has"),
        ("neither", "name completions, as in TRL, or solution_str and ground_truth, as in verl"),
        ("waits", "is a coroutine function"),
        ("waits_too", "is a coroutine function"),
        ("seen", "is a list, which cannot be called"),
        ("none", "has no 'none'"),
    ],
)
def test_a_function_that_cannot_be_called_is_refused_with_its_key(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"reward.function: .*{message}"):
        validate_references(settings(name))


@pytest.mark.parametrize("name", ["trl", "short"])
def test_a_column_that_the_function_needs_is_checked_when_tasks_are_read(name: str, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "2 + 3?", "solution": "5"}))
    with pytest.raises(DataError, match=r"needs the column 'ground_truth'.*; task rows-0 has prompt, solu"):
        ToolEnvironment.tasks(settings(name), "train")


def test_an_answer_that_is_no_text_is_a_column_for_the_function(rewards: Any, tmp_path: Path) -> None:
    answers = (True, None, {"value": 5}, [{"value": 5}], [])
    rows = [{**ROW, "answer": answer} for answer in answers]
    rows.append({**ROW, "answers": {"text": ["5"]}})  # SQuAD
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    tasks = ToolEnvironment.tasks(settings("trl"), "train")
    assert [task.answers for task in tasks] == [()] * 6
    for task in tasks:
        RewardFunction("my_rewards:trl").score(task, "5")
    assert tuple(call["answer"][0] for call in rewards.seen[:5]) == answers
    drop = {"path": "rows.jsonl", "question": "prompt", "blank_answers": "drop"}
    assert len(ToolEnvironment.tasks(settings("trl", train=drop), "train")) == 5


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("raises", EnvironmentFault, r"my_rewards:raises at .*my_rewards\.py:\d+: IndexError"),
        ("ends", EnvironmentFault, r"my_rewards:ends at .*my_rewards\.py:\d+: SystemExit: 3"),
        ("judges", ToolFault, "^no judge$"),
        ("unsure_judges", EnvironmentFault, "the reward function my_rewards:unsure_judges: IndexError: odd$"),
        ("many", InvalidResult, "for one completion, no list with one reward"),
        ("text", InvalidResult, "the reward of my_rewards:text is 'high'"),
        ("unscored", InvalidResult, r"returned a mapping without 'score' \(its keys: reward\)"),
        ("inapplicable", InvalidResult, "returned None, which TRL allows .* needs a number"),
        ("nan", NonFiniteResult, "no finite number"),
    ],
)
def test_a_wrong_result_names_the_function(name: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        RewardFunction(f"my_rewards:{name}").score(Task(key="a", question="q"), "text")


def test_another_value_beside_the_score_is_no_error(rewards: Any) -> None:
    score = RewardFunction("my_rewards:huge").score(Task(key="a", question="q"), "text")
    assert score == (1.0, {"size": 3.0})


def test_what_has_no_effect_or_no_path_is_refused() -> None:
    endpoint = {"answer": "judge", "judge": {"endpoint": {"base_url": "http://127.0.0.1:9/v1"}}}
    with pytest.raises(ConfigError, match="set one of function and judge"):
        settings("trl", reward={"function": "my_rewards:trl", **endpoint})
    with pytest.raises(ConfigError, match="function must be an import path"):
        settings("trl", reward={"function": "my_rewards.py"})


@pytest.mark.parametrize("name", ["consuming", "consuming_of_verl"])
def test_a_function_may_change_the_lists_of_its_row(name: str, tmp_path: Path) -> None:
    words = ["Oslo", "Helsinki"]
    row = {"prompt": "q", "answer": "-", "keywords": words, "extra_info": {"keywords": words}}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    [task] = ToolEnvironment.tasks(settings(name), "train")
    function = RewardFunction(f"my_rewards:{name}")
    texts = ("Helsinki and Oslo", "no", "Oslo and Helsinki")
    assert [function.score(task, text)[0] for text in texts] == [1.0, 0.0, 1.0]
