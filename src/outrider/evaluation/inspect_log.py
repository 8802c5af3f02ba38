"""Export of evaluations as logs of inspect-ai."""

import hashlib
import importlib.util
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, Final, Literal

from outrider import __version__
from outrider.config import load_settings
from outrider.environments.base import make_task_set
from outrider.errors import ConfigError, OutriderError, ToolUnavailable
from outrider.evaluation.grading import RETURN
from outrider.evaluation.report import requested_samples
from outrider.evaluation.results import RESULTS, SETTINGS, SUMMARY, SampleResult, read_results, summarise
from outrider.evaluation.tasks import EvalTasksSettings, load_tasks
from outrider.files import read_toml
from outrider.printing import plural
from outrider.rollout.evaluate import interval
from outrider.tokens.call_formats import get_call_format
from outrider.tokens.tool_calls import read_calls, split_thinking
from outrider.training.run_dir import recorded_settings
from outrider.types import Json, Origin, Outcome, Task, ToolCall
from outrider.viewer.records import (
    TraceReader,
    TraceRow,
    evaluation_file,
    parse_metadata,
    path_to_leaf,
    read_rollouts,
)
from outrider.viewer.run_reader import read_records

if TYPE_CHECKING:
    from inspect_ai.log import EvalLog, EvalSample


MessageRole = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedMessage:
    """A message. A turn of the policy with native calls has them in ``calls`` (with ids of the turn), the
    errors of malformed ones in ``problems``, and its thinking in ``thinking``; otherwise the calls are in the
    text, and ``tools`` are the names of the tools that ran. ``call_id`` of a tool's message is its call, if
    it was recorded.
    """

    role: MessageRole
    text: str
    thinking: str = ""
    calls: tuple[ToolCall, ...] = ()
    problems: tuple[str, ...] = ()
    tools: tuple[str, ...] = ()
    call_id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedRollout:
    """One rollout. ``epoch`` is its number among those of its task, from 1. After a fault ``scores`` is empty
    and ``detail`` describes the fault. ``num_tokens`` are the policy's; None if they were not counted.
    """

    task_key: str
    epoch: int
    prompt: tuple[LoggedMessage, ...]
    messages: tuple[LoggedMessage, ...]
    target: tuple[str, ...] = ()
    outcome: Outcome
    detail: str = ""
    answer: str | None = None
    scores: Mapping[str, float] = field(default_factory=dict)
    num_tokens: int | None = None
    metadata: Mapping[str, Json] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedEvaluation:
    """All rollouts of one evaluation. ``created`` is when its record was last written, ``summary`` its own
    score with the interval's bounds. ``num_requested`` counts the rollouts of the complete evaluation, 0 if
    unknown.
    """

    task: str
    model: str
    created: datetime
    panel_hash: str
    rollouts: tuple[LoggedRollout, ...]
    summary: Mapping[str, float]
    metadata: Mapping[str, Json]
    notes: tuple[str, ...] = ()
    is_complete: bool = True
    num_requested: int = 0


def modified_time(path: Path) -> datetime:
    """When a file was last written, in UTC to the second."""
    return datetime.fromtimestamp(path.stat().st_mtime, UTC).replace(microsecond=0)


# Messages of a rollout from its recorded nodes, with native calls and their results.


AFTER_POLICY = (Origin.POLICY, Origin.DEMONSTRATION)


def node_messages(row: TraceRow, form: str | None) -> list[LoggedMessage]:
    """The messages of a node; ``form`` is that of the policy's native calls."""
    metadata = parse_metadata(row)
    tools = tuple(str(name) for name in metadata.get("tools", ()))
    role: MessageRole
    match row.role:
        case "assistant":
            return [turn(row.text, form, tools)]
        case "system" | "user" | "tool":
            role = row.role
        case "inline":  # a result, or what a memory brought
            role = "tool" if row.origin is Origin.ENVIRONMENT else "user"
        case _:  # an earlier version of the records
            role = "assistant" if row.origin in AFTER_POLICY else "user"
    return list(_parts(row.text, metadata)) or [LoggedMessage(role=role, text=row.text, tools=tools)]


def turn(text: str, form: str | None, tools: tuple[str, ...] = ()) -> LoggedMessage:
    """A turn of the policy, for which ``tools`` ran. Arguments whose type only a schema knows stay text."""
    if form is None:
        return LoggedMessage(role="assistant", text=text, tools=tools)
    call_format = get_call_format(form)
    thinking, words, _ = split_thinking(text, call_format)
    parsed_turn = read_calls(words, call_format, ())
    return LoggedMessage(
        role="assistant",
        text=parsed_turn.content,
        thinking=thinking,
        calls=parsed_turn.calls,
        problems=parsed_turn.problems,
    )


def _parts(text: str, metadata: Mapping[str, Any]) -> Iterator[LoggedMessage]:
    """The messages of an observation that has several, or ids of calls."""
    position = 0
    for part in metadata.get("messages", ()):
        end = position + part["num_chars"]
        role: MessageRole = part["role"] if part["role"] in ("system", "user", "tool") else "user"
        yield LoggedMessage(role=role, text=text[position:end], call_id=part["call_id"])
        position = end + 1


# Writes an evaluation as a log of inspect-ai, with its own classes and its own writer.


_SUFFIX: Final = ".eval"
_UNREAD: Final = "unread"  # the function of a call that could not be read


def write_log(evaluation: LoggedEvaluation, path: Path) -> None:
    """Write a new file. Raises ToolUnavailable without the package, ConfigError for a name that is taken or
    is no ``.eval``.
    """
    if importlib.util.find_spec("inspect_ai") is None:
        raise ToolUnavailable("inspect-ai is not installed: pip install 'outrider[inspect]'")
    if path.suffix != _SUFFIX:
        raise ConfigError(f"{path} must end with {_SUFFIX}: by that its readers know the format")
    if path.exists():
        raise ConfigError(f"{path} exists already; nothing was written")
    if not path.parent.is_dir():
        raise ConfigError(f"there is no folder {path.parent}")
    from inspect_ai.log import write_eval_log

    write_eval_log(to_eval_log(evaluation), str(path.absolute()), format="eval")


def to_eval_log(evaluation: LoggedEvaluation) -> "EvalLog":
    """The log in memory."""
    from inspect_ai.log import EvalConfig, EvalDataset, EvalLog, EvalResults, EvalSpec, EvalStats
    from inspect_ai.model import ModelUsage

    rollouts = evaluation.rollouts
    keys = list(dict.fromkeys(rollout.task_key for rollout in rollouts))
    created = evaluation.created.isoformat()
    identity = _id(evaluation.panel_hash, evaluation.model, created)
    num_tokens = sum(rollout.num_tokens or 0 for rollout in rollouts)
    return EvalLog(
        # inspect's word for one whose process has not written its end
        status="success" if evaluation.is_complete else "started",
        eval=EvalSpec(
            eval_id=identity,
            run_id=identity,
            created=created,
            task=evaluation.task,
            task_id=_id(evaluation.panel_hash),
            dataset=EvalDataset(name=evaluation.task, samples=len(keys), sample_ids=keys),
            model=evaluation.model,
            # a fault ends no evaluation
            config=EvalConfig(
                epochs=max((rollout.epoch for rollout in rollouts), default=1), fail_on_error=False
            ),
            packages={"outrider": __version__},
            metadata={"panel_hash": evaluation.panel_hash, **evaluation.metadata},
        ),
        results=EvalResults(
            total_samples=max(evaluation.num_requested, len(rollouts)),
            completed_samples=sum(not rollout.outcome.is_fault for rollout in rollouts),
            scores=_results(evaluation),
        ),
        # when it began is not on file
        stats=EvalStats(
            completed_at=created if evaluation.is_complete else "",
            model_usage={evaluation.model: ModelUsage(output_tokens=num_tokens, total_tokens=num_tokens)},
        ),
        samples=[_sample(rollout, evaluation.model) for rollout in rollouts],
    )


def _results(evaluation: LoggedEvaluation) -> list[Any]:
    """Mean of every score over the rollouts that have it, and the summary of the evaluation."""
    from inspect_ai.log import EvalMetric, EvalScore

    scores = []
    rollouts = evaluation.rollouts
    for name in dict.fromkeys(name for rollout in rollouts for name in rollout.scores):
        values = [rollout.scores[name] for rollout in rollouts if name in rollout.scores]
        mean = EvalMetric(name="mean", value=sum(values) / len(values))
        scores.append(_score(EvalScore, name, len(values), len(rollouts), {"mean": mean}))
    summary = {name: EvalMetric(name=name, value=value) for name, value in evaluation.summary.items()}
    num_scored = sum(not rollout.outcome.is_fault for rollout in rollouts)
    return (
        [*scores, _score(EvalScore, "evaluation", num_scored, len(rollouts), summary)] if summary else scores
    )


def _score(score_type: Any, name: str, num_scored: int, num: int, metrics: dict[str, Any]) -> Any:
    return score_type(
        name=name, scorer="outrider", scored_samples=num_scored, unscored_samples=num - num_scored,
        metrics=metrics
    )  # fmt: skip


def _sample(rollout: LoggedRollout, model: str) -> "EvalSample":
    from inspect_ai.log import EvalError, EvalSample
    from inspect_ai.model import ModelOutput, ModelUsage
    from inspect_ai.scorer import Score

    tokens = rollout.num_tokens
    usage = {} if tokens is None else {model: ModelUsage(output_tokens=tokens, total_tokens=tokens)}
    error = None
    if rollout.outcome.is_fault:
        message = f"{rollout.outcome.value}: {rollout.detail}" if rollout.detail else rollout.outcome.value
        error = EvalError(message=message, traceback=message, traceback_ansi=message)
    last = next((logged.text for logged in reversed(rollout.messages) if logged.role == "assistant"), "")
    return EvalSample(
        id=rollout.task_key,
        epoch=rollout.epoch,
        input=list(_messages(rollout.prompt, model)),
        target=list(rollout.target) if len(rollout.target) != 1 else rollout.target[0],
        messages=list(_messages(rollout.messages, model)),
        output=ModelOutput.from_content(model=model, content=last),
        scores={name: Score(value=value, answer=rollout.answer) for name, value in rollout.scores.items()}
        or None,
        metadata={"outcome": rollout.outcome.value, "detail": rollout.detail, **rollout.metadata},
        model_usage=usage,
        uuid=_id(rollout.task_key, str(rollout.epoch), model),
        error=error,
    )


def _messages(messages: Sequence[LoggedMessage], model: str) -> Iterator[Any]:
    """Messages of inspect-ai. Results of tools have the id and the name of their call; without a recorded id
    they follow the order of the calls.
    """
    from inspect_ai.model import (
        ChatMessageAssistant,
        ChatMessageSystem,
        ChatMessageTool,
        ChatMessageUser,
        ContentReasoning,
        ContentText,
    )

    calls: dict[str, Any] = {}
    for number, message in enumerate(messages):
        name = f"{number}"
        match message.role:
            case "assistant":
                calls = _calls(message, number)
                content: Any = message.text
                if message.thinking:
                    reasoning = ContentReasoning(reasoning=message.thinking)
                    content = [reasoning, ContentText(text=message.text)]
                yield ChatMessageAssistant(
                    id=name, content=content, tool_calls=list(calls.values()) or None, model=model
                )
            case "tool":
                call = calls.pop(message.call_id if message.call_id in calls else next(iter(calls), ""), None)
                yield ChatMessageTool(
                    id=name,
                    content=message.text,
                    tool_call_id=None if call is None else call.id,
                    function=None if call is None else call.function,
                )
            case "system":
                yield ChatMessageSystem(id=name, content=message.text)
            case "user":
                yield ChatMessageUser(id=name, content=message.text)


def _calls(message: LoggedMessage, number: int) -> dict[str, Any]:
    """A turn's calls by their ids: native ones and malformed ones, otherwise calls by tag, whose ``input`` is
    the text between the tags.
    """
    from inspect_ai.tool import ToolCall

    calls = {
        call.call_id: ToolCall(
            id=f"{number}-{call.call_id}", function=call.name, arguments=dict(call.arguments)
        )
        for call in message.calls
    }
    for index, problem in enumerate(message.problems):
        name = f"unread{index}"
        calls[name] = ToolCall(id=f"{number}-{name}", function=_UNREAD, arguments={}, parse_error=problem)
    for index, tool in enumerate(message.tools):
        inside = re.findall(rf"<{re.escape(tool)}>(.*?)</{re.escape(tool)}>", message.text, re.DOTALL)
        arguments = {"input": inside[-1]} if inside else {}
        calls[f"{index}"] = ToolCall(id=f"{number}-{index}", function=tool, arguments=arguments)
    return calls


def _id(*parts: str) -> str:
    """A deterministic id with the length of inspect's own ids."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:22]


# An evaluation of a run directory (of training, or of ``outrider eval RECIPE``), from its records.


EVALUATIONS: Final = "evaluations.jsonl"


def load_run_evaluation(run: Path, number: int | None = None) -> LoggedEvaluation:
    """The evaluation in line ``number`` (from 0) of ``evaluations.jsonl``; None is the last one of the main
    evaluation set.

    Raises ConfigError where there is none, DataError for damaged records.
    """
    evaluations = read_records(run / EVALUATIONS)
    if not evaluations:
        raise ConfigError(f"{run} has no evaluation")
    main = [
        index for index, entry in enumerate(evaluations) if entry.get("panel") == evaluations[0].get("panel")
    ]
    index = main[-1] if number is None else number
    if not 0 <= index < len(evaluations):
        raise ConfigError(f"{run} has evaluations 0 to {len(evaluations) - 1}, not {index}")
    record = evaluations[index]
    config = read_toml(run / "config.toml")
    targets, form, notes = _environment(run, record["split"])
    score = record["metric"]["score"]
    return LoggedEvaluation(
        task=str(config["environment"]["type"]),
        model=f"{config['model']['name']}, step {record['step']}",
        created=modified_time(run / EVALUATIONS),
        panel_hash=record["panel_hash"],
        rollouts=tuple(_rollouts(run, index, targets, form)),
        summary={
            "mean": score["value"],
            "ci_low": score["ci_low"],
            "ci_high": score["ci_high"],
            "mean_return": record["mean_return"],
        },
        metadata={
            "label": record["label"],
            "step": record["step"],
            "split": record["split"],
            "temperature": record["temperature"],
            "num_faults": record["num_faults"],
            "recipe": (run / "config.toml").read_text(encoding="utf-8-sig"),
        },
        notes=tuple(notes),
    )


def _environment(run: Path, split: str) -> tuple[Mapping[str, tuple[str, ...]], str | None, list[str]]:
    """Answers by task key, of the tasks as this machine has them, and the form of native calls."""
    form: str | None = None
    try:
        settings = recorded_settings(run / "config.toml").environment
        form = settings.call_format
        with closing(make_task_set(settings)) as task_set:
            return {task.key: task.answers for task in task_set.tasks(split)}, form, []
    except (OutriderError, OSError) as error:
        return {}, form, [f"without targets: {error}"]


def _rollouts(
    run: Path, number: int, targets: Mapping[str, tuple[str, ...]], form: str | None
) -> list[LoggedRollout]:
    rows = {(row.trace_id, row.node_id): row for row in TraceReader(run / "traces").read_evaluation(number)}
    seen: Counter[str] = Counter()
    rollouts = []
    for record in read_rollouts(run, evaluation_file(number)).to_pylist():
        seen[record["task_key"]] += 1
        leaf = rows.get((record["trace_id"], record["node_id"]))  # a fault may have left none
        path = [] if leaf is None else path_to_leaf(rows, leaf)
        first = next((i for i, row in enumerate(path) if row.origin in AFTER_POLICY), len(path))
        prompt = [message for row in path[:first] for message in node_messages(row, form)]
        answered = [message for row in path[first:] for message in node_messages(row, form)]
        rollouts.append(
            LoggedRollout(
                task_key=record["task_key"],
                epoch=seen[record["task_key"]],
                prompt=tuple(prompt),
                messages=(*prompt, *answered),
                target=targets.get(record["task_key"], ()),
                outcome=Outcome(record["outcome"]),
                detail=record["fault"],
                scores={
                    name: float(record[column])
                    for name, column in (("return", "episode_return"), ("success", "success"))
                    if record[column] is not None
                },
                num_tokens=record["num_tokens"],
                metadata={name: record[name] for name in ("mode", "kind", "num_turns", "num_calls")},
            )
        )
    return rollouts


# An evaluation of ``outrider eval --tasks``, from its results, which have policy turns without tool results.


def load_tasks_evaluation(folder: Path) -> LoggedEvaluation:
    """Every sample that its report counts. Raises ConfigError where the folder is not whole, DataError for
    damaged results.
    """
    if not (folder / SETTINGS).is_file():
        raise ConfigError(f"{folder} cannot be exported: its {SETTINGS} is missing")
    identity, stored_results = read_results(folder / RESULTS)
    settings = load_settings(EvalTasksSettings, file=folder / SETTINGS)
    results = requested_samples(stored_results, settings.num_samples)
    tasks, notes = _tasks(settings, str(identity.get("panel_hash")))
    num_requested = len(tasks) * settings.num_samples
    # the report is written at the end
    is_complete = len(results) >= num_requested if tasks else (folder / SUMMARY).is_file()
    if not is_complete:
        reason = (
            f"{len(results)} of {plural(num_requested, 'sample is', 'samples are')} on file"
            if tasks
            else f"there is no {SUMMARY}"
        )
        notes.append(f"{reason}: the evaluation has not ended")
    form = None if settings.environment is None else settings.environment.call_format
    return LoggedEvaluation(
        task=str(identity.get("tasks") or settings.tasks),
        model=str(identity.get("endpoint_model") or (settings.model and settings.model.name)),
        created=modified_time(folder / RESULTS),
        panel_hash=str(identity.get("panel_hash")),
        rollouts=tuple(_rollout(result, tasks.get(result.task_key), form) for result in results),
        summary=_summary(results),
        metadata={"identity": identity, "recipe": (folder / SETTINGS).read_text(encoding="utf-8-sig")},
        notes=tuple(notes),
        is_complete=is_complete,
        num_requested=num_requested,
    )


def _summary(results: Sequence[SampleResult]) -> dict[str, float]:
    """The score of the evaluation's report: a mean over tasks, whose samples a fault may have left fewer."""
    tasks = summarise(results).task_scores
    scores = [tasks[key] for key in sorted(tasks)]
    if not scores:
        return {}
    low, high = interval(scores, binary=all(score in (0.0, 1.0) for score in scores))
    return {"mean": fmean(scores), "ci_low": low, "ci_high": high}


def _tasks(settings: EvalTasksSettings, panel_hash: str) -> tuple[Mapping[str, Task], list[str]]:
    try:
        environment = settings.environment  # it may start a server
        with nullcontext() if environment is None else closing(make_task_set(environment)) as task_set:
            eval_tasks = load_tasks(settings, task_set)
    except (OutriderError, OSError) as error:
        return {}, [f"without questions and targets: {error}"]
    if eval_tasks.panel_hash != panel_hash:
        return {}, ["without questions and targets: this machine has other tasks than the evaluation"]
    return {task.key: task for task in eval_tasks.tasks}, []


def _rollout(result: SampleResult, task: Task | None, form: str | None) -> LoggedRollout:
    prompt = () if task is None else (LoggedMessage(role="user", text=task.question),)
    turns = tuple(turn(text, form) for text in result.turns or ())
    metrics = {("return" if name == RETURN else name): value for name, value in result.metrics.items()}
    own = {"score": result.score, "success": result.success}
    scores = {name: float(value) for name, value in own.items() if value is not None}
    metadata: dict[str, Json] = {"num_calls": result.num_tool_calls}
    return LoggedRollout(
        task_key=result.task_key,
        epoch=result.sample + 1,
        prompt=prompt,
        messages=(*prompt, *turns),
        target=() if task is None else task.answers,
        outcome=result.outcome,
        detail=result.detail,
        answer=result.prediction or None,
        scores={**metrics, **scores} if scores else {},
        num_tokens=result.num_tokens,
        metadata=metadata,
    )
