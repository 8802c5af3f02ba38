"""``outrider eval`` with the language model that ships in a package, over evaluation files that lie beside
the repository.
"""

from pathlib import Path

import pytest

from tests.evaluation.panel_files import evaluate, summary

DATA = Path(__file__).parents[3] / "shared" / "data"
FILES = {"gsm8k": "math/gsm8k.jsonl", "hotpotqa": "qa/hotpotqa.jsonl"}


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_two_runs_agree_exactly_and_a_cut_one_continues_to_the_same_bytes(name: str, tmp_path: Path) -> None:
    file = DATA / FILES[name]
    if not file.exists():
        pytest.skip("the evaluation files are not here")
    asked = [
        "--model", "smollm2-135m-instruct", "--tasks", f"{name}={file}", "--limit", "6", "--samples", "1",
        "--seed", "3", "batch_size=2", "num_threads=1", "model.precision=float32",
        "rollout.max_turn_tokens=48", "rollout.max_response_tokens=64",
    ]  # fmt: skip
    for run in ("once", "again"):
        assert evaluate(tmp_path / run, *asked) == 0
    whole = (tmp_path / "once" / "results.jsonl").read_bytes()
    assert (tmp_path / "again" / "results.jsonl").read_bytes() == whole
    found = summary(tmp_path / "once")
    assert (found["num_scored"], found["faults"]) == (6, {}) and found["num_tokens"] > 10  # an answer
    cut = tmp_path / "cut"
    cut.mkdir()
    (cut / "results.jsonl").write_bytes(whole[: len(whole) // 2])
    assert evaluate(cut, *asked) == 0
    assert (cut / "results.jsonl").read_bytes() == whole
    assert (cut / "summary.json").read_bytes() == (tmp_path / "once" / "summary.json").read_bytes()
