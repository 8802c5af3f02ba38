"""Writes an evaluation as a log of inspect-ai, with its own classes and its own writer."""

import hashlib
import importlib.util
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from outrider import __version__
from outrider.errors import ConfigError, ToolUnavailable
from outrider.evals.inspect_log.logged import LoggedEvaluation, LoggedMessage, LoggedRollout

if TYPE_CHECKING:
    from inspect_ai.log import EvalLog, EvalSample

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
    """The mean of every score over the rollouts that have it, and the evaluation's own summary."""
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
    """Results of tools have the id and the name of the call that they answer, in order where the record does
    not tell.
    """
    from inspect_ai.model import ChatMessageAssistant, ChatMessageSystem, ChatMessageTool, ChatMessageUser

    calls: dict[str, Any] = {}
    for number, message in enumerate(messages):
        name = f"{number}"
        match message.role:
            case "assistant":
                calls = _calls(message, number)
                yield ChatMessageAssistant(
                    id=name, content=_content(message), tool_calls=list(calls.values()) or None, model=model
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


def _content(message: LoggedMessage) -> Any:
    from inspect_ai.model import ContentReasoning, ContentText

    if not message.thinking:
        return message.text
    return [ContentReasoning(reasoning=message.thinking), ContentText(text=message.text)]


def _calls(message: LoggedMessage, number: int) -> dict[str, Any]:
    """A turn's calls by their ids: native ones, and what could not be read as one; else those by tags that
    ran, of which what stands between the tags is the ``input``.
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
    """Of the same evaluation the same, as long as the readers' own."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:22]
