"""A foreign package as people get one: a wheel, installed into a folder that is on the path."""

import shutil
import subprocess
import sys
from pathlib import Path

FOREIGN = Path(__file__).parent / "foreign"


def install(*sources: Path, target: Path) -> Path:
    """Build copies of ``sources`` as wheels and install them into ``target``; nothing is downloaded, and the
    sources stay as they are."""
    copied = [target.with_name(f"{target.name}-source-{number}") for number in range(len(sources))]
    for source, copy in zip(sources, copied, strict=True):
        shutil.copytree(source, copy, ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run(
        [
            sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-index",
            "--no-deps", "--no-build-isolation", "--no-compile", "--target", str(target), *map(str, copied),
        ],
        check=True, capture_output=True, timeout=300,
    )  # fmt: skip
    return target
