"""The packages and the processor in a checkpoint, and how their differences are reported."""

import pytest

from outrider.engines.local import cpu_kernels
from outrider.training.resume import differences, versions

NEEDED = {
    *("outrider", "torch", "transformers", "numpy", "BLAS", "oneDNN"),
    *("tokenizers", "math-verify", "sympy"),
}
SOFTWARE = NEEDED | {"latex2sympy2_extended", "onnxruntime", "sentence-transformers", "peft", "bitsandbytes"}


def test_a_checkpoint_records_what_decides_the_bits() -> None:
    """Instruction sets, thread count, libraries."""
    recorded = versions()
    machine = {"processor", "instruction sets", "torch's kernels", "products", "threads", "variables"}
    assert NEEDED | machine <= set(recorded) <= SOFTWARE | machine
    assert all(recorded.values()) and int(recorded["threads"]) >= 1


@pytest.mark.parametrize("name", versions())
def test_each_difference_is_reported_once_by_its_name(name: str) -> None:
    (line,) = differences({**versions(), name: "0.4.1"})
    kind = "VERSIONS" if name in SOFTWARE else "PROCESSOR"
    assert line.startswith(f"OTHER {kind}: the checkpoint was written with {name} 0.4.1 (now ")


def test_what_was_not_recorded_is_not_compared() -> None:
    """Checkpoints of earlier versions hold three packages or nothing."""
    assert differences({}) == differences(versions()) == []
    assert differences({name: versions()[name] for name in ("outrider", "torch", "transformers")}) == []
    assert len(differences({"torch": "0.4.1", "threads": "99", "unknown": "x"})) == 2


@pytest.mark.parametrize("prefers", [True, False])
def test_products_that_a_checkpoint_does_not_record_were_by_torch(
    prefers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_kernels, "prefers_onednn", lambda: prefers)
    before = {name: value for name, value in versions().items() if name != "products"}
    lines = differences(before)
    assert len(lines) == prefers
    assert all("products torch (now oneDNN)" in line for line in lines)


def test_of_the_instruction_sets_only_the_difference_is_reported() -> None:
    sets = versions()["instruction sets"]
    (line,) = differences({**versions(), "instruction sets": f"{sets} avx512_other"})
    assert "instruction sets avx512_other (now without these)" in line


def test_a_variable_that_chooses_other_kernels_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MKL_CBWR", "COMPATIBLE")
    before = {**versions(), "variables": "none"}
    assert "MKL_CBWR=COMPATIBLE" in versions()["variables"]
    assert "variables none (now " in differences(before)[0]
