"""What commit c91e788 (0.1.0) left on disk, and today's command line in this process.

``c91e788/`` holds what its command line wrote from ``recipe.toml`` and ``plain.toml`` in two steps, on a
random model of one layer: a RAPO run with an evolving buffer, an EMPO² run with tips in its memory, and kept
answers (``outrider eval --tasks``). Reports, locks and the first buffer, a copy of which is in the run, are
left out.
"""

from pathlib import Path

import pytest

from outrider.cli import main

LEFT = Path(__file__).parent / "c91e788"
LAST = Path("checkpoints") / "step-000002"
Said = pytest.CaptureFixture[str]


def refused(capsys: Said, *arguments: str) -> str:
    """The one line of a command that fails."""
    capsys.readouterr()
    assert main(list(arguments)) in (1, 2)
    (line,) = capsys.readouterr().err.splitlines()
    return line.removeprefix("outrider: ")


def done(capsys: Said, *arguments: str) -> str:
    """What a command prints that succeeds without a word on stderr."""
    capsys.readouterr()
    status = main(list(arguments))
    said = capsys.readouterr()
    assert (status, said.err) == (0, "")
    return said.out
