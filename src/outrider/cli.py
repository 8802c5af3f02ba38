"""The command line. Heavy imports wait until a command needs them; every expected error is one line on
stderr.
"""

import argparse
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event
from typing import Final

from outrider import __version__
from outrider.config import Settings, load_settings
from outrider.errors import ConfigError, OutriderError
from outrider.plugins.names import KINDS
from outrider.printing import one_line
from outrider.stopping import first_signal_asks, second_signal_ends

Command = Callable[[argparse.Namespace], int]


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0 done, 1 the run failed for a named reason, 2 bad configuration, 130 interrupted, 143
    ended by a second signal that was SIGTERM."""
    # Before torch loads OpenMP. Spinning without end starves a tool, an embedder or a simulator beside torch;
    # not spinning at all halves the speed of generation (docs/benchmarks.md).
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # deterministic matrix products on a GPU
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    parsed = None
    try:
        parsed = _parsed(arguments)
        command: Command = parsed.command
        with second_signal_ends(_how_to_go_on(parsed)):
            return command(parsed)
    except ConfigError as error:
        _say(f"outrider: {error}")
        return 2
    except OutriderError as error:
        _say(f"outrider: {error}")
        return 1
    except OSError as error:  # a full disk, a folder without permission
        _say(f"outrider: {error.strerror or error}{f': {error.filename}' if error.filename else ''}")
        return 1
    except KeyboardInterrupt:
        print(f"outrider: interrupted{_how_to_go_on(parsed) if parsed is not None else ''}", file=sys.stderr)
        return 130


def _parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Ends the process with status 2 for arguments that no command takes."""
    parser = _parser()
    parsed, rest = parser.parse_known_args(arguments)
    if rest and (
        not all("=" in item and not item.startswith("-") for item in rest) or "overrides" not in parsed
    ):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:  # argparse takes positionals in one run only; overrides may stand anywhere
        parsed.overrides = [*parsed.overrides, *rest]
    return parsed


def _how_to_go_on(parsed: argparse.Namespace) -> str:
    """The end of the line about an interruption; empty where the command does not go on."""
    told: str = parsed.interrupted
    run = vars(parsed).get("resume") or vars(parsed).get("run")
    return told.replace("{run}", shlex.quote(str(run or "RUN")))


def _say(text: str) -> None:
    """An error may quote a file, a server or a model: no line break or terminal escape of theirs gets
    through.
    """
    print(one_line(text).encode("utf-8", "replace").decode("utf-8"), file=sys.stderr)


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="outrider", description="Train LLM agents to explore.")
    parser.add_argument("--version", action="version", version=__version__)
    parser.set_defaults(interrupted="")  # how to go on after Ctrl-C, where that is possible
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    train = commands.add_parser("train", help="train from a recipe, or continue a run")
    train.add_argument("recipe", nargs="?", type=Path, help="TOML file")
    train.add_argument("overrides", nargs="*", help="section.key=value; with --resume those that may grow")
    train.add_argument("--run", type=Path, help="new run directory")
    train.add_argument("--resume", type=Path, metavar="RUN", help="continue this run directory")
    train.add_argument("--model", help="short for model.name=...")
    train.add_argument(
        "--changed-plugins",
        action="store_true",
        help="with --resume: although the code of a plug-in is another one",
    )
    train.add_argument("--progress", choices=("auto", "rich", "plain", "none"), default="auto")
    train.add_argument("--dry-run", action="store_true", help="print the resolved configuration and stop")
    train.set_defaults(command=_train, interrupted="; continue with: outrider train --resume {run}")

    _add_eval(commands)
    _add_buffer(commands)
    view = commands.add_parser("view", help="write report.html of a run")
    view.add_argument("run", type=Path)
    view.set_defaults(command=_view)
    replay = commands.add_parser(
        "replay", help="play a recorded training step's rollouts again, without a model"
    )
    replay.add_argument("run", type=Path)
    replay.add_argument("--step", type=int, required=True)
    replay.set_defaults(command=_replay)
    compare = commands.add_parser(
        "compare", help="compare runs over seeds: scores with intervals, tests, curves at equal cost"
    )
    compare.add_argument(
        "runs",
        nargs="+",
        type=Path,
        metavar="RUN",
        help="run directories, the seeds of two configurations or more",
    )
    compare.add_argument(
        "--markdown", type=Path, metavar="FILE", help="the tables, verdicts and notes as Markdown too"
    )
    compare.add_argument(
        "--html", type=Path, metavar="FILE", help="the same as one page, with the figures of the curves"
    )
    compare.set_defaults(command=_compare)
    _add_packs(commands)
    doctor = commands.add_parser("doctor", help="what works on this machine")
    doctor.set_defaults(command=_doctor)
    listed = commands.add_parser("list", help="every plug-in, where it comes from, and what it is")
    listed.add_argument("kind", nargs="?", choices=KINDS, help="only this kind")
    listed.set_defaults(command=_list)
    new = commands.add_parser("new", help="a small package with a plug-in of your own, its test and a recipe")
    new.add_argument("kind", choices=("environment", "tool", "algorithm"))
    new.add_argument("name", help="of the plug-in and, with _ for -, of its package")
    new.add_argument("--folder", type=Path, help="where (default: NAME in the current folder)")
    new.set_defaults(command=_new)
    init = commands.add_parser("init", help="write a commented recipe to start from")
    init.add_argument("file", type=Path)
    init.set_defaults(command=_init)
    return parser


def _add_packs(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    pack = commands.add_parser("pack", help="runs as a folder that anybody can verify (docs/packs.md)")
    pack.add_argument(
        "runs",
        nargs="+",
        type=Path,
        metavar="RUN",
        help="run directories, or files or folders of exact results",
    )
    pack.add_argument("--out", type=Path, required=True, metavar="PACK", help="new folder")
    pack.add_argument(
        "--command", action="append", default=[], dest="commands", metavar="TEXT", help="what made the runs"
    )
    pack.add_argument("--weights", action="store_true", help="with the weights at the end of each training")
    pack.set_defaults(command=_pack)
    verify = commands.add_parser(
        "verify", help="check a pack: its files, its tables, its panels, and one row played again"
    )
    verify.add_argument("pack", type=Path)
    verify.add_argument(
        "overrides", nargs="*", metavar="key=PATH", help="files that its recipes name and it does not hold"
    )
    which = verify.add_mutually_exclusive_group()
    which.add_argument("--replay", metavar="ROW", help="the row to play again (default: the cheapest)")
    which.add_argument(
        "--no-replay", action="store_true", help="play nothing again; needs neither torch nor a model"
    )
    verify.add_argument("--run", type=Path, metavar="DIRECTORY", help="new folder that keeps what is played")
    verify.add_argument("--progress", choices=("auto", "rich", "plain", "none"), default="auto")
    verify.set_defaults(command=_verify)


def _add_eval(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    evaluate = commands.add_parser(
        "eval", help="evaluate on a recipe's held-out panel, or on named task sets"
    )
    evaluate.add_argument("recipe", nargs="?", help="TOML file; none with --tasks")
    evaluate.add_argument("overrides", nargs="*", help="section.key=value")
    evaluate.add_argument("--run", type=Path, help="new run directory; with --tasks also one to continue")
    evaluate.add_argument("--dry-run", action="store_true", help="print the resolved configuration and stop")
    evaluate.add_argument("--checkpoint", type=Path, help="weights of a training run")
    evaluate.add_argument(
        "--adapt", type=_positive, metavar="K", help="K trials with a memory and no change of weights"
    )
    evaluate.add_argument(
        "--method", choices=("tips", "reflexion"), default="tips", help="what --adapt remembers"
    )
    evaluate.add_argument(
        "--model", help="short for model.name=...; with --tasks also a run directory or a checkpoint in one"
    )
    evaluate.add_argument("--progress", choices=("auto", "rich", "plain", "none"), default="auto")
    tasks = evaluate.add_argument_group("task sets", "docs/evaluation.md")
    tasks.add_argument("--tasks", metavar="NAME[=FILE]", help="task set, file of questions, or environment")
    tasks.add_argument(
        "--regrade",
        type=Path,
        metavar="RUN",
        help="grade the kept replies of this directory again; plays nothing",
    )
    tasks.add_argument("--endpoint", metavar="URL", help="OpenAI-compatible base URL, in place of --model")
    tasks.add_argument("--endpoint-model", help="its name on the server (default: the first that is served)")
    tasks.add_argument("--limit", type=_positive, metavar="N", help="only the first tasks")
    tasks.add_argument("--samples", type=_positive, metavar="K", help="for pass@k and avg@k")
    tasks.add_argument("--temperature", type=float, help="0 is greedy")
    tasks.add_argument(
        "--tools", choices=("on", "off"), help="default: off for questions, on for environments"
    )
    tasks.add_argument("--corpus", type=Path, metavar="FILE", help="passages for the tool search")
    tasks.add_argument(
        "--rules",
        choices=("default", "arpo-train", "arpo-eval", "squad"),
        help="extraction and normalisation",
    )
    tasks.add_argument("--judge", metavar="URL", help="OpenAI-compatible base URL of a judge")
    tasks.add_argument("--judge-model", help="its name on the server (default: the first that is served)")
    tasks.add_argument("--seed", type=int, help="of the samples and the environments")
    evaluate.set_defaults(command=_eval)


def _add_buffer(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    buffer = commands.add_parser("buffer", help="step-trace buffers").add_subparsers(
        required=True, metavar="ACTION"
    )
    build = buffer.add_parser(
        "build", help="fill a buffer with expert or endpoint trajectories of a recipe's training tasks"
    )
    build.add_argument("recipe", type=Path)
    build.add_argument("overrides", nargs="*")
    build.add_argument("--out", type=Path, required=True)
    build.add_argument(
        "--endpoint",
        help="OpenAI-compatible base URL of an off-policy agent (default: the environment's expert)",
    )
    build.add_argument("--endpoint-model", default="default")
    build.add_argument("--num-trajectories", type=int, default=16, help="per task, from an endpoint")
    build.set_defaults(command=_buffer_build, interrupted="; the same command continues")
    imported = buffer.add_parser("import", help="add chat trajectories from JSONL or Parquet")
    imported.add_argument("file", type=Path)
    imported.add_argument("--out", type=Path, required=True)
    imported.add_argument("--embedder", default="minilm")
    imported.add_argument("--keep-best", type=int, default=5)
    imported.add_argument("--min-reward", type=float)
    imported.add_argument(
        "--skip-malformed", action="store_true", help="count malformed lines instead of stopping at the first"
    )
    imported.set_defaults(command=_buffer_import, interrupted="; the same command continues")
    shown = (
        ("stats", _buffer_stats, "what a buffer holds"),
        ("query", _buffer_query, "the steps that a rollout with this history would get"),
    )
    for name, command, meaning in shown:
        action = buffer.add_parser(name, help=meaning)
        action.add_argument("file", type=Path)
        action.add_argument("--embedder", default="minilm")
        if name == "query":
            action.add_argument("history")
            action.add_argument("-k", type=int, default=1)
        action.set_defaults(command=command)


def _compare(parsed: argparse.Namespace) -> int:
    from rich.console import Console

    from outrider.evals.compare.render import compare_runs

    return compare_runs(parsed.runs, markdown=parsed.markdown, html=parsed.html, console=Console())


def _pack(parsed: argparse.Namespace) -> int:
    from outrider.evals.pack.make import make_pack

    manifest = make_pack(parsed.runs, parsed.out, commands=parsed.commands, weights=parsed.weights)
    print(f"{parsed.out}: {len(manifest.files)} files; check it with: outrider verify {parsed.out}")
    return 0


def _verify(parsed: argparse.Namespace) -> int:
    from rich.console import Console

    from outrider.evals.pack.verify import show, verify

    if wrong := [item for item in parsed.overrides if not all(item.partition("="))]:
        raise ConfigError(f"{wrong[0]!r} is not of the form section.key=PATH")
    given = {key: Path(path) for key, _, path in (item.partition("=") for item in parsed.overrides)}
    verified = verify(parsed.pack, given=given)
    show(parsed.pack, verified, Console())
    if parsed.no_replay:
        return 0
    from outrider.evals.pack.replay import replay_row

    with TemporaryDirectory() as folder:
        chosen = {"folder": parsed.run or Path(folder), "given": given, "progress": parsed.progress}
        print(replay_row(parsed.pack, verified, parsed.replay, **chosen))
    return 0


def _overrides(parsed: argparse.Namespace) -> list[str]:
    return [*parsed.overrides, *([f"model.name={parsed.model}"] if parsed.model else [])]


def _train(parsed: argparse.Namespace) -> int:
    from outrider import api

    # no recipe, but the first override in its place
    if parsed.resume is not None and "=" in str(parsed.recipe or ""):
        parsed.recipe, parsed.overrides = None, [str(parsed.recipe), *parsed.overrides]
    if parsed.resume is not None and parsed.recipe is None and (parsed.run or parsed.model):
        raise ConfigError("a resumed run keeps its model and its directory")
    if parsed.changed_plugins and parsed.resume is None:
        raise ConfigError("--changed-plugins goes with --resume RUN")
    if parsed.dry_run and parsed.resume is not None and parsed.recipe is None:
        from outrider.train.state.growing import grown_settings

        grown = grown_settings(parsed.resume / "config.toml", parsed.overrides)
        return _show(grown, None, parsed.overrides, others="run")
    if parsed.dry_run and parsed.recipe is not None and parsed.resume is None:
        return _show(
            api.run_settings(parsed.recipe, overrides=_overrides(parsed)), parsed.recipe, _overrides(parsed)
        )
    return _stoppable(
        lambda stop: api.train(
            parsed.recipe,
            run=parsed.run,
            resume=parsed.resume,
            overrides=_overrides(parsed),
            progress=parsed.progress,
            changed_plugins=parsed.changed_plugins,
            on_start=stop,
        )
    )


def _show(
    settings: Settings, recipe: Path | None, overrides: Sequence[str], *, others: str = "derived"
) -> int:
    """The resolved configuration, which :func:`load_settings` reads back."""
    from outrider.resolved import given_by, leaves, show
    from outrider.train.state.same_settings import UNSEEN

    print(show(leaves(settings, given=given_by(recipe, overrides), unseen=UNSEEN, others=others)))
    return 0


def _stoppable(run: Callable[[Callable[[Callable[[], bool]], None]], object]) -> int:
    """The first SIGTERM or Ctrl-C asks the trainer to write a checkpoint of what is finished and leave. Exit
    status as of ``main``."""
    with ExitStack() as installed:
        interruptions: list[Event] = []
        run(
            lambda request_stop: interruptions.append(
                installed.enter_context(first_signal_asks(request_stop))
            )
        )
    return 130 if any(one.is_set() for one in interruptions) else 0


_TASK_FLAGS: Final = {  # of `eval`: what each is short for
    "tasks": "tasks", "model": "model.name", "checkpoint": "model.initial_checkpoint", "endpoint": "endpoint.base_url",
    "endpoint_model": "endpoint.model", "limit": "limit", "samples": "num_samples", "temperature": "temperature",
    "tools": "tools", "corpus": "environment.corpus", "rules": "rules", "judge": "judge.endpoint.base_url",
    "judge_model": "judge.endpoint.model", "seed": "seed",
}  # fmt: skip
_ONLY_WITH_TASKS: Final = tuple(name for name in _TASK_FLAGS if name not in ("tasks", "model", "checkpoint"))


def _eval(parsed: argparse.Namespace) -> int:
    is_without_recipe = parsed.tasks is not None or parsed.regrade is not None
    if is_without_recipe and "=" in (parsed.recipe or ""):  # the first override stands in the recipe's place
        parsed.recipe, parsed.overrides = None, [parsed.recipe, *parsed.overrides]
    given = [name for name in _ONLY_WITH_TASKS if vars(parsed)[name] is not None]
    if parsed.regrade is not None:
        return _regrade(parsed)
    if parsed.tasks is not None:
        return _eval_tasks(parsed)
    if given:
        raise ConfigError(
            f"--{given[0].replace('_', '-')} goes with --tasks NAME; a recipe has settings of its own"
        )
    if parsed.recipe is None:
        raise ConfigError("give a recipe, or --tasks NAME")
    return _eval_recipe(parsed)


def _eval_tasks(parsed: argparse.Namespace) -> int:
    from outrider.evals.benchmark.settings import PanelSettings, environment_names, is_environment
    from outrider.evals.benchmark.task_sets import find_task_set

    if parsed.recipe is not None or parsed.adapt is not None:
        raise ConfigError("--tasks goes with neither a recipe nor --adapt")
    settings = load_settings(PanelSettings, file=None, overrides=[*parsed.overrides, *_short(parsed)])
    if not is_environment(settings.tasks):
        find_task_set(settings.tasks, others=environment_names())
    if parsed.dry_run:
        return _show(settings, None, [*parsed.overrides, *_short(parsed)])
    from outrider import api

    parsed.interrupted = "; the same command continues"
    return api.evaluate_tasks(settings, run=parsed.run, progress=parsed.progress)


def _short(parsed: argparse.Namespace) -> list[str]:
    return [
        f"{key}={vars(parsed)[name]}" for name, key in _TASK_FLAGS.items() if vars(parsed)[name] is not None
    ]


def _regrade(parsed: argparse.Namespace) -> int:
    from outrider.evals.benchmark.regrade import regrade_replies

    if parsed.recipe is not None or parsed.adapt is not None or parsed.run is not None or parsed.dry_run:
        raise ConfigError(
            "--regrade RUN goes with neither a recipe nor --run, --adapt or --dry-run: it plays nothing"
        )
    return regrade_replies(parsed.regrade, [*parsed.overrides, *_short(parsed)])


def _eval_recipe(parsed: argparse.Namespace) -> int:
    from outrider import api

    if parsed.method != "tips" and parsed.adapt is None:
        raise ConfigError("--method goes with --adapt K")
    chosen = {
        "overrides": _overrides(parsed),
        "checkpoint": parsed.checkpoint,
        "num_trials": parsed.adapt,
        "method": parsed.method,
    }
    if parsed.dry_run:
        settings = api.evaluation_settings(parsed.recipe, **chosen)
        return _show(settings, Path(parsed.recipe), chosen["overrides"], others="command")
    api.evaluate(parsed.recipe, run=parsed.run, progress=parsed.progress, **chosen)
    return 0


def _buffer_build(parsed: argparse.Namespace) -> int:
    from outrider.train.settings import RunSettings

    if parsed.endpoint is None and parsed.endpoint_model != "default":
        raise ConfigError("--endpoint-model goes with --endpoint URL")
    settings = load_settings(RunSettings, file=parsed.recipe, overrides=parsed.overrides)
    from outrider.train.data.buffer_commands import build_buffer

    return build_buffer(
        settings,
        out=parsed.out,
        endpoint=parsed.endpoint,
        endpoint_model=parsed.endpoint_model,
        num_trajectories=parsed.num_trajectories,
    )


def _buffer_import(parsed: argparse.Namespace) -> int:
    from outrider.train.data.buffer_commands import import_trajectories

    return import_trajectories(
        parsed.file,
        out=parsed.out,
        embedder=parsed.embedder,
        keep_best=parsed.keep_best,
        min_reward=parsed.min_reward,
        skip_malformed=parsed.skip_malformed,
    )


def _buffer_stats(parsed: argparse.Namespace) -> int:
    from outrider.train.data.buffer_commands import print_stats

    return print_stats(parsed.file, embedder=parsed.embedder)


def _buffer_query(parsed: argparse.Namespace) -> int:
    from outrider.train.data.buffer_commands import print_hits

    return print_hits(parsed.file, embedder=parsed.embedder, history=parsed.history, k=parsed.k)


def _view(parsed: argparse.Namespace) -> int:
    from outrider.watch.report import write_report

    print(write_report(parsed.run))
    return 0


def _replay(parsed: argparse.Namespace) -> int:
    from outrider.train.replay import replay_step

    return replay_step(parsed.run, parsed.step)


def _doctor(parsed: argparse.Namespace) -> int:
    from outrider.train.machine.doctor import examine

    return examine()


def _list(parsed: argparse.Namespace) -> int:
    from outrider.plugins.listing import print_plugins

    return print_plugins([parsed.kind] if parsed.kind else KINDS)


def _new(parsed: argparse.Namespace) -> int:
    from outrider.scaffold import write_package

    return write_package(parsed.kind, parsed.name, parsed.folder)


def _init(parsed: argparse.Namespace) -> int:
    from outrider.train.machine.doctor import write_recipe

    return write_recipe(parsed.file)
