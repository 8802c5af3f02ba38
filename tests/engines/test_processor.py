"""What this processor can do is asked and not assumed: operators are tried, the system's words are read."""

import os
import re
from pathlib import Path

import pytest
import torch

from outrider.engines.local import cpu_kernels as onednn
from outrider.engines.local.processor import Processor, read_processor

ROOT = Path(__file__).parents[2]
X86 = """processor\t: 0
vendor_id\t: GenuineIntel
cpu family\t: 6
model\t\t: 143
model name\t: Some Xeon: the first
flags\t\t: fpu sse sse4_2 avx2 fma avx512bw amx_bf16 amx_tile popcnt

processor\t: 1
model name\t: another
flags\t\t: fpu
"""
ARM = "processor\t: 0\nFeatures\t: fp asimd crc32 sve bf16\nCPU implementer\t: 0x41\nCPU part\t: 0xd40\n"


def refused(weight: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("bf16 path needs the cpu support avx_ne_convert or avx512bw, avx512vl and avx512dq")


def missing(weight: torch.Tensor) -> torch.Tensor:
    raise AttributeError("'_OpNamespace' 'mkldnn' object has no attribute '_reorder_linear_weight'")


def wrong(weight: torch.Tensor) -> torch.Tensor:
    return REAL(1.5 * weight)


REAL = onednn.pack


@pytest.mark.parametrize("pack", [refused, missing, wrong])
def test_an_operator_that_does_not_work_is_not_taken(pack: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """The question itself, past its memory of the answer: that would outlive this test."""
    monkeypatch.setattr(onednn, "pack", pack)
    assert not onednn.can_pack.__wrapped__(torch.float32)


def test_the_answer_is_that_of_the_operator_on_this_processor() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        try:
            onednn.pack(torch.ones(64, 64, dtype=dtype))
        except (AttributeError, RuntimeError):
            assert not onednn.can_pack(dtype)
        else:
            assert onednn.can_pack(dtype)


@pytest.mark.skipif(os.environ.get("ONEDNN_MAX_CPU_ISA") != "SSE41", reason="for `make test-lesser`")
def test_the_variables_of_a_lesser_processor_act() -> None:
    """Else that job would test this processor a second time."""
    assert torch.backends.cpu.get_cpu_capability() == "DEFAULT"
    assert not onednn.can_pack(torch.bfloat16)


def test_reading_the_processor(tmp_path: Path) -> None:
    for name, text in {"x86": X86, "arm": ARM}.items():
        (tmp_path / name).write_text(text)
    xeon, arm, unknown = (read_processor(tmp_path / name) for name in ("x86", "arm", "none"))
    assert xeon.model == "Some Xeon: the first, cpu family 6, model 143"
    assert xeon.instruction_sets == {"sse4_2", "avx2", "fma", "avx512bw", "amx_bf16", "amx_tile"}
    assert arm.instruction_sets == {"asimd", "sve", "bf16"}
    assert arm.model.endswith("CPU implementer 0x41, CPU part 0xd40")
    assert unknown.instruction_sets == frozenset() and unknown.model
    assert xeon.multiplies_bfloat16 and not arm.multiplies_bfloat16 and not unknown.multiplies_bfloat16
    for family in (25, 26):
        zen = Processor(
            model="", instruction_sets=frozenset({"avx512_bf16"}), vendor="AuthenticAMD", family=family
        )
        assert zen.prefers_bfloat16_products == (family == 26)
    assert not xeon.prefers_bfloat16_products and not arm.prefers_bfloat16_products


def test_private_operators_are_called_in_one_place_only() -> None:
    """DESIGN section 9: the place that asks whether this processor can run them. The compiler's settings, in
    torch._dynamo, are no operators.
    """
    private = re.compile(r"torch\.(ops\.(?!aten\.)|_C\b|_(?!dynamo\b)[a-z]|cpu\._)")
    files = [*(ROOT / "src").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")]
    assert {file.name for file in files if private.search(file.read_text(encoding="utf-8"))} == {
        "cpu_kernels.py"
    }
