"""The commands ``outrider buffer build | import | stats | query``."""

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.padding import Padding
from rich.text import Text

from outrider.config import validate
from outrider.engines.chat import ChatEndpoint, EndpointSettings
from outrider.environments.base import EnvironmentFactory, TaskSet, make_task_set, split_tasks
from outrider.errors import ConfigError, DataError
from outrider.memory import chat_files as sources
from outrider.memory.embedders import Vectors, load_embedder
from outrider.memory.step_buffer import StepTraceBuffer
from outrider.memory.step_store import BuildReport, Database, check_schema, meta
from outrider.printing import FittedTable, Terminal, plural, print_lines
from outrider.rollout.endpoint import Collector
from outrider.training.experts import CollectionLog, fill_buffer
from outrider.training.settings import RunSettings
from outrider.types import Outcome, Task, Trajectory

_MAX_CONCURRENT = 8
_SHOWN_FAULTS = 5
_PORTION = 256  # trajectories: a minute or two of embedding


def build_buffer(
    settings: RunSettings, *, out: Path, endpoint: str | None, endpoint_model: str, num_trajectories: int
) -> int:
    """Fill ``out`` from the recipe's training tasks: by their experts, or by an endpoint's agent. Run it
    again to continue.

    Raises ConfigError, DataError, ToolUnavailable, ModelError and EngineFault, all before ``out`` is made
    where possible; DataError when nothing at all is in the buffer in the end.
    """
    if num_trajectories < 1:
        raise ConfigError("--num-trajectories must be at least 1")
    agent = None if endpoint is None else _connect_agent(endpoint, endpoint_model, settings.seed)
    embedder = load_embedder(settings.buffer.embedder)
    task_set = make_task_set(settings.environment)
    tasks = split_tasks(task_set, "train")[: settings.buffer.num_tasks]
    with closing(task_set.make()) as factory, closing(task_set):
        log = CollectionLog(out)
        with StepTraceBuffer(out, embedder, mode="write") as buffer:
            if buffer.lost_batch:
                print_lines("the last writer was killed inside a batch: that batch is added again")
            if agent is None:
                _fill_with_experts(buffer, task_set, factory, tasks, settings)
            else:
                collector = Collector(
                    endpoint=agent,
                    factory=factory,
                    limits=settings.limits,
                    stop=task_set.stop,
                    run_seed=settings.seed,
                    num_concurrent=min(_MAX_CONCURRENT, settings.num_concurrent),
                    max_retries=settings.train.max_retries,
                )
                _fill_with_endpoint(buffer, collector, log, tasks, settings, num_trajectories)
            if len(buffer) == 0:
                raise DataError(f"{out}: no trajectory has entered the buffer")
            print_lines(f"{out}: {plural(len(buffer), 'step')}, revision {buffer.revision}")
    return 0


def import_trajectories(
    file: Path, *, out: Path, embedder: str, keep_best: int, min_reward: float | None, skip_malformed: bool
) -> int:
    """Add the chats of a file to a buffer, which is created if it is missing. Chats that it contains are
    counted as present.

    Written in portions of whole tasks, with progress: a second call continues after the last one.
    """
    if keep_best < 1:
        raise ConfigError("--keep-best must be at least 1")
    imported = sources.import_trajectories(file, on_malformed="skip" if skip_malformed else "error")
    with StepTraceBuffer(out, load_embedder(embedder), mode="write") as buffer:
        buffer.check(imported.trajectories)  # all of them before the first is written
        reports = []
        began, done = time.monotonic(), 0
        for portion in _portions_by_task(imported.trajectories, _PORTION):
            reports.append(
                buffer.add_trajectories(
                    portion, keep_best=keep_best, min_reward=min_reward, questions=imported.questions
                )
            )
            done += len(portion)
            left = (time.monotonic() - began) / done * (len(imported.trajectories) - done)
            print_lines(
                f"import: {done} of {plural(len(imported.trajectories), 'trajectory', 'trajectories')}, "
                f"{plural(len(buffer), 'step')}, about {left:.0f} s left"
            )
        counts = {"num_malformed": len(imported.problems), **_totals(reports)}
        left_out = {f"left out: {name}": count for name, count in imported.dropped.items()}
        _print_counts(f"import of {file.name}", counts | left_out)
        _print_some("malformed", imported.problems)
        print_lines(f"{out}: {plural(len(buffer), 'step')}, revision {buffer.revision}")
    return 0


def _portions_by_task(trajectories: Sequence[Trajectory], size: int) -> Iterator[list[Trajectory]]:
    """Portions of about ``size``; a task's trajectories stay together, because only the best of them are
    kept.
    """
    groups: dict[str, list[Trajectory]] = {}
    for trajectory in trajectories:
        groups.setdefault(trajectory.task_key, []).append(trajectory)
    portion: list[Trajectory] = []
    for group in groups.values():
        portion += group
        if len(portion) >= size:
            yield portion
            portion = []
    if portion:
        yield portion


@dataclass(frozen=True, slots=True)
class _RecordedEmbedder:
    """The embedder that a buffer was built with, to open it without the model: it computes nothing."""

    name: str
    dim: int

    def embed(self, texts: Sequence[str]) -> Vectors:
        raise NotImplementedError


def print_stats(file: Path) -> int:
    """Print the contents of a buffer."""
    if not file.exists():
        raise DataError(f"{file}: no step-trace buffer there")
    with closing(Database(file, writable=False)) as database:
        with database.guard() as db:
            check_schema(file, db)
        embedder = _RecordedEmbedder(str(meta(database, "embedder")), int(meta(database, "dim")))
    with StepTraceBuffer(file, embedder, mode="read") as buffer:
        stats = buffer.stats()
        _print_counts(
            file.name,
            {
                "embedder": buffer.embedder.name,
                "revision": buffer.revision,
                "tasks": stats.num_tasks,
                "trajectories": stats.num_trajectories,
                "steps": stats.num_steps,
                "agents' tokens (where known)": stats.num_tokens,
                **{
                    f"trajectories of {agent}": count
                    for agent, count in stats.num_trajectories_by_agent.items()
                },
                **{f"steps of {agent}": count for agent, count in stats.num_steps_by_agent.items()},
                "share of terminal steps": f"{stats.share_terminal:.3f}",
                "steps a trajectory (min, quartiles, max)": _quantiles(stats.steps_per_trajectory_quantiles),
                "rewards (min, quartiles, max)": _quantiles(stats.reward_quantiles),
            },
        )
    return 0


def print_hits(file: Path, *, embedder: str, history: str, k: int) -> int:
    """Print the steps that a rollout with this history would retrieve, best first, without steps that end an
    episode.
    """
    if k < 1:
        raise ConfigError("-k must be at least 1")
    with StepTraceBuffer(file, load_embedder(embedder), mode="read") as buffer:
        hits = buffer.query(history, k=k)
    if not hits:
        print_lines("no step to show: the buffer is empty, or all its steps end an episode")
        return 0
    for rank, hit in enumerate(hits, start=1):
        record = hit.record
        print_lines(
            f"{rank}. similarity {hit.similarity:.4f}, reward {record.reward:g}, agent {record.agent}",
            f"   step {record.step_index} of {record.task_key} ({record.trajectory_id})",
        )
        text = f"{record.text.strip()}\n{record.observation.strip()}".strip()
        Terminal().print(Padding(Text(text), (0, 0, 0, 6), expand=False))
    return 0


def _connect_agent(endpoint: str, model: str, seed: int) -> ChatEndpoint:
    """Return the endpoint after one request for its models, so that a wrong address or key is reported at
    once.
    """
    settings = validate(EndpointSettings, {"base_url": endpoint, "model": model, "seed": seed})
    discovered = ChatEndpoint(settings).discovered()
    form = (
        "continues one assistant message"
        if discovered.continues_messages
        else "gets results as user messages"
    )
    print_lines(f"{discovered.base_url}: agent {discovered.model}, {form}")
    return ChatEndpoint(discovered)


def _fill_with_experts(
    buffer: StepTraceBuffer,
    task_set: TaskSet,
    factory: EnvironmentFactory,
    tasks: Sequence[Task],
    settings: RunSettings,
) -> None:
    filled = fill_buffer(buffer, task_set, factory, tasks, settings, print_lines)
    names = ("present", "without_expert", "unsolved", "fault", "retries")
    counts = {
        f"num_tasks_{name}" if name != "retries" else "num_retries": filled.counts[name] for name in names
    }
    _print_counts("experts", {"num_tasks": len(tasks), **counts, **_totals(filled.builds)})
    _print_some("fault", filled.faults)


def _fill_with_endpoint(
    buffer: StepTraceBuffer,
    collector: Collector,
    log: CollectionLog,
    tasks: Sequence[Task],
    settings: RunSettings,
    num_trajectories: int,
) -> None:
    """Roll out, add and log portions of tasks in turn, so that a kill costs one portion at most."""
    size = max(1, 4 * collector.num_concurrent // num_trajectories)
    builds: list[BuildReport] = []
    counts: Counter[str] = Counter()
    details: list[str] = []
    for start in range(0, len(tasks), size):
        portion = tasks[start : start + size]
        report = collector.collect(portion, num_rollouts=num_trajectories, done=log.done())
        build = buffer.add_trajectories(
            report.trajectories,
            keep_best=settings.buffer.keep_best,
            min_reward=settings.buffer.min_reward,
            questions={task.key: task.question for task in portion},
        )
        log.add(report.collected)
        builds.append(build)
        counts["num_done_before"] += report.num_skipped
        counts["num_successes"] += sum(rollout.success for rollout in report.collected)
        counts["num_retries_of_environments"] += sum(rollout.num_retries for rollout in report.collected)
        counts.update({f"num_{outcome.value}": number for outcome, number in sorted(report.outcomes.items())})
        details += [
            f"{rollout.trajectory_id}: {rollout.detail}"
            for rollout in report.collected
            if rollout.trajectory is None
        ]
        print_lines(
            f"buffer: {start + len(portion)} of {plural(len(tasks), 'task')} played, "
            f"{plural(len(buffer), 'step')}"
        )
    counts.update(
        {f"num_retries_{kind}": number for kind, number in sorted(collector.endpoint.retries.items())}
    )
    _print_counts(
        f"agent {collector.endpoint.settings.model}", {"num_tasks": len(tasks), **counts, **_totals(builds)}
    )
    _print_some("fault", details)
    limits = settings.limits
    if num := counts[f"num_{Outcome.TRUNCATED_TURNS.value}"]:
        print_lines(
            f"{plural(num, 'trajectory was', 'trajectories were')} cut by rollout.max_turns = "
            f"{limits.max_turns} or the environment"
        )
    if num := counts[f"num_{Outcome.TRUNCATED_TOKENS.value}"]:
        print_lines(
            f"{plural(num, 'trajectory was', 'trajectories were')} cut by rollout.max_turn_tokens = "
            f"{limits.max_turn_tokens}, "
            f"rollout.max_response_tokens = {limits.max_response_tokens} or the server's context"
        )


def _totals(reports: Sequence[BuildReport]) -> dict[str, int]:
    totals: Counter[str] = Counter()
    names = [name for name in BuildReport.__dataclass_fields__ if name != "revision"]
    for report in reports:
        totals.update(asdict(report))
    return {name: totals[name] for name in names}


def _quantiles(values: Sequence[float]) -> str:
    return ", ".join(f"{value:g}" for value in values)


def _print_counts(title: str, values: Mapping[str, object]) -> None:
    table = FittedTable("what", "value", title=title)
    for name, value in values.items():
        table.add_row(Text(name), Text(str(value)))
    Terminal().print(table)


def _print_some(kind: str, lines: Sequence[str]) -> None:
    for line in lines[:_SHOWN_FAULTS]:
        print_lines(f"{kind}: {line}")
    if len(lines) > _SHOWN_FAULTS:
        print_lines(f"... and {len(lines) - _SHOWN_FAULTS} more of this kind")
