"""A run folder of an earlier version is not continued, and nothing of it changes."""

from pathlib import Path

import pytest

from tests.compat.commands import LEFT, Said, refused


@pytest.mark.parametrize("run", ["rapo", "empo2"])
@pytest.mark.parametrize("more", [(), ("train.num_steps=3",)])
def test_a_run_of_an_earlier_version_is_refused_with_what_to_do(
    run: str, more: tuple[str, ...], capsys: Said
) -> None:
    line = refused(capsys, "train", "--resume", run, *more, "--progress", "none")
    assert "Outrider 0.2 or older" in line and "begin a new run with model.initial_checkpoint" in line
    kept = [path for path in Path(LEFT, run).rglob("*") if path.is_file() and path.suffix != ".sqlite"]
    assert len(kept) > 10
    for path in kept:
        assert path.read_bytes() == Path(path.relative_to(LEFT)).read_bytes(), path.name
