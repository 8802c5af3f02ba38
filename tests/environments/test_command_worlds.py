"""WebShop, ScienceWorld and search as worlds of commands: the seam of each, and rollouts with a window."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from outrider.engines.base import Request
from outrider.environments.base import (
    EnvironmentEpisode,
    EnvironmentTaskSet,
    StepResult,
    TaskSet,
    make_task_set,
)
from outrider.environments.parse_rules import NUM_NUMBERED, parse
from outrider.environments.scienceworld.environment import ScienceWorldConfig
from outrider.environments.tool_qa.environment import WRONG_ANSWER, EpisodeConfig, ToolsConfig
from outrider.environments.tool_qa.rewards import RewardConfig
from outrider.environments.webshop.environment import (
    QUERY,
    WebShopConfig,
    WebShopEnvironment,
)
from outrider.rollout.settings import Limits
from outrider.tools.base import ToolOutput
from outrider.trace import Leaf, Origin, split_contexts
from outrider.types import Message, Outcome, Task
from tests.environments.test_scienceworld import ScriptedSimulator, reply, task_set_of
from tests.rollout.fakes import scheduler, scripted
from tests.tool_episodes import tool_factory


def roll_out(
    task_set: TaskSet, task: Task, script: Callable[[Request, str], str], *, max_turns: int = 12
) -> tuple[Leaf, list[str]]:
    """The end of a rollout of a scripted policy, and the prompts that it got."""
    prompts: list[str] = []

    def policy(request: Request, text: str) -> str:
        prompts.append(text)
        return script(request, text)

    report = scheduler(
        scripted(policy, context_length=16_384),
        task_set.make(),  # type: ignore[arg-type]
        limits=Limits(max_turns=max_turns, max_turn_tokens=300, max_response_tokens=4000),
        stop=task_set.stop,
    ).run([task], modes=("plain",), training_step=0)
    assert not report.faults
    ((leaf, path),) = report.traces[0].rollouts()
    # One sample per turn; the prompt after the last turn of a truncated rollout has none.
    turns = [[node.origin for node in context].count(Origin.POLICY) for context in split_contexts(path)]
    assert [num for num in turns if num] == [1] * len(prompts)
    return leaf, prompts


def script_of(replies: Sequence[str]) -> Callable[[Request, str], str]:
    remaining = list(replies)
    return lambda request, text: remaining.pop(0)


def commands_of(replies: Sequence[str]) -> list[str]:
    return [f"<think>now</think><action>{command}</action>" for command in replies]


# --- WebShop ---


def shop(**config: object) -> WebShopEnvironment:
    task_set = EnvironmentTaskSet(WebShopEnvironment, WebShopConfig.model_validate(config))
    episode = task_set.make()(task_set.tasks("train")[0])
    episode.reset(0)
    assert isinstance(episode.environment, WebShopEnvironment)
    return episode.environment


def test_the_shop_as_a_world_of_commands() -> None:
    environment = shop(reward="success10")
    assert (environment.opening, environment.admitted()) == ("'Search'", (QUERY,))
    assert environment.task_text == environment._goal.text
    search, *clicks = environment._plan()
    result = environment.act(search.upper())
    assert result.text.startswith("'Back to Search' [SEP] 'Page 1 (Total results: ")
    assert not (result.invalid or result.refused or "Actions:" in result.text)
    assert environment.admitted()[0] == "click[back to search]"
    assert clicks[0].lower() in environment.admitted() and QUERY not in environment.admitted()
    page = result.text
    for command, is_invalid in [
        ("buy it", True),
        ("", True),
        ("click[no such name]", False),
        (search, False),
    ]:
        result = environment.act(command)  # does nothing
        assert (result.text, result.invalid, result.refused) == (page, is_invalid, not is_invalid)
    twin = environment.copy()
    results = [environment.act(command) for command in clicks]
    assert (results[-1].done, results[-1].reward, results[-1].observations) == (True, 10.0, ())
    assert environment.result().success and not twin.result().success
    assert environment.result().metrics["num_invalid"] == 2 and twin._page.kind == "results"


def test_a_search_is_admissible_where_there_is_a_bar() -> None:
    reply = "<think>a</think><action>search[red shoes]</action>"
    assert parse("strict-admissible", reply, shop().admitted()).valid
    assert not parse("strict-admissible", reply, ["click[back to search]", "click[< prev]"]).valid
    assert not parse("strict-admissible", reply.replace("search", "click"), shop().admitted()).valid


@pytest.mark.parametrize("rule", ["strict", "verl-agent-20", "strict-admissible"])
def test_the_shop_with_a_window(rule: str) -> None:
    window = {"parse": rule, "actions": "quoted", "steps": 2, "max_prompt_tokens": 8000}
    config = WebShopConfig.model_validate({"context": "window", "window": window})
    task_set = make_task_set(config)
    task = task_set.tasks("train")[0]
    commands = shop()._plan()
    leaf, prompts = roll_out(task_set, task, script_of(commands_of(commands)))
    assert leaf.success
    assert len(prompts) == len(commands) and f"'{QUERY}'" in prompts[0]
    assert "Page: 'Search'" in prompts[1] and f"Command: {commands[0]}" in prompts[1]
    assert f"Command: {commands[0]}" not in prompts[3] and "given so far: 3. The last 2" in prompts[3]
    assert all(f"Request: {shop().task_text}" in prompt for prompt in prompts)


def test_a_prompt_with_too_many_characters_has_no_history() -> None:
    window = {"parse": "verl-agent-20", "max_prompt_tokens": 8000, "max_prompt_characters": 800}
    task_set = make_task_set(WebShopConfig.model_validate({"context": "window", "window": window}))
    commands = [QUERY, "click[none]", *shop()._plan()[:1], "click[none]"]
    replies = script_of(commands_of(commands))
    leaf, prompts = roll_out(task_set, task_set.tasks("train")[0], replies, max_turns=4)
    assert ["Commands given so far" in prompt for prompt in prompts] == [False, True, True, False]
    assert "Page 1 (Total results:" in prompts[3]
    assert leaf.metrics["num_shortened_prompts"] == 2  # that of the fifth turn, too


def test_copies_of_a_window_are_independent() -> None:
    window = {"parse": "verl-agent-20", "max_prompt_tokens": 8000}
    task_set = make_task_set(WebShopConfig.model_validate({"context": "window", "window": window}))
    original: Any = task_set.make()(task_set.tasks("train")[0])
    original.reset(0)
    search, click, *_ = shop()._plan()
    original.step(Message(role="assistant", content=f"<action>{search}</action>"))
    twin, before = original.copy(), original.request
    twin.step(Message(role="assistant", content=f"<action>{click}</action>"))
    assert original.request == before and twin.request != before
    assert click.lower() in twin.request.messages[0].content


def test_settings_of_conversations_in_the_shop_are_refused_with_a_window() -> None:
    with pytest.raises(ValidationError, match=r"set algorithm\.invalid_penalty"):
        WebShopConfig(context="window", invalid_penalty=0.1)
    with pytest.raises(ValidationError, match=r"set window\.actions"):
        WebShopConfig(context="window", show_actions=False)


# --- ScienceWorld ---

ROOMS = [f"teleport to room {number}" for number in range(10)]


@dataclass(slots=True, kw_only=True)
class Laboratory(ScriptedSimulator):
    """Pays 5 points for a tour of ten rooms and 95 for the task; ``wait`` takes ten moves."""

    valid: tuple[str, ...] = tuple(f"command {number}" for number in range(60))
    num_moves: int = 0
    visited: set[str] = field(default_factory=set)

    def act(self, action: str) -> Any:
        self.acted.append(action)
        self.num_moves += 10 if action == "wait" else 1
        self.visited.add(action)
        is_solved = action == "solve"
        score = 100 if is_solved else 5 * (self.visited >= set(ROOMS))
        return reply(score, moves=self.num_moves, completed=is_solved, text=f"Saw {action}.")

    def objects(self) -> tuple[str, ...]:
        return ("cup", "door")


def laboratory(**settings: object) -> EnvironmentEpisode:
    task_set = task_set_of(Laboratory, **settings)
    environment = task_set.make()(task_set.tasks("test")[0])
    environment.reset(0)
    return environment


def tour_and_wait(environment: EnvironmentEpisode) -> list[StepResult]:
    """Act until the moves have run out, at most 30 turns."""
    results: list[StepResult] = []
    for number in range(30):
        command = ROOMS[number] if number < len(ROOMS) else "wait"
        results.append(environment.step(Message(role="assistant", content=f"<action>{command}</action>")))
        if results[-1].done:
            break
    return results


@pytest.mark.parametrize(("success_at", "is_success"), [("full", False), ("positive", True)])
def test_a_tour_is_a_success_by_the_released_rule_only(success_at: str, is_success: bool) -> None:
    environment = laboratory(success_at=success_at, reward="success10", max_moves=31)
    results = tour_and_wait(environment)
    record = environment.result()
    assert (results[-1].truncated, record.metrics["score"], record.success) == (True, 5.0, is_success)
    assert record.episode_return == sum(result.reward for result in results) == 10.0 * is_success


def test_the_released_rule_needs_the_end_of_the_episode_and_a_score() -> None:
    environment = laboratory(success_at="positive", max_moves=1000)
    assert not tour_and_wait(environment)[-1].done
    assert environment.result().metrics["score"] > 0 and not environment.result().success
    lazy = laboratory(success_at="positive", max_moves=1)
    assert lazy.step(Message(role="assistant", content="<action>wait</action>")).done
    assert not lazy.result().success
    solved = laboratory(reward="success10", reward_scale=0.1)
    assert solved.step(Message(role="assistant", content="<action>solve</action>")).reward == 1.0
    assert solved.result().success and solved.result().episode_return == 1.0


def test_the_laboratory_as_a_world_of_commands() -> None:
    episode = laboratory(num_shown_actions=3)
    world: Any = episode.environment
    assert (world.task_text, world.opening) == ("Your task is find-animal.", "A room.")
    assert world.admitted() == ("command 0", "command 1", "command 2")
    assert world.command_templates() == ("['open OBJ', 'wait']", "where OBJ is one of ['cup', 'door']")
    result = world.act("  open   door ")
    assert (result.message, result.done, result.invalid) == ("Saw open door.", False, False)
    assert world.metrics["num_turns"] == world.metrics["num_moves"] == 1


def test_numbered_commands_in_a_conversation() -> None:
    simulator = Laboratory()
    task_set = task_set_of(lambda: simulator, actions="numbered")
    environment = task_set.make()(task_set.tasks("test")[0])
    (prompt,) = environment.reset(0)
    assert "### ACTION: number ###" in prompt.content and "OBJ" not in prompt.content
    assert prompt.content.endswith("\n49. command 49") and "\n0. command 0\n" in prompt.content
    turns = ["### ACTION: 7 ###", f"### ACTION: {NUM_NUMBERED} ###", "command 3"]
    results = [environment.step(Message(role="assistant", content=turn)) for turn in turns]
    assert simulator.acted == ["command 7", "command 0", "command 0"]
    assert [result.invalid for result in results] == [False, True, True]
    assert results[0].text.startswith("Saw command 7.\n\n0. command 0\n1. ")
    assert environment.result().metrics["num_invalid"] == 2
    assert task_set.expert(task_set.tasks("test")[0], 0) is None


@pytest.mark.parametrize(
    ("parse_rule", "form", "prompt", "replies", "acted"),
    [
        ("verl-agent-30", "templates", None, commands_of(["open door", "wait"]), ["open door", "wait"]),
        (
            "index",
            "numbered",
            "scienceworld-numbered",
            ["### ACTION: 2 ###", "?"],
            ["command 3", "command 1"],
        ),
    ],
)
def test_the_laboratory_with_a_window(
    parse_rule: str, form: str, prompt: str | None, replies: list[str], acted: list[str]
) -> None:
    simulator = Laboratory()
    window = {
        "parse": parse_rule, "actions": form, "prompt": prompt, "hide": ["command 0"],
        "max_prompt_tokens": 8000,
    }  # fmt: skip
    plain = task_set_of(lambda: simulator, context="window", window=window)
    task_set = plain.settings.adapt_task_set(plain)
    leaf, prompts = roll_out(task_set, plain.tasks("test")[0], script_of(replies), max_turns=2)
    assert simulator.acted == acted and len(prompts) == 2
    assert "Task: Your task is find-animal." in prompts[0] and "A room." in prompts[0]
    assert ("where OBJ is one of ['cup', 'door']" if form == "templates" else "2. command 3") in prompts[0]
    assert f"Command: {acted[0]}" in prompts[1] and f"Saw {acted[0]}." in prompts[1]
    assert leaf.metrics["num_invalid"] == (parse_rule == "index")


@pytest.mark.parametrize("settings", [{"show_valid_actions": True}, {"actions": "numbered"}])
def test_lists_of_conversations_are_refused_with_a_window(settings: dict[str, object]) -> None:
    with pytest.raises(ValidationError, match=r"set window\.actions"):
        ScienceWorldConfig.model_validate({"context": "window", **settings})
    with pytest.raises(ValidationError, match="drop show_valid_actions"):
        ScienceWorldConfig(actions="numbered", show_valid_actions=True)


# --- search ---


class Library:
    """Finds the query itself."""

    name = "search"

    def run_text(self, text: str) -> ToolOutput:
        return ToolOutput(text=f"About {text}.", failed=False)

    def close(self) -> None:
        """Close nothing."""


PLAIN = RewardConfig(
    answer="em", format_penalty=0.0, require_think=False, require_boxed=False, multi_tool_bonus=0.0
)
TASK = Task(key="t", question="Where is the tower?", answers=("Paris",))


def question(**settings: object) -> EnvironmentEpisode:
    config = EpisodeConfig.model_validate({"reward": PLAIN, **settings})
    environment = tool_factory(tools=[Library()], config=config)(TASK)
    environment.reset(0)
    return environment


def test_search_as_a_world_of_commands() -> None:
    episode = question()
    world: Any = episode.environment
    assert (world.task_text, world.opening, world.admitted()) == (TASK.question, TASK.question, ())
    result = world.act("<search>tower</search>")
    assert result.message == Message(role="user", content="<result>\nAbout tower.\n</result>")
    assert (result.tools, result.done) == (("search",), False)
    assert world.act("<search></search>").invalid
    ended = world.act("<answer>Paris</answer>")
    assert (ended.message, ended.done, ended.reward) == (None, True, 1.0)
    assert world.result().success


def test_a_wrong_answer_ends_the_episode() -> None:
    environment = question()
    assert environment.step(Message(role="assistant", content="<answer>Rome</answer>")).done
    assert environment.result().episode_return == 0.0 and not environment.result().success


def test_more_answers_may_be_allowed() -> None:
    environment = question(max_answers=3)
    for wrong in ("Rome", "Lyon"):
        result = environment.step(Message(role="assistant", content=f"<answer>{wrong}</answer>"))
        assert not result.done and WRONG_ANSWER in result.text
    twin = environment.copy()
    assert environment.step(Message(role="assistant", content="<answer>Paris</answer>")).reward == 1.0
    assert environment.result().success and environment.result().metrics["format_ok"] == 1.0
    last = twin.step(Message(role="assistant", content="<answer>Nice</answer>"))
    assert last.done and last.reward == 0.0 and not twin.result().success
    unanswered = question(max_answers=2)
    unanswered.step(Message(role="assistant", content="<answer>Rome</answer>"))
    assert unanswered.result().episode_return == 0.0


def test_search_with_a_window(tmp_path: Path) -> None:
    passage = {"id": "1", "title": "Tower", "text": "The tower is near the ocean."}
    (tmp_path / "corpus.jsonl").write_text(json.dumps(passage))
    (tmp_path / "train.jsonl").write_text(json.dumps({"question": "Where is it?", "answer": "Brest"}))
    config = ToolsConfig.model_validate(
        {
            "context": "window", "reward": PLAIN, "tools": ["search"], "corpus": tmp_path / "corpus.jsonl",
            "train": {"path": tmp_path / "train.jsonl"}, "window": {"max_prompt_tokens": 8000},
        }
    )  # fmt: skip
    task_set = make_task_set(config)
    task = task_set.tasks("train")[0]
    replies = [
        "<think>a</think><search>ocean</search>",
        "I do not know.",
        "<search>ocean</search><answer>no</answer>",
        "<think>b</think><answer>Brest</answer>",
    ]
    leaf, prompts = roll_out(task_set, task, script_of(replies))
    assert leaf.outcome is Outcome.FINISHED and leaf.success and leaf.episode_return == 1.0
    assert leaf.metrics["num_invalid"] == 2
    assert all(f"Question: {task.question}" in prompt for prompt in prompts)
    assert "1. <search>ocean</search>\n<result>" in prompts[1] and "near the ocean" in prompts[1]
    assert "Searches so far: 3. The last 3" in prompts[3]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"reward": {"require_boxed": False}}, r"set reward\.require_think = false"),
        ({"reward": {"require_think": False}}, "does not ask for a box"),
        ({"reward": PLAIN, "protocol": "hermes"}, 'needs protocol = "tags"'),
        ({"reward": PLAIN, "tools": ["python"]}, "add the tool search"),
    ],
)
def test_what_a_window_of_searches_needs(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        ToolsConfig.model_validate({"context": "window", "corpus": "corpus.jsonl", **changes})
    with pytest.raises(ValidationError, match="native answers end the episode"):
        ToolsConfig(corpus="corpus.jsonl", protocol="hermes", max_answers=2)  # type: ignore[arg-type]
