"""No bit of any run has changed since the record was written: the fast tests play one preset a page, the slow
ones all of them.
"""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from tests.algorithms.test_every_objective import EVERY
from tests.golden.__main__ import RECORD
from tests.golden.cases import CASES, NUM_STEPS, SAMPLE, runs
from tests.golden.lowest import missing, run_lowest, versions
from tests.golden.parts import SHOWN, digest

Runs = dict[str, list[dict[str, Any]]]
RECORDED: dict[str, Any] = json.loads(RECORD.read_text())
NAMES = {sample: [f"{case} / {player}" for case, player in runs(sample=sample)] for sample in (True, False)}


def differences(recorded: list[dict[str, Any]], found: list[dict[str, Any]]) -> list[str]:
    """What differs, by step and part; within the metrics by their section."""
    told = []
    for step, (was, now) in enumerate(zip(recorded, found, strict=True), start=1):
        for part in sorted((was.keys() | now.keys()) - {"shown"}):
            one, other = was.get(part), now.get(part)
            if one == other:
                continue
            sections = (
                sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))
                if part == "metrics"
                else []
            )
            told.append(f"step {step}: {part} {', '.join(sections)}".strip())
        if told and was["shown"] != now["shown"]:
            told.append(f"step {step}: {was['shown']} became {now['shown']}")
    return told


def played(folder: Path, *options: str) -> Runs:
    if (reason := missing()) is not None:
        pytest.skip(reason)
    if versions() != RECORDED["versions"]:
        pytest.skip(f"the golden record holds the bits of {RECORDED['versions']}, and these are {versions()}")
    run_lowest(["--into", str(folder / "found.json"), *options], timeout=800)
    found: Runs = json.loads((folder / "found.json").read_text())["runs"]
    return found


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return played(tmp_path_factory.mktemp("golden"), "--sample")


@pytest.mark.parametrize("name", NAMES[True])
def test_no_bit_of_the_sample_changed(sample: Runs, name: str) -> None:
    assert differences(RECORDED["runs"][name], sample[name]) == []


@pytest.mark.slow
def test_no_bit_of_any_run_changed(tmp_path: Path) -> None:
    found = played(tmp_path)
    assert found.keys() == RECORDED["runs"].keys()
    changed = {
        name: told for name, steps in found.items() if (told := differences(RECORDED["runs"][name], steps))
    }
    assert changed == {}


def test_the_record_has_every_algorithm_and_every_preset() -> None:
    kinds = {table["algorithm"]["type"] for table in CASES.values()}
    presets = {table["algorithm"].get("preset") for table in CASES.values()}
    assert (
        kinds
        == {table["type"] for table in EVERY.values()}
        == {CASES[name]["algorithm"]["type"] for name in SAMPLE}
    )
    assert {table["preset"] for table in EVERY.values() if "preset" in table} <= presets
    assert list(RECORDED["runs"]) == NAMES[False] and {len(steps) for steps in RECORDED["runs"].values()} == {
        NUM_STEPS
    }


def test_every_recorded_run_trained_on_something() -> None:
    """A run without a signal would hold the update to nothing."""
    for name, steps in RECORDED["runs"].items():
        assert any(step["gradients"] and step["shown"].get("grad/norm") for step in steps), name
        assert all(step["shown"].keys() <= set(SHOWN) for step in steps)


def test_a_difference_names_step_part_and_section() -> None:
    recorded: list[dict[str, Any]] = [
        {"credit": "a", "metrics": {"loss": "1", "ratio": "2"}, "shown": {}}
    ] * 2
    other = [recorded[0], {"credit": "b", "metrics": {"loss": "1", "ratio": "3"}, "shown": {}}]
    assert differences(recorded, recorded) == []
    assert differences(recorded, other) == ["step 2: credit", "step 2: metrics ratio"]


def test_a_hash_sees_the_last_bit() -> None:
    assert digest([0.1]) != digest([math.nextafter(0.1, 1.0)]) and digest([0.1]) == digest((0.1,))
