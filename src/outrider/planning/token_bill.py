"""Tokens that an update computes per episode, by how turns become samples (``outrider protocol cost``).

Games of ALFWorld made offline are played by a scripted searcher that does not win, so that every episode has
all turns. The counted ids are those that a rollout stores: prompts, observations and turns pass through the
renderer of the model.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import fmean
from typing import Any, Final

from outrider.environments.base import TaskSet, make_task_set, split_tasks
from outrider.environments.conversations import ExternalAgent
from outrider.environments.window import WindowedSettings, WindowSettings
from outrider.errors import DataError
from outrider.tokens import ChatRenderer, decode_text
from outrider.types import Message, Task

_THOUGHT: Final = (
    "The thing is not in this place, so the next places to look at are those that are still closed. When it "
    "turns up, take it along and bring it to the place that the task names. "
)
ALL_STEPS: Final = 10**6
"""Number of past steps of a window that shows all of them, and a number of tokens that no prompt has."""


@dataclass(frozen=True, slots=True)
class Bill:
    """Mean tokens per episode by form, and the mean length of window prompts by number of steps."""

    num_games: int
    tokens: Mapping[int, Mapping[str, float]]
    prompts: Mapping[str, float]


def token_bill(
    settings: WindowedSettings,
    renderer: ChatRenderer,
    *,
    windows: Sequence[int],
    turns: Sequence[int],
    num_games: int,
    num_thought_tokens: int,
) -> Bill:
    """Count the tokens of the first ``turns`` turns, for windows of ``windows`` steps and for conversations.

    ``settings`` are those of the games, with a window. Raises DataError if too few games stay unwon.
    """
    num_turns = max(turns)
    chat = {"context": "chat", "window": WindowSettings(), "max_moves": num_turns + 1}
    listed, plain = (
        make_task_set(settings.model_copy(update={**chat, "show_admissible": shows}))
        for shows in (True, False)
    )
    forms = {_window_name(k): make_task_set(_with_window(settings, k, num_turns + 1)) for k in windows}
    thought = thought_text(renderer, num_thought_tokens)
    totals: dict[int, dict[str, list[int]]] = {n: {} for n in turns}
    prompts: dict[str, list[int]] = {name: [] for name in forms}
    num_played = 0
    for task in split_tasks(plain, "test"):
        if num_played == num_games:
            break
        commands = search_commands(plain, task, num_turns=num_turns)
        if commands is None:
            continue
        num_played += 1
        replies = [f"{thought}<action>{command}</action>" for command in commands]
        counts: dict[str, list[int]] = {}
        for name, task_set in forms.items():
            samples = window_samples(task_set, task, replies, renderer)
            prompts[name] += [num_prompt for num_prompt, _ in samples]
            counts[name] = _sums([sum(sample) for sample in samples])
        for label, task_set in (("lists", listed), ("no lists", plain)):
            traces = trace_lengths(task_set, task, replies, renderer)
            counts[f"chat of every turn, {label}"] = _sums(traces)
            counts[f"one trace, {label}"] = traces
        counts["written by the policy"] = _sums([num for _, num in samples])
        for n in turns:
            for name, tokens in counts.items():
                totals[n].setdefault(name, []).append(tokens[n - 1])
    if num_played < num_games:
        raise DataError(
            f"only {num_played} of {num_games} games are not won by the searcher: use fewer games"
        )
    means = {n: {name: fmean(values) for name, values in columns.items()} for n, columns in totals.items()}
    return Bill(num_played, means, {name: fmean(values) for name, values in prompts.items()})


def search_commands(task_set: TaskSet, task: Task, *, num_turns: int) -> tuple[str, ...] | None:
    """Return the commands of a searcher that opens and visits what it has not; None if it ends the game."""
    draw = random.Random(task.key)
    episode: Any = task_set.make()(task)
    episode.reset(0)
    commands: list[str] = []
    for _ in range(num_turns):
        possible = [command for command in episode.environment.admitted() if command != "help"]
        new = [command for command in possible if command not in commands]
        options = (
            [command for command in new if command.startswith("open ")][:1]
            or [command for command in new if command.startswith("go to ")]
            or [command for command in possible if command.split()[0] in ("take", "examine", "go")]
            or possible
        )
        commands.append(draw.choice(options))
        if episode.act(commands[-1]).done:
            return None
    episode.close()
    return tuple(commands)


def window_samples(
    task_set: TaskSet, task: Task, replies: Sequence[str], renderer: ChatRenderer
) -> list[tuple[int, int]]:
    """Return the tokens of the prompt and of the reply of every turn's sample, with a window."""
    episode: Any = task_set.make()(task)
    assert isinstance(episode, ExternalAgent)
    episode.reset(0)
    samples = []
    for reply in replies:
        prompt = renderer.prompt(episode.request.messages)
        samples.append((len(prompt), len(renderer.recorded_turn(reply, prompt, stop=())[0])))
        episode.step(Message(role="assistant", content=reply))
    episode.close()
    return samples


def trace_lengths(task_set: TaskSet, task: Task, replies: Sequence[str], renderer: ChatRenderer) -> list[int]:
    """Return the length of an episode's one trace after every turn: the prompt, replies and observations."""
    episode = task_set.make()(task)
    ids = list(renderer.prompt(episode.reset(0)))
    lengths = []
    for reply in replies:
        turn = renderer.recorded_turn(reply, ids, stop=task_set.stop)[0]
        ids += turn
        lengths.append(len(ids))
        observations = episode.step(Message(role="assistant", content=reply)).observations
        ids += renderer.bridge(ids, observations)
    episode.close()
    return lengths


def _with_window(settings: WindowedSettings, num_steps: int, max_moves: int) -> WindowedSettings:
    window = settings.window.model_copy(update={"steps": num_steps, "max_prompt_tokens": ALL_STEPS})
    return settings.model_copy(update={"window": window, "max_moves": max_moves})


def _window_name(num_steps: int) -> str:
    return "window of all steps" if num_steps == ALL_STEPS else f"window of {num_steps}"


def thought_text(renderer: ChatRenderer, num_tokens: int) -> str:
    """A thought of so many tokens between its tags; empty for 0."""
    if not num_tokens:
        return ""
    ids = renderer.template.encode(_THOUGHT * (1 + num_tokens // 10))[:num_tokens]
    return f"<think>{decode_text(renderer.tokenizer, ids, skip_special_tokens=False)}</think>\n"


def _sums(values: Sequence[int]) -> list[int]:
    return list(accumulate(values))
