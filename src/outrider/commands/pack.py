"""``outrider pack`` and ``outrider verify``."""

import argparse
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory

from outrider.commands import add_progress, describe
from outrider.errors import ConfigError
from outrider.printing import plural, print_lines, shell_command


def add_pack(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``pack``."""
    describe(
        parser,
        "Copy the results of runs into a folder with checksums and tables that others can verify.",
        "outrider pack runs/rapo-0 runs/grpo-0 --out results.pack",
    )
    parser.add_argument(
        "runs",
        nargs="+",
        type=Path,
        metavar="RUN",
        help="run directories, or files or folders of exact results",
    )
    parser.add_argument("--out", type=Path, required=True, metavar="PACK", help="new folder")
    parser.add_argument(
        "--command",
        action="append",
        default=[],
        dest="commands",
        metavar="TEXT",
        help="command that made the runs",
    )
    parser.add_argument(
        "--checkpoint-rule",
        metavar="TEXT",
        help="how evaluated checkpoints were chosen that are not the last of their trainings",
    )
    parser.add_argument("--weights", action="store_true", help="include the final weights of each training")
    parser.set_defaults(command=_pack)


def add_verify(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``verify``."""
    describe(
        parser,
        "Check a pack: its checksums, its tables, and one row that is run again.",
        "outrider verify results.pack",
        "outrider verify results.pack --no-replay",
    )
    parser.add_argument("pack", type=Path, help="folder written by outrider pack")
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="key=PATH",
        help="files that the recipes name and the pack lacks",
    )
    replay_group = parser.add_mutually_exclusive_group()
    replay_group.add_argument("--replay", metavar="ROW", help="the row to replay (default: the cheapest)")
    replay_group.add_argument(
        "--no-replay", action="store_true", help="replay nothing; needs neither torch nor a model"
    )
    parser.add_argument("--run", type=Path, metavar="DIRECTORY", help="new folder for the replayed run")
    add_progress(parser, has_json=False)
    parser.set_defaults(command=_verify)


def _pack(parsed: argparse.Namespace) -> int:
    from outrider.evaluation.packs import make_pack, score_lines
    from outrider.protocols import run_difference

    manifest = make_pack(
        parsed.runs,
        parsed.out,
        commands=parsed.commands,
        weights=parsed.weights,
        checkpoint_rule=parsed.checkpoint_rule,
    )
    print_lines(
        *score_lines(parsed.out),
        f"{parsed.out}: {plural(len(manifest.files), 'file')}; check it with: "
        f"{shell_command('verify', parsed.out)}",
    )
    for name in manifest.runs:
        record = parsed.out / "runs" / name / "config.toml"
        if record.is_file() and (difference := run_difference(record)) is not None:
            print_lines(name, *difference.lines())
    return 0


def _verify(parsed: argparse.Namespace) -> int:
    from outrider.evaluation.packs import CHECKSUM, verify
    from outrider.printing import FittedTable, Terminal

    if wrong := [item for item in parsed.overrides if not all(item.partition("="))]:
        raise ConfigError(f"{wrong[0]!r} is not of the form section.key=PATH")
    local_paths = {key: Path(path) for key, _, path in (item.partition("=") for item in parsed.overrides)}
    verified = verify(parsed.pack)
    tables, sha256 = verified.tables, (parsed.pack / CHECKSUM).read_text()
    counts = {"evaluations": "evaluations", "panels": "scores of task sets", "exact": "rows of exact returns",
              "costs": "runs' costs"}  # fmt: skip
    contents = ", ".join(f"{len(tables[key])} {name}" for key, name in counts.items() if tables[key])
    table = FittedTable("check", "result", title=f"{parsed.pack.name}, {sha256[:12]}")
    table.add_row("files", f"{len(verified.manifest.files)} unchanged, none missing, none added")
    table.add_row("tables", f"recomputed from the results, identical: {contents or 'empty'}")
    rules = Counter(run.checkpoint_rule or "not stated (format 1)" for run in verified.manifest.runs.values())
    if rules:
        table.add_row("checkpoints", "; ".join(f"{rule} ({num})" for rule, num in sorted(rules.items())))
    Terminal().print(table)
    if parsed.no_replay:
        return 0
    from outrider.evaluation.pack_replay import replay_row

    with TemporaryDirectory() as folder:
        result = replay_row(
            parsed.pack, verified, parsed.replay, folder=parsed.run or Path(folder), local_paths=local_paths,
            progress=parsed.progress,
        )  # fmt: skip
        print_lines(*result.split("\n"))
    return 0
