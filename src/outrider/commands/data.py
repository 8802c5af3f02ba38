"""``outrider data``: list, download and check published data sets."""

import argparse
import shlex
import shutil
import sys
import textwrap
from pathlib import Path
from typing import Final

from rich.filesize import decimal
from rich.progress import DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from outrider.commands import describe
from outrider.downloads import (
    Check,
    DataFile,
    DataSet,
    FileState,
    check_commands,
    check_file,
    check_unpacked,
    data_sets,
    download,
    part_path,
    unpack,
)
from outrider.errors import ConfigError, DataError
from outrider.printing import Terminal, plural, print_lines

LARGE: Final = 1_000_000_000
"""Bytes from which ``get`` needs ``--yes``."""
_USABLE: Final = {FileState.OK, FileState.UNKNOWN}


def add_data(parser: argparse.ArgumentParser) -> None:
    """The actions and their arguments."""
    describe(parser, "Download published data sets and verify them.", "outrider data get alfworld")
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    listing = actions.add_parser("list", help="list the data sets: size, licence, purpose, what is there")
    describe(
        listing,
        "List the data sets, and which of their files are already downloaded.",
        "outrider data list",
    )
    listing.set_defaults(command=_list)
    getting = actions.add_parser("get", help="download a data set, or the rest of it")
    describe(
        getting,
        "Download a data set and verify it. Run it again to continue.",
        "outrider data get webshop-small",
    )
    getting.add_argument("name", choices=data_sets(), metavar="NAME", help=", ".join(data_sets()))
    getting.add_argument("--dir", type=Path, help="folder for the files (default: data/NAME)")
    getting.add_argument("--yes", action="store_true", help="confirm a download of more than 1 GB")
    getting.set_defaults(command=_get, interrupted="; the same command continues")
    checking = actions.add_parser("check", help="compare the files of a folder with their digests")
    describe(
        checking,
        "Compare the files of a folder with their known sizes and digests.",
        "outrider data check data/alfworld",
    )
    checking.add_argument("dir", type=Path, metavar="DIR", help="folder of downloaded files")
    checking.set_defaults(command=_check)


def default_folder(name: str) -> Path:
    """Return the folder to which a data set is downloaded by default."""
    return Path("data", name)


def _list(_: argparse.Namespace) -> int:
    for name, data_set in data_sets().items():
        print_lines(name)
        for label, text in (
            ("what", data_set.title),
            ("for", data_set.purpose),
            ("licence", data_set.licence),
            ("size", _format_size(data_set)),
            ("here", _describe_local(data_set, default_folder(name))),
        ):
            print_lines(*textwrap.wrap(text, 80, initial_indent=f"  {label:9}", subsequent_indent=" " * 11))
    print_lines("", "outrider data get NAME downloads a data set and verifies it.")
    return 0


def _format_size(data_set: DataSet) -> str:
    if not data_set.files:
        return "nothing to download"
    unpacked = f", about {decimal(data_set.unpacked_bytes)} unpacked" if data_set.unpacked_bytes else ""
    return f"{decimal(data_set.num_bytes)} in {plural(len(data_set.default_files), 'file')}{unpacked}"


def _describe_local(data_set: DataSet, folder: Path) -> str:
    """Count the files without reading them."""
    if not data_set.files:
        return "a Python package; outrider data get prints how to install it"
    num_files = sum((folder / file.name).is_file() for file in data_set.default_files)
    num_parts = sum(part_path(file, folder).is_file() for file in data_set.default_files)
    if not num_files and not num_parts:
        return "no"
    parts = f", {num_parts} incomplete" if num_parts else ""
    return f"{num_files} of {plural(len(data_set.default_files), 'file')} in {folder}{parts}"


def _get(parsed: argparse.Namespace) -> int:
    data_set = data_sets()[parsed.name]
    folder: Path = parsed.dir or default_folder(parsed.name)
    missing = []
    for file in data_set.default_files:
        state, detail = check_file(file, folder)
        if state is FileState.DIFFERS:
            raise DataError(f"{folder / file.name}: {detail}; remove it, or use another --dir")
        if state in _USABLE:
            print_lines(f"{folder / file.name}: exists ({state}: {detail})")
        else:
            missing.append(file)
    parts = [part_path(file, folder) for file in missing]
    size = sum(file.num_bytes for file in missing) - sum(
        part.stat().st_size for part in parts if part.is_file()
    )
    if size >= LARGE and not parsed.yes:
        raise ConfigError(f"{parsed.name} needs a download of {decimal(size)}: repeat the command with --yes")
    root = data_set.unpacked_folder
    _require_space(folder, size + (data_set.unpacked_bytes if root and not (folder / root).exists() else 0))
    for file in missing:
        digest = _download(file, folder)
        note = "verified" if file.sha256 else "could not be verified, because no digest of this file is known"
        print_lines(f"{folder / file.name}: {note}; SHA-256 {digest}")
    if root:
        archives = [folder / file.name for file in data_set.default_files]
        print_lines(f"{folder / root}: {unpack(archives, folder, root):,} files unpacked")
    commands = [command.replace("{dir}", shlex.quote(str(folder))) for command in data_set.after]
    print_lines("next:", *(f"  {command}" for command in commands))
    return 0


def _require_space(folder: Path, num_bytes: int) -> None:
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.is_dir())
    free = shutil.disk_usage(existing).free
    if num_bytes > free:
        raise DataError(f"{folder}: {decimal(num_bytes)} are needed, but only {decimal(free)} are free")


def _download(file: DataFile, folder: Path) -> str:
    """Download with a progress bar on a terminal, and one line otherwise."""
    if not sys.stderr.isatty():
        print_lines(f"{folder / file.name}: downloading {decimal(file.num_bytes)}")
        return download(file, folder)
    columns = (
        TextColumn("{task.description}"), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=Terminal(stderr=True), transient=True) as progress:
        task = progress.add_task(file.name, total=file.num_bytes)
        return download(file, folder, lambda size: progress.update(task, completed=size))


def _check(parsed: argparse.Namespace) -> int:
    folder: Path = parsed.dir
    if not folder.is_dir():
        raise DataError(f"{folder} {'is not a folder' if folder.exists() else 'does not exist'}")
    states = set()
    for name, data_set in data_sets().items():
        checks = _checks(data_set, folder)
        if all(state is FileState.MISSING for state, _ in checks.values()):
            continue
        for file, (state, detail) in checks.items():
            print_lines(f"{state:10}  {name}  {file}: {detail}")
            states.add(state)
    if not states:
        raise DataError(f"{folder} contains no file of a known data set (outrider data list)")
    return 0 if states <= _USABLE else 1


def _checks(data_set: DataSet, folder: Path) -> dict[str, Check]:
    """Return the states of the files that ``get`` downloads, and of other known files that exist."""
    checks = {file.name: check_file(file, folder) for file in data_set.files}
    for file in data_set.files:
        if not file.is_default and checks[file.name][0] is FileState.MISSING:
            del checks[file.name]
    if root := data_set.unpacked_folder:
        archives = [folder / name for name, (state, _) in checks.items() if state in _USABLE]
        checks[root] = check_unpacked(archives, folder, root)
        if checks[root][0] is not FileState.MISSING:
            checks[f"{root} commands"] = check_commands(folder, root)
    return checks
