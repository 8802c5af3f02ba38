"""No bit of any run has changed since the record of these kernels was written: the fast tests play one preset
a page, the slow ones all of them. On kernels that no record knows, only what must be near is compared.
"""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.algorithms.test_every_objective import EVERY
from tests.golden.cases import CASES, NUM_STEPS, SAMPLE, runs
from tests.golden.kernels import far, fitting, records, same_parts
from tests.golden.lowest import missing, run_lowest
from tests.golden.parts import SHOWN, digest

Runs = dict[str, list[dict[str, Any]]]
KEPT = records()
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


def played(folder: Path, *options: str) -> dict[str, Any]:
    if (reason := missing()) is not None:
        pytest.skip(reason)
    run_lowest(["--into", str(folder / "found.json"), *options], timeout=800)
    found: dict[str, Any] = json.loads((folder / "found.json").read_text())
    return found


def changes(found: dict[str, Any], name: str, kept: dict[str, Any] = KEPT) -> list[str]:
    """What is another bit than in the record of these kernels; without one, what is far from every record.

    Skips what no record can say anything about.
    """
    steps, record = found["runs"][name], kept.get(fitting(kept, found["kernels"]) or "")
    if record is not None and record["versions"] == found["versions"] and name in record["runs"]:
        return differences(record["runs"][name], steps)
    others = [other for other in kept.values() if name in other["runs"]]
    if not others:
        pytest.skip(f"no record holds {name}: python -m tests.golden --write")
    told = (far(other["runs"][name], steps, same=same_parts(name)) for other in others)
    return min(map(list, told), key=len)


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return played(tmp_path_factory.mktemp("golden"), "--sample")


@pytest.mark.parametrize("name", NAMES[True])
def test_no_bit_of_the_sample_changed(sample: dict[str, Any], name: str) -> None:
    assert changes(sample, name) == []


@pytest.mark.slow
def test_no_bit_of_any_run_changed(tmp_path: Path) -> None:
    found = played(tmp_path)
    assert list(found["runs"]) == NAMES[False]
    assert {name: told for name in found["runs"] if (told := changes(found, name))} == {}


def every_run() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Of every record."""
    for kept, record in KEPT.items():
        yield from ((f"{kept}: {name}", steps) for name, steps in record["runs"].items())


def test_the_record_has_every_algorithm_and_every_preset() -> None:
    kinds = {table["algorithm"]["type"] for table in CASES.values()}
    presets = {table["algorithm"].get("preset") for table in CASES.values()}
    assert (
        kinds
        == {table["type"] for table in EVERY.values()}
        == {CASES[name]["algorithm"]["type"] for name in SAMPLE}
    )
    assert {table["preset"] for table in EVERY.values() if "preset" in table} <= presets
    held = {name for record in KEPT.values() for name in record["runs"]}
    assert held == set(NAMES[False]) and {len(steps) for _, steps in every_run()} == {NUM_STEPS}


def test_every_recorded_run_trained_on_something() -> None:
    """A run without a signal would hold the update to nothing."""
    for name, steps in every_run():
        assert any(step["gradients"] and step["shown"].get("grad/norm") for step in steps), name
        assert all(step["shown"].keys() <= set(SHOWN) for step in steps)


@pytest.mark.parametrize("name", NAMES[False])
def test_records_of_other_kernels_are_near(name: str) -> None:
    """What is compared where no record fits holds between those that there are."""
    steps = [record["runs"][name] for record in KEPT.values() if name in record["runs"]]
    assert [told for one in steps for other in steps for told in far(one, other, same=same_parts(name))] == []


def test_the_record_of_the_kernels_is_chosen_and_what_none_knows_must_be_near() -> None:
    name = NAMES[True][0]
    steps = KEPT["intel"]["runs"][name]
    assert fitting(KEPT, KEPT["amd"]["kernels"], "AMD") == "amd"
    assert fitting(KEPT, "others", "Intel Xeon, model 106") == "intel"
    assert fitting(KEPT, "others", "Other") is None
    known = {"known": {**KEPT["intel"], "kernels": "known"}}
    found = {"kernels": "others", "versions": {}, "runs": {name: steps}}
    assert changes(found, name, known) == []
    moved = [{**steps[0], "shown": {**steps[0]["shown"], "grad/norm": 0.5}}, *steps[1:]]
    assert changes({**found, "runs": {name: moved}}, name, known) == ["step 1: grad/norm was 0.29398, is 0.5"]
    other = [{**steps[0], "credit": ""}, *steps[1:]]
    assert changes({**found, "runs": {name: other}}, name, known) == ["step 1: credit"]


def test_a_difference_names_step_part_and_section() -> None:
    recorded: list[dict[str, Any]] = [
        {"credit": "a", "metrics": {"loss": "1", "ratio": "2"}, "shown": {}}
    ] * 2
    other = [recorded[0], {"credit": "b", "metrics": {"loss": "1", "ratio": "3"}, "shown": {}}]
    assert differences(recorded, recorded) == []
    assert differences(recorded, other) == ["step 2: credit", "step 2: metrics ratio"]


def test_a_hash_sees_the_last_bit() -> None:
    assert digest([0.1]) != digest([math.nextafter(0.1, 1.0)]) and digest([0.1]) == digest((0.1,))
