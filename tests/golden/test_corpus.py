"""The corpus tool detects a changed bit; the frozen runs of a given corpus resume to the same bits."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.golden import corpus
from tests.golden.corpus_cases import MORE, recipes
from tests.golden.lowest import ROOT, missing, variables

CORPUS = os.environ.get("OUTRIDER_CORPUS")


def test_a_frozen_run_is_resumed_to_the_same_bits_and_a_changed_one_is_not(tmp_path: Path) -> None:
    folder = tmp_path / "corpus"
    corpus.make(folder, ["rapo, evolve"])
    assert corpus.check(folder) == {"rapo, evolve": [], "rapo, evolve, from the start": []}
    [weights] = folder.glob("inputs/model/*.safetensors")
    tensors = load_file(weights)
    tensors["model.norm.weight"][0] += 0.25
    save_file(tensors, weights, metadata={"format": "pt"})
    found = corpus.check(folder)
    assert found["rapo, evolve"] == []  # the checkpoint has the weights
    assert "masters.safetensors" in found["rapo, evolve, from the start"]


def test_a_run_that_fails_and_an_unknown_case_are_reported(tmp_path: Path) -> None:
    folder = tmp_path / "corpus"
    corpus.make(folder, ["grpo"])
    (folder / "runs" / "grpo" / "config.toml").unlink()
    [difference] = corpus.check(folder)["grpo"]
    assert "config.toml" in difference
    with pytest.raises(SystemExit, match="not in the corpus"):
        corpus.check(folder, ["grpo", "unknown"])


def test_cases_have_distinct_directories(tmp_path: Path) -> None:
    cases = recipes(tmp_path)
    assert MORE.keys() < cases.keys() and corpus.FROM_START in cases
    assert len({corpus.slug(case) for case in cases}) == len(cases)


@pytest.mark.slow
@pytest.mark.skipif(CORPUS is None, reason="OUTRIDER_CORPUS names no directory with a corpus of frozen runs")
def test_the_corpus_is_resumed_to_the_same_bits() -> None:
    if (reason := missing()) is not None:
        pytest.skip(reason)
    command = [sys.executable, "-m", "tests.golden.corpus", "--check", str(CORPUS)]
    ended = subprocess.run(
        command, env={**os.environ, **variables()}, cwd=ROOT, capture_output=True, text=True, timeout=850
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
