"""From settings to a finished run: build the parts, train, write the report whatever happened."""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from threading import Event
from typing import Literal

from outrider.errors import ConfigError
from outrider.plugins.record import write_origins
from outrider.rollout.whereabouts import RolloutStatus
from outrider.train.building import build
from outrider.train.cluster_restarts import Allowance, run_with_restarts
from outrider.train.models import StartLearner, StartRemote, local_learner
from outrider.train.settings import RunSettings
from outrider.train.state.checkpoint import newest_step
from outrider.train.state.continuing import require_continuable
from outrider.train.state.run_directory import RunDirectory
from outrider.train.trainer import Trainer
from outrider.watch.progress import SET_UP, Progress, make_progress
from outrider.watch.recorded_progress import RecordedProgress
from outrider.watch.report import write_report
from outrider.watch.run_summary import summary_lines
from outrider.watch.token_meter import TokenMeter
from outrider.watch.trackers import make_trackers
from outrider.watch.watchdog import WatchedProgress


def run_training(
    opened: tuple[RunDirectory, RunSettings],
    *,
    progress: Literal["auto", "rich", "plain", "none"],
    on_start: Callable[[Callable[[], bool]], None],
    start_learner: StartLearner = local_learner,
    start_remote: StartRemote | None = None,
) -> None:
    """Run or continue; ``start_learner`` makes what learns, ``start_remote`` what plays in other processes. ``on_start``
    gets a function that asks the trainer to stop soon, and returns whether the display says so.

    Raises ConfigError for the folder of an adaptation, and what set-up and training raise; all that was
    opened is closed.
    """
    run, settings = opened
    stop = Event()
    displays: list[Progress] = []

    def request_stop() -> bool:
        stop.set()
        return bool(displays) and displays[0].stopping()

    on_start(request_stop)  # a request during set-up is honoured at its end
    with ExitStack() as cleanup:  # last in, first out; each is done even where another one fails
        cleanup.callback(run.release)
        # the set-up's failure, whatever it was: the same command works once the cause is gone
        cleanup.callback(run.roll_back)
        if settings.evaluation.num_trials:
            raise ConfigError(
                "evaluation.num_trials is for `outrider eval --adapt K`: training has no trials"
            )
        rollout_status = RolloutStatus()
        recorded_display = RecordedProgress(make_progress(progress), run.path)
        display = WatchedProgress(
            recorded_display, rollout_status=rollout_status, after_s=settings.train.watchdog_s
        )
        cleanup.callback(display.close)
        displays.append(display)

        allowance = Allowance(settings.cluster.max_restarts)
        start_with_allowance = None if start_remote is None else partial(start_remote, allowance=allowance)

        def begin(num_restarts: int, attempt_cleanup: ExitStack) -> Callable[[], None]:
            trainer = _set_up(
                run,
                settings,
                display,
                rollout_status,
                stop,
                attempt_cleanup,
                start_learner,
                start_with_allowance,
            )
            trainer.num_restarts = num_restarts
            if not num_restarts:
                _commit(run, settings)
                cleanup.callback(_log_results, run, display)
            return trainer.train

        run_with_restarts(begin, allowance=allowance, stop=stop, note=display.note)


def _set_up(
    run: RunDirectory,
    settings: RunSettings,
    display: Progress,
    rollout_status: RolloutStatus,
    stop: Event,
    cleanup: ExitStack,
    start_learner: StartLearner,
    start_remote: StartRemote | None,
) -> Trainer:
    """All parts of the run and its trainer; ``cleanup`` closes what was opened, last in, first out."""
    display.stage(SET_UP, None)
    meter = TokenMeter(display)
    newest = newest_step(run.checkpoints)
    for line in require_continuable(run, settings):
        display.note(line)
    parts = build(
        settings,
        buffer_path=run.path / "buffer.sqlite",
        resumed=newest is not None,
        on_tokens=meter,
        note=display.note,
        start_learner=start_learner,
        start_remote=start_remote,
    )
    cleanup.callback(parts.learner.close)
    if parts.remote is not None:
        cleanup.callback(parts.remote.close)
    parts.rollout_status = rollout_status
    if parts.buffer is not None:
        cleanup.callback(parts.buffer.close)
    cleanup.callback(parts.factory.close)
    config = settings.model_dump(mode="json")
    trackers = make_trackers(
        settings.trackers,
        run_dir=run.path,
        config=config,
        newest_step=newest,
        first_step=-settings.cold_start.max_steps,
        warn=display.note,
    )
    cleanup.callback(trackers.close)
    trainer = Trainer(run=run, parts=parts, progress=display, trackers=trackers, stop=stop)
    cleanup.callback(trainer.state.close)
    meter.num_done = lambda: trainer.num_done
    return trainer


def _commit(run: RunDirectory, settings: RunSettings) -> None:
    """The set-up has not failed: the folder stays."""
    write_origins(settings, run.path)  # where they are now: a run that goes on may find others
    run.commit()
    run.retain()


def _log_results(run: RunDirectory, display: Progress) -> None:
    """What was learned, its cost, and the report. What cannot be read or written is said: a run's own error
    must stay the one that is told.
    """
    try:
        for line in summary_lines(run.path):
            display.note(line)
        display.note(f"report: {write_report(run.path)}")
    except Exception as error:
        reason = error.strerror if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
        display.note(f"NO REPORT: {reason}; write it later with: outrider report {run.path}")
