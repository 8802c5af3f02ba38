"""From settings to a finished run: build the parts, train, write the report whatever happened."""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from threading import Event
from typing import Literal

from outrider.errors import ConfigError
from outrider.plugins.record import write_origins
from outrider.rollout.whereabouts import Whereabouts
from outrider.train.building import build
from outrider.train.cluster_restarts import Allowance, restarted
from outrider.train.models import StartElsewhere, StartLearner, local_learner
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
    start: StartLearner = local_learner,
    spread: StartElsewhere | None = None,
) -> None:
    """Run or continue; ``start`` makes what learns, ``spread`` what plays in other processes. ``on_start``
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
    with ExitStack() as ending:  # last in, first out; each is done even where another one fails
        ending.callback(run.release)
        # the set-up's failure, whatever it was: the same command works once the cause is gone
        ending.callback(run.discard)
        if settings.evaluation.num_trials:
            raise ConfigError(
                "evaluation.num_trials is for `outrider eval --adapt K`: training has no trials"
            )
        whereabouts = Whereabouts()
        shown = RecordedProgress(make_progress(progress), run.path)
        display = WatchedProgress(shown, whereabouts=whereabouts, after_s=settings.train.watchdog_s)
        ending.callback(display.close)
        displays.append(display)

        allowance = Allowance(settings.cluster.max_restarts)
        elsewhere = None if spread is None else partial(spread, allowance=allowance)

        def begin(num_restarts: int, closing: ExitStack) -> Callable[[], None]:
            trainer = _set_up(run, settings, display, whereabouts, stop, closing, start, elsewhere)
            trainer.num_restarts = num_restarts
            if not num_restarts:
                _settle(run, settings)
                ending.callback(_tell_results, run, display)
            return trainer.train

        restarted(begin, allowance=allowance, stop=stop, note=display.note)


def _set_up(
    run: RunDirectory,
    settings: RunSettings,
    display: Progress,
    whereabouts: Whereabouts,
    stop: Event,
    ending: ExitStack,
    start: StartLearner,
    spread: StartElsewhere | None,
) -> Trainer:
    """All parts of the run and its trainer; ``ending`` closes what was opened, last in, first out."""
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
        start=start,
        spread=spread,
    )
    ending.callback(parts.learner.close)
    if parts.elsewhere is not None:
        ending.callback(parts.elsewhere.close)
    parts.whereabouts = whereabouts
    if parts.buffer is not None:
        ending.callback(parts.buffer.close)
    ending.callback(parts.factory.close)
    config = settings.model_dump(mode="json")
    trackers = make_trackers(
        settings.trackers,
        run_dir=run.path,
        config=config,
        newest_step=newest,
        first_step=-settings.cold_start.max_steps,
        warn=display.note,
    )
    ending.callback(trackers.close)
    trainer = Trainer(run=run, parts=parts, progress=display, trackers=trackers, stop=stop)
    ending.callback(trainer.state.close)
    meter.num_done = lambda: trainer.num_done
    return trainer


def _settle(run: RunDirectory, settings: RunSettings) -> None:
    """The set-up has not failed: the folder stays."""
    write_origins(settings, run.path)  # where they are now: a run that goes on may find others
    run.settle()
    run.keep()


def _tell_results(run: RunDirectory, display: Progress) -> None:
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
