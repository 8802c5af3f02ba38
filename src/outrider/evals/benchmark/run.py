"""``outrider eval --tasks``: play a panel, grade it, keep every result, and say what came out.

A folder holds one evaluation: ``results.jsonl`` (:class:`~outrider.evals.benchmark.store.PanelStore`) and
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
from outrider.environments.tool_qa.judge import found_judge
from outrider.errors import ConfigError, EngineFault
from outrider.evals.benchmark.extraction import find_variant
from outrider.evals.benchmark.grades import Grader, Played
from outrider.evals.benchmark.players import Player, make_player
from outrider.evals.benchmark.report import report_of, wanted
from outrider.evals.benchmark.scores import SampleResult
from outrider.evals.benchmark.settings import PanelSettings, keep_settings
from outrider.evals.benchmark.store import RESULTS, SUMMARY, PanelStore
from outrider.evals.benchmark.table import PanelReport
from outrider.evals.benchmark.tasks import PlayedPanel, open_panel
from outrider.evals.benchmark.trained import differences
from outrider.printing import say
from outrider.rollout.whereabouts import Whereabouts
from outrider.terminal import Terminal
from outrider.watch.progress import SET_UP, Progress, make_progress
from outrider.watch.token_meter import TokenMeter
from outrider.watch.watchdog import WatchedProgress

_MAX_JUDGES = 8  # that are asked at a time, for one batch of a model's answers


def evaluate_tasks(
    settings: PanelSettings, folder: Path, *, progress: Literal["auto", "rich", "plain", "none"] = "auto"
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
    began = time.monotonic()
    whereabouts = Whereabouts()
    display = WatchedProgress(make_progress(progress), whereabouts=whereabouts, after_s=settings.watchdog_s)
    try:
        display.stage(SET_UP, None)
        for line in _differences(settings):
            display.note(line)
        report, notes = run_panel(settings, folder, display=display, whereabouts=whereabouts)
    finally:
        display.close()
    Terminal().print(report.table())
    say(*report.lines(), *notes, f"{time.monotonic() - began:.1f} s; {folder / SUMMARY}")
    if not report.summary.num_scored:
        say(
            "outrider: no sample could be scored; once the cause is gone, the same command tries again",
            to_stderr=True,
        )
        return 1
    return 0


def _differences(settings: PanelSettings) -> list[str]:
    """One line if the model is a run that was trained with another prompt, other limits or other tools."""
    if settings.model is None:
        return []
    tools = settings.environment if settings.tools != "off" else None
    environment = None if tools is None else tools.model_dump(mode="json")
    return differences(settings.model.name, environment, settings.rollout.model_dump(mode="json"))


def run_panel(
    settings: PanelSettings, folder: Path, *, display: Progress, whereabouts: Whereabouts | None = None
) -> tuple[PanelReport, list[str]]:
    """The evaluation itself: its report, and notes about the play that are none of its results. Raises as
    above.

    ``whereabouts`` is told where the rollouts are.
    """
    judge = None if settings.judge is None else found_judge(settings.judge)
    if settings.judge is not None and judge is not None:
        settings = settings.model_copy(update={"judge": judge.settings})
    panel = open_panel(settings)
    meter = TokenMeter(display)
    try:
        player = make_player(settings, on_tokens=meter, note=display.note)
        player.whereabouts = whereabouts or player.whereabouts
        grader = Grader(
            rules=find_variant(settings.rules), kind=panel.kind, scorer=panel.scorer, tools=panel.tools,
            judge=judge, max_faults_in_a_row=settings.max_faults_in_a_row,
        )  # fmt: skip
        store = PanelStore.open(folder / RESULTS, identity={**panel.identity, **player.identity})
        try:
            keep_settings(settings, folder)
            play_panel(
                panel, player, grader, store, num_samples=settings.num_samples, display=display, meter=meter,
                num_parallel=settings.num_concurrent,
            )  # fmt: skip
            report = make_report(settings, panel, player, store)
        except EngineFault as fault:
            raise EngineFault(f"{fault}. What was played is kept, and the same command continues") from fault
        finally:
            store.close()
    finally:
        panel.factory.close()
    _write(folder / SUMMARY, report)
    return report, player.notes()


def play_panel(
    panel: PlayedPanel,
    player: Player,
    grader: Grader,
    store: PanelStore,
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
        panel=panel,
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
    player.play(panel, store, recorder.record)


def make_report(
    settings: PanelSettings, panel: PlayedPanel, player: Player, store: PanelStore
) -> PanelReport:
    """Report of the panel's results on file, without an earlier call's samples beyond ``num_samples``."""
    return report_of(
        settings,
        panel.panel,
        scorer=panel.scorer,
        identity={**panel.identity, **player.identity},
        results=store.results,
    )


@dataclass(slots=True, kw_only=True)
class _Recorder:
    """Grades rollouts, stores their results and shows how far it is; its methods may be called from several
    threads.
    """

    panel: PlayedPanel
    grader: Grader
    store: PanelStore
    display: Progress
    num_samples: int
    num_parallel: int
    num_done: int = 0
    _num_faults: int = 0
    _lock: Lock = field(default_factory=Lock)

    def begin(self) -> None:
        """Show what is on file."""
        results = wanted(self.store.results, self.num_samples)
        self.num_done = sum(not result.outcome.is_fault for result in results)
        num_owed = len(self.panel.tasks) * self.num_samples
        self.display.stage("evaluate", num_owed, done=self.num_done, num_parallel=self.num_parallel)
        self.display.advance(self.num_done)

    def judge_again(self) -> None:
        """Ask the judge about answers that wait for it; each verdict is stored as it comes."""
        tasks = {task.key: task for task in self.panel.tasks}
        waiting = wanted(self.store.unjudged, self.num_samples)
        with ThreadPoolExecutor(max_workers=_MAX_JUDGES) as pool:
            for judged in pool.map(
                lambda answer: self.grader.judge_answer(tasks[answer.task_key], answer), waiting
            ):
                self._add([judged])
        self.grader.check()

    def record(self, played: Sequence[Played]) -> None:
        """Grade and store. Raises EngineFault once the judge is dead; what was graded is stored by then."""
        if self.panel.scorer == "judge":
            with ThreadPoolExecutor(max_workers=_MAX_JUDGES) as pool:
                self._add(list(pool.map(self.grader.grade, played)))
        else:
            self._add([self.grader.grade(one) for one in played])
        self.grader.check()

    def _add(self, results: Sequence[SampleResult]) -> None:
        with self._lock:
            for result in results:
                self.store.add(result)
                self.num_done += not result.outcome.is_fault
                self._num_faults += result.outcome.is_fault
            faults = {"faults": self._num_faults} if self._num_faults else {}
            self.display.advance(self.num_done, **faults)


def _write(path: Path, report: PanelReport) -> None:
    replace_file(
        path, (json.dumps(report.as_json(), indent=1, sort_keys=True, allow_nan=False) + "\n").encode()
    )
