"""``outrider view``, ``watch`` and ``report``: runs in the browser, in a terminal, and as a self-contained
page that you can send to others.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from outrider.commands import describe
from outrider.errors import ConfigError
from outrider.printing import print_lines


def add_view(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``view``."""
    describe(
        parser,
        "Serve a page with curves, rollouts and comparisons of runs, and print its address (extra: view).",
        "outrider view runs",
        "outrider view runs/rapo runs/grpo --bundle comparison",
    )
    parser.add_argument(
        "runs", nargs="+", type=Path, metavar="RUN", help="run directories, or folders with run directories"
    )
    parser.add_argument("--port", type=int, default=0, help="port of the page (default: a free one)")
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        help="address to listen on; others than loopback require the printed token",
    )
    parser.add_argument("--open", action="store_true", help="also open the browser")
    parser.add_argument(
        "--bundle", type=Path, metavar="FOLDER", help="write the page into a new folder for a file server"
    )
    parser.set_defaults(command=_view)


def add_watch(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``watch``."""
    describe(
        parser,
        "Follow a run from another terminal until it ends. Ctrl-C ends only this command.",
        "outrider watch runs/demo",
        "outrider watch runs/demo --once",
    )
    parser.add_argument("run", type=Path, help="run directory")
    parser.add_argument("--once", action="store_true", help="print the current state and exit")
    parser.set_defaults(command=_watch)


def add_report(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``report``."""
    describe(
        parser,
        "Write report.html into a run directory: a self-contained page that needs no script and no server.",
        "outrider report runs/demo",
    )
    parser.add_argument("run", type=Path, help="run directory")
    parser.add_argument(
        "--protocol",
        metavar="NAME",
        help="compare with this protocol (default: that of the recipe)",
    )
    parser.set_defaults(command=_report)


def _view(parsed: argparse.Namespace) -> int:
    from outrider.viewer.answers import Catalogue

    catalogue = Catalogue(parsed.runs)
    if parsed.bundle is not None:
        from outrider.viewer.server import write_bundle

        write_bundle(catalogue, parsed.bundle, compare=_comparison_page, note=print_lines)
        print_lines(str(parsed.bundle / "index.html"))
        return 0
    try:
        from outrider.viewer.server import serve
    except ImportError as error:
        raise ConfigError(
            f"outrider view needs {error.name}: pip install 'outrider[view]'; outrider report RUN does not"
        ) from error
    serve(
        catalogue,
        compare=_comparison_page,
        host=parsed.host,
        port=parsed.port,
        opens=parsed.open,
        log=print_lines,
    )
    return 0


def _watch(parsed: argparse.Namespace) -> int:
    from outrider.commands.watch import follow
    from outrider.runs import Run

    return follow(Run.from_path(parsed.run).path, once=parsed.once)


def _comparison_page(runs: Sequence[Path]) -> str:
    """The page of ``outrider compare``."""
    from outrider.evaluation.compare import compare
    from outrider.evaluation.compare_report import html_page

    return html_page(compare(list(runs)))


def _report(parsed: argparse.Namespace) -> int:
    from outrider.protocols import run_difference
    from outrider.viewer.report import write_report

    require_run(parsed.run)
    print_lines(str(write_report(parsed.run, parsed.protocol)))
    record = parsed.run / "config.toml"
    if record.is_file() and (difference := run_difference(record, parsed.protocol)) is not None:
        print_lines(*difference.lines())
    return 0


def require_run(folder: Path) -> None:
    """Raises DataError for a folder that is no run directory."""
    from outrider.errors import DataError
    from outrider.viewer.run_reader import task_evaluation_message

    if refusal := task_evaluation_message(folder):
        raise DataError(refusal)
    if not any((folder / name).is_file() for name in ("config.toml", "metrics.jsonl")):
        raise DataError(f"{folder} is no run directory: it has no config.toml")
