"""``outrider replay``: repeat a recorded step's rollouts without a model and compare them with the record.

The recorded texts of the policy are the actions in the configured environment, so nothing is tokenized a
second time. Prompt, observations, outcome and return must be equal. If a rollout has several episodes, the
last one is repeated.
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

from rich.text import Text

from outrider.environments.base import (
    EnvironmentFactory,
    Episode,
    EpisodeResult,
    StepResult,
    make_task_set,
    split_tasks,
)
from outrider.errors import DataError, EnvironmentFault, ToolFault
from outrider.printing import FittedTable, Terminal, plural, print_lines
from outrider.rollout.episode import episode_outcome, play_texts
from outrider.seeding import reset_seed
from outrider.training.run_dir import recorded_settings
from outrider.training.settings import RunSettings
from outrider.types import Origin, Outcome, Task
from outrider.viewer.records import TraceReader, TraceRow, last_episode, storable, whole_rollouts

_COLUMNS = ("task", "rollout", "turn", "what", "recorded", "replayed")
_ACTION_ORIGINS = (Origin.POLICY, Origin.DEMONSTRATION)  # whose text is an action
_MAX_ROWS = 20
_MAX_CELL = 160


class Difference(NamedTuple):
    """The first difference between a rollout's replay and its record. ``turn`` is None for the prompt and
    the end.
    """

    kind: str
    turn: int | None
    recorded: str
    replayed: str


def replay_step(run: Path, step: int) -> int:
    """Replay the rollouts of a training step and print the differences; returns 0 if there are none, else 1.

    Rollouts that ended in a fault are not recorded, so they are counted but not replayed. Raises DataError if
    the run, the step or one of its tasks is missing.
    """
    if not (run / "config.toml").exists():
        raise DataError(f"{run} is no run directory: it has no config.toml")
    settings = recorded_settings(run / "config.toml")
    if getattr(settings.environment, "max_batch_calls", None) is not None:
        raise DataError(
            "environment.max_batch_calls: which calls were refused depends on the whole batch, so single "
            "rollouts cannot be replayed"
        )
    rollouts = [last_episode(path) for path in whole_rollouts(TraceReader(run / "traces").read(step))]
    if not rollouts:
        raise DataError(f"step {step} of {run} holds no finished rollout")
    task_set = make_task_set(settings.environment)
    tasks = {task.key: task for task in split_tasks(task_set, "train")}
    lost = sorted({path[-1].task_key for path in rollouts} - tasks.keys())
    if lost:
        raise DataError(
            f"task {lost[0]} of the record is not in the training split any more "
            f"({plural(len(lost), 'such task')})"
        )
    with closing(task_set.make()) as factory:
        results = [
            (path[-1], _replay(path, tasks[path[-1].task_key], factory, settings, step)) for path in rollouts
        ]
    num_expected = len({path[-1].trace_id for path in rollouts}) * settings.algorithm.group_size
    _print_differences(step, results, num_unrecorded=max(0, num_expected - len(rollouts)))
    return int(any(difference is not None for _, difference in results))


def compare(
    recorded: Sequence[TraceRow], episode: Episode, record: EpisodeResult, *, settings: RunSettings
) -> Difference | None:
    """The first difference between the rows of a rollout and its replay."""
    prompt = episode.opening
    if storable(prompt) != recorded[0].text:
        return Difference("prompt", None, recorded[0].text, prompt)
    results = iter(episode.results)
    last: StepResult | None = None
    turn = 0
    for row, after in zip(recorded, [*recorded[1:], None], strict=True):
        if _is_action(row, settings):
            last = next(results, None)
            if last is None:
                return Difference("end", turn, "the episode went on", "the episode had ended")
            if (difference := _compare_observation(row, after, last, turn)) is not None:
                return difference
            turn += 1
        for _ in _attempted_actions(row):
            last = next(results, last)
    return _compare_end(recorded, last, episode, record, settings)


def _replay(
    path: Sequence[TraceRow], task: Task, factory: EnvironmentFactory, settings: RunSettings, step: int
) -> Difference | None:
    texts = [
        text
        for row in path
        for text in (*([_action_text(row)] if _is_action(row, settings) else []), *_attempted_actions(row))
    ]
    # the file of step n has the rollouts before update n
    seed = reset_seed(settings.seed, step - 1, task.key)
    settings = settings.model_copy(update={"rollout": settings.rollout.at_step(step - 1)})
    try:
        timeout_s = settings.limits.step_timeout_s
        episode, record = play_texts(factory, task, texts, seed=seed, timeout_s=timeout_s)
    except (ToolFault, EnvironmentFault) as fault:
        return Difference("fault", None, "none", str(fault))
    return compare(path, episode, record, settings=settings)


def _is_action(row: TraceRow, settings: RunSettings) -> bool:
    """Whether the environment executed the node: policy turns, and retrieved steps in mode ``execute``."""
    return row.origin in _ACTION_ORIGINS or (
        row.origin is Origin.BUFFER and settings.algorithm.executes_retrieved
    )


def _action_text(row: TraceRow) -> str:
    """The text that the environment executed. Records of older versions have only the text that was shown."""
    return row.text if row.origin in _ACTION_ORIGINS else str(_metadata(row).get("action", _inner_text(row)))


def _attempted_actions(row: TraceRow) -> Sequence[str]:
    """Retrieved actions after a node that no node contains: they were refused, or did not fit."""
    actions = _metadata(row).get("attempted", [])
    return [str(action) for action in actions] if isinstance(actions, list) else []


def _inner_text(row: TraceRow) -> str:
    return row.text.strip().removeprefix("<retrieve>").removesuffix("</retrieve>")


def _compare_observation(
    row: TraceRow, after: TraceRow | None, result: StepResult, turn: int
) -> Difference | None:
    text = storable(result.text)
    if row.origin is Origin.BUFFER and row.role != "assistant":
        same = _inner_text(row).strip().endswith(text.strip())
        return None if same else Difference("executed step", turn, _inner_text(row), text)
    if after is None or after.origin is not Origin.ENVIRONMENT:
        return None
    if result.done:
        return Difference("end", turn, "the episode went on", "the episode ended")
    return None if after.text == text else Difference("observation", turn, after.text, text)


def _compare_end(
    recorded: Sequence[TraceRow],
    last: StepResult | None,
    episode: Episode,
    record: EpisodeResult,
    settings: RunSettings,
) -> Difference | None:
    leaf = recorded[-1]
    if last is not None and last.done:  # the environment ended the episode
        is_cut = leaf.origin in _ACTION_ORIGINS and _metadata(leaf).get("finish") == "length"
        outcome = episode_outcome(last, is_cut=is_cut, is_answer=episode.ends_with_answer)
    else:
        outcome = _limit_outcome(recorded, last, settings)
    assert leaf.outcome is not None  # every leaf has one
    if outcome is not leaf.outcome:
        return Difference("outcome", None, leaf.outcome.value, outcome.value)
    if record.episode_return != leaf.episode_return:
        return Difference("return", None, f"{leaf.episode_return!r}", f"{record.episode_return!r}")
    return None


def _limit_outcome(recorded: Sequence[TraceRow], last: StepResult | None, settings: RunSettings) -> Outcome:
    """The outcome of an episode that the environment did not end: token counts follow from the last node."""
    leaf = recorded[-1]
    finish = _metadata(leaf).get("finish") if leaf.origin in _ACTION_ORIGINS else None
    if (
        finish == "eos"
        and last is not None
        and any(message.role == "inline" for message in last.observations)
    ):
        return Outcome.INVALID
    num_turns = sum(row.origin in _ACTION_ORIGINS for row in recorded)
    is_between_turns = leaf.origin in (Origin.ENVIRONMENT, Origin.PROMPT)
    if is_between_turns and num_turns >= settings.rollout.max_turns:
        return Outcome.TRUNCATED_TURNS
    return Outcome.TRUNCATED_TOKENS


def _metadata(row: TraceRow) -> Mapping[str, object]:
    try:
        value = json.loads(row.metadata)
    except (ValueError, RecursionError) as error:
        raise DataError(f"trace {row.trace_id}: metadata of node {row.node_id} is no JSON") from error
    return value if isinstance(value, dict) else {}


def _print_differences(
    step: int, results: Sequence[tuple[TraceRow, Difference | None]], *, num_unrecorded: int
) -> None:
    differing = [(leaf, difference) for leaf, difference in results if difference is not None]
    if differing:
        table = FittedTable(*_COLUMNS, title=f"step {step}: first differences")
        for leaf, difference in differing[:_MAX_ROWS]:
            turn = "" if difference.turn is None else str(difference.turn)
            recorded, replayed = _excerpts(difference.recorded, difference.replayed)
            cells = (leaf.task_key, str(leaf.rollout), turn, difference.kind, recorded, replayed)
            table.add_row(*map(Text, cells))
        Terminal().print(table)
        if len(differing) > _MAX_ROWS:
            print_lines(
                "... and "
                f"{plural(len(differing) - _MAX_ROWS, 'more rollout differs', 'more rollouts differ')}"
            )
    summary = FittedTable("rollouts", "count", title=f"step {step}")
    counts = {
        "replayed": len(results),
        "same": len(results) - len(differing),
        "different": len(differing),
        "not on file (faults)": num_unrecorded,
    }
    for name, count in counts.items():
        summary.add_row(name, str(count))
    Terminal().print(summary)


def _excerpts(recorded: str, replayed: str) -> tuple[str, str]:
    """Both texts on one line, cut around the first difference."""
    recorded, replayed = (text.replace("\n", "\\n") for text in (recorded, replayed))
    same = next(
        (i for i, (a, b) in enumerate(zip(recorded, replayed, strict=False)) if a != b),
        min(len(recorded), len(replayed)),
    )
    start = max(0, same - 40)
    mark = "..." if start else ""
    end = start + _MAX_CELL
    return f"{mark}{recorded[start:end]}", f"{mark}{replayed[start:end]}"
