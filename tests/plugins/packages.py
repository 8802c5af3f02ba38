"""A foreign package as people get one: a wheel, installed into a folder that is on the path."""

import shutil
import subprocess
import sys
from pathlib import Path

FOREIGN = Path(__file__).parent / "foreign"


def install(source: Path, target: Path) -> Path:
    """Build a copy of ``source`` as a wheel and install it into ``target``; nothing is downloaded, and
    ``source`` stays as it is."""
    copied = target.with_name(f"{target.name}-source")
    shutil.copytree(source, copied, ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run(
        [
            sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-index",
            "--no-deps", "--no-build-isolation", "--no-compile", "--target", str(target), str(copied),
        ],
        check=True, capture_output=True, timeout=300,
    )  # fmt: skip
    return target
