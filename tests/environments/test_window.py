"""Prompts that are built anew for every turn: their text, the commands that replies become, and refusals."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from outrider.environments.alfworld.environment import AlfworldConfig
from outrider.environments.base import (
    CopyableEnvironment,
    Env,
    EnvironmentEpisode,
    EpisodeResult,
    ExternalEpisode,
    StepResult,
    make_task_set,
    open_episode,
    split_tasks,
)
from outrider.environments.conversations import Refusal
from outrider.environments.house import HouseConfig
from outrider.environments.parse_rules import PARSE_RULES
from outrider.environments.text_games import Reply, render_action
from outrider.environments.textworld.environment import TextWorldConfig, TextWorldEnvironment
from outrider.environments.textworld.games import render_opening
from outrider.environments.window import (
    NOT_EXECUTED,
    PROMPTS,
    PromptTemplates,
    Template,
    WindowEpisode,
    WindowSettings,
    read_templates,
    shipped_prompts,
)
from outrider.errors import ConfigError
from outrider.testing import check_environment
from outrider.types import Message, Task
from tests.environments.test_textworld import ScriptedGame

TOO_LONG = Refusal(reason="too long", is_too_long=True)
VECTORS = json.loads((Path(__file__).parents[1] / "vectors" / "window_prompts.json").read_text())


class Corridor:
    """A world whose observation is the number of the turn. ``done`` ends the episode."""

    task_text = "Reach {the} end."

    def __init__(self) -> None:
        self.commands: list[str] = []
        self.opening = ""

    def reset(self, seed: int) -> Sequence[Message]:
        self.commands, self.opening = [], "place 0 {task}"
        return (Message(role="user", content="a prompt of the chat"),)

    def admitted(self) -> Sequence[str]:
        number = len(self.commands)
        return ("help", f"go {number}", f"stay {number}", "done")

    def act(self, command: str) -> StepResult:
        self.commands.append(command)
        text = f"place {len(self.commands)}"
        return StepResult(message=text, done=command == "done", invalid=command == "jump", reward=1.0)

    def step(self, message: Message) -> StepResult:
        raise AssertionError("a window calls act")

    def result(self) -> EpisodeResult:
        return EpisodeResult(episode_return=1.0, success=True, metrics={"num_turns": 99.0, "moves": 1.0})

    def copy(self) -> "Corridor":
        twin = Corridor()
        twin.commands, twin.opening = list(self.commands), self.opening
        return twin

    def close(self) -> None:
        """Nothing to release."""


TEMPLATES = PromptTemplates(
    first=Template("first {observation} [{actions}]"),
    later=Template("{task}|{steps_taken}|{num_shown}|{history}|{step}|{observation}|{actions}|{skills}"),
    step=Template("{step}:{observation}>{action}"),
    skills="be quick",
)


def started(templates: PromptTemplates = TEMPLATES, **values: Any) -> WindowEpisode:
    episode = WindowEpisode(Corridor(), WindowSettings(**values), templates)
    episode.reset(0)
    return episode


def text_of(episode: WindowEpisode) -> str:
    (message,) = episode.request.messages
    assert message.role == "user"
    return message.content


def act(episode: WindowEpisode, text: str) -> StepResult:
    return episode.step(Message(role="assistant", content=text))


def say(command: str) -> str:
    return f"<think>so</think><action>{command}</action>"


# The text of a prompt.


def test_the_first_prompt_and_a_later_one() -> None:
    episode = started(steps=2)
    assert text_of(episode) == "first place 0 {task} [help\ngo 0\nstay 0\ndone]"
    for number in range(3):
        act(episode, say(f"go {number}"))
    assert text_of(episode) == (
        "Reach {the} end.|3|2|2:place 1>go 1\n3:place 2>go 2|4|place 3|help\ngo 3\nstay 3\ndone|be quick"
    )


def test_a_window_of_no_steps_always_shows_the_first_prompt() -> None:
    episode = started(steps=0, hide=("help",), actions="quoted")
    act(episode, say("go 0"))
    assert text_of(episode) == "first place 1 ['go 1'\n'stay 1'\n'done']"


def test_a_command_and_the_observation_that_followed() -> None:
    templates = PromptTemplates(
        first=TEMPLATES.first, later=Template("{history}"), step=Template("{action}>{observation}")
    )
    episode = started(templates, steps=2, order="action-observation")
    for number in range(3):
        act(episode, say(f"go {number}"))
    assert text_of(episode) == "go 1>place 2\ngo 2>place 3"


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"actions": "none"}, ""),
        ({"actions": "lines"}, "help\ngo 0\nstay 0\ndone"),
        ({"actions": "quoted", "hide": ("help", "done")}, "'go 0'\n'stay 0'"),
        ({"actions": "numbered", "hide": ("help",)}, "0. go 0\n1. stay 0\n2. done"),
    ],
)
def test_forms_of_the_list_of_commands(values: dict[str, Any], expected: str) -> None:
    assert text_of(started(**values)) == f"first place 0 {{task}} [{expected}]"


def test_a_file_renders_a_command_of_the_list() -> None:
    templates = PromptTemplates(
        first=Template("{actions}"), later=TEMPLATES.later, step=TEMPLATES.step,
        action=Template(" {number}={action} ({command})"),
    )  # fmt: skip
    text = text_of(started(templates, actions="quoted", hide=("help", "done")))
    assert text == "0='go 0' (go 0)\n 1='stay 0' (stay 0)"


class Templated(Corridor):
    def command_templates(self) -> Sequence[str]:
        return ("go OBJ", "stay OBJ")


def test_templates_of_commands() -> None:
    episode = WindowEpisode(Templated(), WindowSettings(actions="templates"), TEMPLATES)
    episode.reset(0)
    assert text_of(episode) == "first place 0 {task} [go OBJ\nstay OBJ]"


@settings(deadline=None)
@given(
    steps=st.integers(0, 6),
    replies=st.lists(
        st.sampled_from([say("go 0"), say("stay 1"), "no tags", "<action></action>"]), max_size=9
    ),
    after=st.booleans(),
)
def test_a_window_shows_exactly_the_last_steps(steps: int, replies: list[str], after: bool) -> None:
    order = "action-observation" if after else "observation-action"
    templates = PromptTemplates(
        first=Template("0||{observation}"), later=Template("{num_shown}|{history}|{observation}"),
        step=Template("({action};{observation})"),
    )  # fmt: skip
    episode = started(templates, steps=steps, order=order)
    observations, commands, world = ["place 0 {task}"], [], 0
    for reply in replies:
        known = reply.partition("<action>")[2].partition("</action>")[0]
        world += bool(known)
        commands.append(known)
        place = f"place {world}" if world else "place 0 {task}"
        observations.append(place if known else f"{NOT_EXECUTED}\n{place}")
        act(episode, reply)
    shown = list(range(max(0, len(commands) - steps), len(commands)))
    history = "\n".join(f"({commands[n]};{observations[n + after]})" for n in shown)
    assert text_of(episode) == f"{len(shown)}|{history}|{observations[-1]}"


def reference(goal: str, past: Sequence[tuple[str, str]], now: str, commands: Sequence[str], k: int) -> str:
    """The prompt of the shipped ALFWorld files, written without the code under test."""
    first, later, step = (
        (PROMPTS / "alfworld" / name).read_text()[:-1] for name in ("first.txt", "later.txt", "step.txt")
    )
    listed = "\n".join(command for command in commands if command != "help")
    if not past:
        return first.replace("{observation}", now).replace("{actions}", listed)
    begin = max(0, len(past) - k)
    lines = []
    for number in range(begin, len(past)):
        line = step.replace("{step}", str(number + 1)).replace("{action}", past[number][1])
        lines.append(line.replace("{observation}", past[number][0]))
    parts = {
        "task": goal, "steps_taken": len(past), "num_shown": len(past) - begin, "step": len(past) + 1,
        "actions": listed, "observation": now, "history": "\n".join(lines),
    }  # fmt: skip
    for name, value in parts.items():
        later = later.replace(f"{{{name}}}", str(value))
    return later


@pytest.mark.parametrize("steps", [2, 5])
def test_alfworld_prompts_equal_an_independent_rendering_and_the_recorded_ones(steps: int) -> None:
    window = {"steps": steps, "hide": ["help"], "parse": "verl-agent-30"}
    chat = make_task_set(AlfworldConfig(num_test=3, max_moves=60))
    values = {"num_test": 3, "max_moves": 60, "context": "window", "window": window}
    windows = make_task_set(AlfworldConfig.model_validate(values))
    digest = hashlib.sha256()
    assert windows.name == chat.name and windows.stop == () and chat.stop == ("</action>",)
    for task in windows.tasks("test"):
        episode, plain = windows.make()(task), chat.make()(task)
        assert isinstance(episode, WindowEpisode) and isinstance(plain, EnvironmentEpisode)
        episode.reset(0)
        now = plain.reset(0)[0].content.partition("\n\n")[2]
        game = plain.environment
        goal = now.partition("Your task is to: ")[2]
        past: list[tuple[str, str]] = []
        for turn in range(10):
            commands = game.game.commands()  # type: ignore[attr-defined]
            text = text_of(episode)
            assert text == reference(goal, past, now, commands, steps)
            digest.update(f"{text}\0".encode())
            command = commands[(7 * turn + 3) % len(commands)]
            result = act(episode, say(command))
            answer = plain.step(Message(role="assistant", content=render_action(command)))
            assert (result.text, result.reward, result.refused) == (
                answer.text,
                answer.reward,
                answer.refused,
            )
            past.append((now, command))
            now = answer.text
    assert digest.hexdigest() == VECTORS[f"alfworld, {steps} steps, 3 games, 10 turns"]


# Replies.


def test_an_invalid_reply_that_is_executed() -> None:
    episode = started(parse="verl-agent-30")
    result = act(episode, "I would like to GO 0")
    assert result.invalid and not result.refused and result.text == "place 1"
    assert "1:place 0 {task}>i would like to go 0|2|place 1" in text_of(episode)
    assert not act(episode, say("jump")).invalid  # the rule decides, whatever the world thinks
    assert episode.result().metrics == {
        "moves": 1.0, "num_turns": 2.0, "num_invalid": 1.0, "num_shortened_prompts": 0.0
    }  # fmt: skip


def test_a_reply_without_a_command_costs_the_world_no_step() -> None:
    episode = started()
    result = act(episode, "nothing")
    assert result.invalid and not result.refused and result.text == f"{NOT_EXECUTED}\nplace 0 {{task}}"
    assert not result.done and "|2|Nothing was done" in text_of(episode)
    assert act(episode, say("jump")).invalid  # with strict, the world's own rule counts as well
    assert act(episode, say("done")).done


def test_a_task_list_selects_tasks(tmp_path: Path) -> None:
    keys = [task.key for task in make_task_set(HouseConfig()).tasks("train")[:3]]
    (tmp_path / "keys.txt").write_text(f"{keys[2]}\n{keys[0]}\n")
    config = HouseConfig.model_validate(
        {"context": "window", "task_list": {"train": str(tmp_path / "keys.txt")}}
    )
    assert [task.key for task in split_tasks(make_task_set(config), "train")] == [keys[2], keys[0]]


def test_a_thought_that_an_endpoint_separates_is_part_of_the_reply() -> None:
    turn = Message(role="assistant", content="<action>go 0</action>", reasoning="so")
    assert not started(parse="verl-agent-30").step(turn).invalid
    assert started(parse="verl-agent-30").step(replace(turn, reasoning="")).invalid


def test_numbers_refer_to_the_list_that_is_shown() -> None:
    episode = started(parse="index", actions="numbered", hide=("help",))
    act(episode, "### ACTION: 1 ###")
    assert "place 0 {task}>stay 0" in text_of(episode)
    act(episode, "?")
    assert ">go 1" in text_of(episode)


def test_hidden_commands_are_still_possible() -> None:
    episode = started(parse="strict-admissible", hide=("help",))
    assert not act(episode, say("help")).invalid and act(episode, say("fly")).invalid


def test_a_copy_is_independent() -> None:
    episode = started()
    act(episode, say("go 0"))
    assert isinstance(episode, CopyableEnvironment)
    twin = episode.copy()
    before = twin.request
    act(episode, say("go 1"))
    assert twin.request == before != episode.request
    act(twin, say("stay 1"))
    assert ">stay 1" in text_of(twin) and ">go 1" in text_of(episode)


@pytest.mark.parametrize("rule", [name for name in PARSE_RULES if name != "verl-agent-search"])
def test_experts_write_what_every_rule_reads(rule: str) -> None:
    """Their turns solve the task and are valid, so that a cold start teaches the form."""
    window = {"parse": rule}
    if rule == "index":
        window |= {"actions": "numbered", "prompt": "scienceworld-numbered"}
    config = HouseConfig.model_validate({"num_train": 1, "context": "window", "window": window})
    task_set = make_task_set(config)
    factory = task_set.make()
    for task in task_set.tasks("train")[:3]:
        steps = task_set.expert(task, 0)
        assert steps
        episode = open_episode(factory(task))
        episode.start(0)
        results = [episode.act(episode.convert(step.text)) for step in steps]
        assert episode.result().success and not any(result.invalid for result in results)


# Prompts that are too long.


def test_a_long_prompt_drops_its_oldest_steps() -> None:
    episode = started(steps=2)
    for number in range(3):
        act(episode, say(f"go {number}"))
    result = episode.refuse(TOO_LONG)
    assert result is not None and result.text == "place 3" and not result.done
    assert text_of(episode).startswith("Reach {the} end.|3|1|3:place 2>go 2|4|")
    assert episode.refuse(TOO_LONG) is not None
    assert text_of(episode).startswith("Reach {the} end.|3|0||4|place 3|")
    assert episode.refuse(TOO_LONG) is None
    assert episode.result().metrics["num_shortened_prompts"] == 1.0
    act(episode, say("go 3"))
    assert "|2|3:place 2>go 2\n4:place 3>go 3|" in text_of(episode)  # the next prompt is whole again


def test_a_long_prompt_becomes_the_first_prompt() -> None:
    episode = started(overflow="first-prompt")
    act(episode, say("go 0"))
    assert episode.refuse(TOO_LONG) is not None
    assert text_of(episode).startswith("first place 1 [")
    assert episode.refuse(TOO_LONG) is None
    assert started(overflow="first-prompt").refuse(TOO_LONG) is None


@pytest.mark.parametrize("overflow", ["left", "right", "error"])
def test_other_overflows_send_no_second_prompt(overflow: str) -> None:
    episode = started(overflow=overflow)
    act(episode, say("go 0"))
    limit = episode.request.prompt_limit
    assert limit is not None and limit.overflow == overflow and limit.max_tokens == 2048
    assert episode.refuse(TOO_LONG) is None


def test_a_replay_shortens_the_same_prompts() -> None:
    def played() -> ExternalEpisode:
        episode = open_episode(WindowEpisode(Corridor(), WindowSettings(), TEMPLATES))
        assert isinstance(episode, ExternalEpisode)
        return episode

    episode = played()
    episode.start(0)
    episode.act(say("go 0"))
    episode.refuse(TOO_LONG)
    episode.act(say("go 1"))
    twin = played()
    for call in twin.replay(episode.history(), 0):
        call()
    assert twin.request == episode.request


# Files.


def folder(root: Path, **texts: str) -> Path:
    files = {"first": "{observation}", "later": "{history}", "step": "{observation} {action}"} | texts
    for name, text in files.items():
        (root / f"{name}.txt").write_text(text)
    return root


def test_braces_that_name_no_field_stay() -> None:
    text = '{"a": {"b": 1}} {} { x } {{task}} {X} {0} } {'
    assert Template(text).render({}) == text.replace("{{task}}", "{task}")
    assert Template("{task}").render({"task": "{observation}{"}) == "{observation}{"


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("first", "{goal}", r"first\.txt: unknown field \{goal\}; fields of this file: .*\{task\}"),
        (
            "step",
            "{history}",
            r"step\.txt: unknown field \{history\}; .*\{action\}, \{observation\}, \{step\} ",
        ),
        ("action", "{actions}", r"action\.txt: unknown field"),
        ("skills", "{task}", r"skills\.txt: unknown field .*: none"),
        ("step", "{action} {observation}", r"step\.txt writes \{action\} before \{observation\}"),
    ],
)
def test_a_wrong_file_is_named(name: str, text: str, message: str, tmp_path: Path) -> None:
    window = WindowSettings(prompt=str(folder(tmp_path, **{name: text})))
    with pytest.raises(ConfigError, match=message):
        HouseConfig(context="window", window=window).templates()


def test_missing_files_are_named(tmp_path: Path) -> None:
    folder(tmp_path)
    (tmp_path / "step.txt").unlink()
    with pytest.raises(ConfigError, match=r"step\.txt does not exist"):
        read_templates(tmp_path)
    with pytest.raises(ConfigError, match="nowhere is no folder, and the shipped prompts are alfworld, "):
        make_task_set(HouseConfig(context="window", window=WindowSettings(prompt="nowhere"))).make()
    (tmp_path / "step.txt").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match=r"step\.txt: cannot be read"):
        read_templates(tmp_path)


def test_texts_of_optional_files_and_unused_fields(tmp_path: Path) -> None:
    templates = read_templates(folder(tmp_path, skills="Open {{doors}}.\n", later="{skills}{task}{history}"))
    assert templates.skills == "Open {doors}." and templates.action.text == "{action}"
    assert templates.unused_fields == ("actions", "num_shown", "step", "steps_taken")


@pytest.mark.parametrize("name", shipped_prompts())
def test_shipped_prompts_use_every_field_but_skills(name: str) -> None:
    # A search has no list of commands, and its last result is part of the history.
    expected = ("actions", "observation", "skills", "step") if name == "search" else ("skills",)
    assert read_templates(PROMPTS / name).unused_fields == expected


def test_prompt_files_are_inputs(tmp_path: Path) -> None:
    window = WindowSettings(prompt=str(folder(tmp_path, action="{action}")))
    assert HouseConfig(context="window", window=window).input_files() == {
        f"window.prompt/{name}.txt": tmp_path / f"{name}.txt" for name in ("first", "later", "step", "action")
    }
    assert HouseConfig().input_files() == {}
    assert window.names_path("prompt") and not WindowSettings(prompt="house").names_path("prompt")


# Settings.


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"window": {"steps": 3}}, "window has no effect with context"),
        ({"context": "window", "window": {"parse": "index"}}, "set actions = "),
        ({"context": "window", "window": {"parse": "index", "actions": "numbered"}}, "set window.prompt to"),
        ({"context": "window", "window": {"actions": "templates"}}, "needs an environment with templates"),
        ({"context": "window", "window": {"steps": -1}}, "greater than or equal to 0"),
        ({"context": "window", "window": {"parse": "loose"}}, "strict-admissible"),
        ({"context": "window", "show_admissible": True}, "set window.actions"),
    ],
)
def test_settings_that_contradict_each_other(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        AlfworldConfig.model_validate(values)


def test_a_chat_is_as_before() -> None:
    config = HouseConfig()
    assert not config.keeps_conversations and config.rebuilt_prompt_tokens is None
    assert not isinstance(
        make_task_set(config).make()(make_task_set(config).tasks("train")[0]), WindowEpisode
    )


# The text worlds.


@pytest.mark.parametrize("type", ["house", "alfworld"])
def test_worlds_keep_the_contract_of_environments(type: str) -> None:
    window = {"parse": "verl-agent-30"}
    check_environment({"type": type, "context": "window", "window": window}, expert_solves=True)


def test_the_goal_and_the_opening_of_a_house() -> None:
    task_set = make_task_set(HouseConfig(context="window"))
    task = task_set.tasks("train")[0]
    episode = task_set.make()(task)
    text = episode.reset(0)[0].content
    assert episode.opening.startswith("You are in the hall.") and episode.opening in text
    assert "<action>go ROOM</action>" not in text


def test_the_goal_and_the_opening_of_a_story() -> None:
    instructions = render_opening(("look", "open {o}"), "Find the coin.\nIt is near.\n\n-= Hall =-\nA hall.")

    class Story(TextWorldEnvironment):
        def open_game(self) -> Any:
            return ScriptedGame(opening=instructions, replies=[Reply(text="Done.")])

    config = TextWorldConfig(context="window", window=WindowSettings(steps=1))
    task = Task(key="t", question="q")
    env: Env = EnvironmentEpisode(Story(config), task)
    episode = WindowEpisode(env, config.window, TEMPLATES)
    episode.reset(0)
    assert text_of(episode) == (
        "first Find the coin.\nIt is near.\n\n-= Hall =-\nA hall. [go east\nlook\nopen door]"
    )
    act(episode, say("look"))
    assert text_of(episode).startswith("Find the coin. It is near.|1|1|1:Find the coin.")
    assert act(episode, say("save")).invalid  # the interpreter's commands never reach it
    assert config.needs_commands
    assert not TextWorldConfig(context="window", window=WindowSettings(actions="none")).needs_commands
