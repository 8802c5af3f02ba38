"""``outrider export`` and ``push``: the weights of a run, or data, for others."""

import argparse
from pathlib import Path

from outrider.commands import describe
from outrider.errors import ConfigError
from outrider.printing import print_lines


def add_export(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``export``."""
    describe(
        parser,
        "Write the weights of a run as a Hugging Face folder: adapters merged, with tokenizer and template.",
        "outrider export runs/demo --out demo-hf",
    )
    parser.add_argument("run", type=Path, help="run directory")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="new folder")
    _add_checkpoint(parser)
    parser.set_defaults(command=_export)


def add_push(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``push``."""
    describe(
        parser,
        "Upload the weights of a run, or a data set, with a card to the Hugging Face hub.",
        "outrider push runs/demo --repo me/demo --dry-run",
        "outrider push --dataset steps.sqlite --repo me/steps",
    )
    parser.add_argument("run", type=Path, nargs="?", help="run directory")
    parser.add_argument(
        "--dataset", type=Path, metavar="PATH",
        help="instead of a run: a buffer, trajectories (.jsonl, .parquet), or a run's folder traces",
    )  # fmt: skip
    parser.add_argument("--repo", required=True, metavar="OWNER/NAME", help="created if it does not exist")
    parser.add_argument("--private", action="store_true", help="make a new repository private")
    parser.add_argument("--dry-run", action="store_true", help="print the card and the files, send nothing")
    parser.set_defaults(command=_push)
    _add_checkpoint(parser)


def _add_checkpoint(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--checkpoint", type=int, metavar="STEP", help="the weights of this step (default: the newest)"
    )


def _export(parsed: argparse.Namespace) -> int:
    from outrider.training.export import export_run, find_checkpoint

    checkpoint = find_checkpoint(parsed.run, parsed.checkpoint)
    export_run(parsed.run, parsed.out, checkpoint=checkpoint, note=print_lines)
    print_lines(f"{parsed.out}: the weights of {checkpoint}")
    return 0


def _push(parsed: argparse.Namespace) -> int:
    if (parsed.run is None) == (parsed.dataset is None):
        raise ConfigError("push either a run or --dataset PATH")
    options = {"private": parsed.private, "dry_run": parsed.dry_run}
    if parsed.dataset is not None:
        from outrider.evaluation.hub import push_dataset

        if parsed.checkpoint is not None:
            raise ConfigError("--checkpoint is of a run; a data set has none")
        result = push_dataset(parsed.dataset, parsed.repo, **options)
    else:
        from outrider.evaluation.hub import push_run

        result = push_run(parsed.run, parsed.repo, step=parsed.checkpoint, **options)
    if parsed.dry_run:
        print_lines(*result.card.rstrip().splitlines())
    for name, size in result.files:
        print_lines(f"{name}: {size:,} bytes")
    print_lines(f"pushed to {result.url}" if result.url else f"nothing was sent to {parsed.repo}")
    return 0
