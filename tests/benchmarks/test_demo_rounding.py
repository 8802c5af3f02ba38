"""What docs/benchmarks.md says of the demo in another rounding follows from the two packs: same play, other
bits.
"""

import json
from pathlib import Path
from typing import Any

import pytest

PACKS = Path(__file__).parents[2] / "records" / "packs"


def lines(pack: str, seed: int, file: str) -> list[dict[str, Any]]:
    text = (PACKS / pack / "runs" / f"rapo-{seed}" / file).read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_other_rounding_changes_bits_and_not_rollouts(seed: int) -> None:
    ours, others = (
        [line for line in lines(pack, seed, "metrics.jsonl") if line["kind"] == "train"]
        for pack in ("demo.pack", "demo-avx2.pack")
    )
    assert len(ours) == len(others) == 9
    assert [line["tokens/policy"] for line in ours] == [line["tokens/policy"] for line in others]
    assert not any(one["grad/norm"] == other["grad/norm"] for one, other in zip(ours, others, strict=True))
    ends = [
        lines(pack, seed, "evaluations.jsonl")[-1]["task_scores"] for pack in ("demo.pack", "demo-avx2.pack")
    ]
    assert ends[0] == ends[1] and len(ends[0]) == 64
