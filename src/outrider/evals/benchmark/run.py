"""``outrider eval --tasks``: play a panel, grade it, keep every result, and say what came out.

A folder holds one evaluation: ``results.jsonl`` (:class:`~outrider.evals.benchmark.store.EvalTasksStore`) and
``summary.json``. The same command continues a stopped one and tries again what a fault kept from being
scored.
"""

import json
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Literal

from outrider.atomic_io import replace_file
from outrider.environments.tool_qa.judge import discover_judge
from outrider.errors import ConfigError, EngineFault
from outrider.evals.benchmark.extraction import find_variant
from outrider.evals.benchmark.grades import FinishedRollout, Grader
from outrider.evals.benchmark.players import Player, make_player
from outrider.evals.benchmark.report import build_report, requested_samples
from outrider.evals.benchmark.scores import SampleResult
from outrider.evals.benchmark.settings import EvalTasksSettings, write_settings
from outrider.evals.benchmark.store import RESULTS, SUMMARY, EvalTasksStore
from outrider.evals.benchmark.table import EvalTasksReport
from outrider.evals.benchmark.tasks import EvalSetup, open_eval_tasks
from outrider.evals.benchmark.trained import differences
from outrider.printing import print_lines
from outrider.rollout.whereabouts import RolloutStatus
from outrider.terminal import Terminal
from outrider.watch.progress import SET_UP, Progress, make_progress
from outrider.watch.token_meter import TokenMeter
from outrider.watch.watchdog import WatchedProgress

_MAX_JUDGES = 8  # that are asked at a time, for one batch of a model's answers


def evaluate_tasks(
    settings: EvalTasksSettings, folder: Path, *, progress: Literal["auto", "rich", "plain", "none"] = "auto"
) -> int:
    """Play what is owed, write ``summary.json`` and print it.

    Exit status 0 also where faults remain: they are told. 1 where nothing could be scored, since there is no
    result then.

    Raises ConfigError, DataError, ToolUnavailable, ModelError and CheckpointError before anything is written,
    and EngineFault or ModelError when an endpoint or a judge stopped the play; what was played by then is
    kept.
    """
    if folder.exists() and (
        not folder.is_dir() or (any(folder.iterdir()) and not (folder / RESULTS).exists())
    ):
        raise ConfigError(f"{folder} is not empty and holds no evaluation of tasks")
    start_time = time.monotonic()
    rollout_status = RolloutStatus()
    display = WatchedProgress(
        make_progress(progress), rollout_status=rollout_status, after_s=settings.watchdog_s
    )
    try:
        display.stage(SET_UP, None)
        for line in _differences(settings):
            display.note(line)
        report, notes = run_evaluation(settings, folder, display=display, rollout_status=rollout_status)
    finally:
        display.close()
    Terminal().print(report.table())
    print_lines(*report.lines(), *notes, f"{time.monotonic() - start_time:.1f} s; {folder / SUMMARY}")
    if not report.summary.num_scored:
        print_lines(
            "outrider: no sample could be scored; once the cause is gone, the same command tries again",
            to_stderr=True,
        )
        return 1
    return 0


def _differences(settings: EvalTasksSettings) -> list[str]:
    """One line if the model is a run that was trained with another prompt, other limits or other tools."""
    if settings.model is None:
        return []
    tools = settings.environment if settings.tools != "off" else None
    environment = None if tools is None else tools.model_dump(mode="json")
    return differences(settings.model.name, environment, settings.rollout.model_dump(mode="json"))


def run_evaluation(
    settings: EvalTasksSettings,
    folder: Path,
    *,
    display: Progress,
    rollout_status: RolloutStatus | None = None,
) -> tuple[EvalTasksReport, list[str]]:
    """The evaluation itself: its report, and notes about the play that are none of its results. Raises as
    above.

    ``rollout_status`` is told where the rollouts are.
    """
    judge = None if settings.judge is None else discover_judge(settings.judge)
    if settings.judge is not None and judge is not None:
        settings = settings.model_copy(update={"judge": judge.settings})
    setup = open_eval_tasks(settings)
    meter = TokenMeter(display)
    try:
        player = make_player(settings, on_tokens=meter, note=display.note)
        player.rollout_status = rollout_status or player.rollout_status
        grader = Grader(
            rules=find_variant(settings.rules), kind=setup.kind, scorer=setup.scorer, tools=setup.tools,
            judge=judge, max_faults_in_a_row=settings.max_faults_in_a_row,
        )  # fmt: skip
        store = EvalTasksStore.open(folder / RESULTS, identity={**setup.identity, **player.identity})
        try:
            write_settings(settings, folder)
            play_eval_tasks(
                setup, player, grader, store, num_samples=settings.num_samples, display=display, meter=meter,
                num_parallel=settings.num_concurrent,
            )  # fmt: skip
            report = make_report(settings, setup, player, store)
        except EngineFault as fault:
            raise EngineFault(f"{fault}. What was played is kept, and the same command continues") from fault
        finally:
            store.close()
    finally:
        setup.factory.close()
    _write(folder / SUMMARY, report)
    return report, player.notes()


def play_eval_tasks(
    setup: EvalSetup,
    player: Player,
    grader: Grader,
    store: EvalTasksStore,
    *,
    num_samples: int,
    display: Progress,
    meter: TokenMeter | None = None,
    num_parallel: int = 1,
) -> None:
    """Judge the answers whose judge had failed, then play what is missing or faulty, ``num_parallel`` at a
    time.

    ``meter`` shows the player's tokens.
    """
    recorder = _Recorder(
        setup=setup,
        grader=grader,
        store=store,
        display=display,
        num_samples=num_samples,
        num_parallel=num_parallel,
    )
    recorder.begin()
    if meter is not None:
        meter.num_done = lambda: recorder.num_done
    recorder.judge_again()
    player.play(setup, store, recorder.record)


def make_report(
    settings: EvalTasksSettings, setup: EvalSetup, player: Player, store: EvalTasksStore
) -> EvalTasksReport:
    """Report of the panel's results on file, without an earlier call's samples beyond ``num_samples``."""
    return build_report(
        settings,
        setup.eval_tasks,
        scorer=setup.scorer,
        identity={**setup.identity, **player.identity},
        results=store.results,
    )


@dataclass(slots=True, kw_only=True)
class _Recorder:
    """Grades rollouts, stores their results and shows how far it is; its methods may be called from several
    threads.
    """

    setup: EvalSetup
    grader: Grader
    store: EvalTasksStore
    display: Progress
    num_samples: int
    num_parallel: int
    num_done: int = 0
    _num_faults: int = 0
    _lock: Lock = field(default_factory=Lock)

    def begin(self) -> None:
        """Show what is on file."""
        results = requested_samples(self.store.results, self.num_samples)
        self.num_done = sum(not result.outcome.is_fault for result in results)
        total = len(self.setup.tasks) * self.num_samples
        self.display.stage("evaluate", total, done=self.num_done, num_parallel=self.num_parallel)
        self.display.advance(self.num_done)

    def judge_again(self) -> None:
        """Ask the judge about answers that wait for it; each verdict is stored as it comes."""
        tasks = {task.key: task for task in self.setup.tasks}
        waiting = requested_samples(self.store.unjudged, self.num_samples)
        with ThreadPoolExecutor(max_workers=_MAX_JUDGES) as pool:
            for judged in pool.map(
                lambda answer: self.grader.judge_answer(tasks[answer.task_key], answer), waiting
            ):
                self._add([judged])
        self.grader.check()

    def record(self, rollouts: Sequence[FinishedRollout]) -> None:
        """Grade and store. Raises EngineFault once the judge is dead; what was graded is stored by then."""
        if self.setup.scorer == "judge":
            with ThreadPoolExecutor(max_workers=_MAX_JUDGES) as pool:
                self._add(list(pool.map(self.grader.grade, rollouts)))
        else:
            self._add([self.grader.grade(rollout) for rollout in rollouts])
        self.grader.check()

    def _add(self, results: Sequence[SampleResult]) -> None:
        with self._lock:
            for result in results:
                self.store.add(result)
                self.num_done += not result.outcome.is_fault
                self._num_faults += result.outcome.is_fault
            faults = {"faults": self._num_faults} if self._num_faults else {}
            self.display.advance(self.num_done, **faults)


def _write(path: Path, report: EvalTasksReport) -> None:
    replace_file(
        path, (json.dumps(report.as_json(), indent=1, sort_keys=True, allow_nan=False) + "\n").encode()
    )
