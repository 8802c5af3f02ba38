"""The campaign of attacks: in short on every run of the tests, as a whole among the slow ones."""

from pathlib import Path

import pytest
from benchmarks.attack_inputs import CHECKS
from benchmarks.attack_programs import PROGRAMS

from benchmarks import attacks
from outrider.tools.python import sandbox

needs_locks = pytest.mark.skipif(bool(sandbox.problems()), reason="this kernel lacks Landlock or seccomp")
SHORT = 12  # one of so many programs runs


def through(results: list[dict[str, object]]) -> list[dict[str, object]]:
    return [one for one in results if one["through"]]


@needs_locks
def test_a_sample_of_hostile_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(PROGRAMS) >= 120
    monkeypatch.setattr(attacks, "PROGRAMS", list(PROGRAMS)[::SHORT])
    results = attacks.attack(["sandbox"], 0, tmp_path / "out.jsonl")
    assert len(results) >= 10 and through(results) == []


@pytest.mark.parametrize("area", CHECKS)
def test_a_sample_of_hostile_inputs(tmp_path: Path, area: str) -> None:
    results = attacks.attack([area], 4, tmp_path / "out.jsonl")
    assert len(results) == 4 and through(results) == []


@needs_locks
@pytest.mark.slow
def test_all_attacks(tmp_path: Path) -> None:
    results = attacks.attack(attacks.AREAS, 300, tmp_path / "out.jsonl")
    assert len(results) >= 1300 and through(results) == []


def test_a_stopped_campaign_continues_after_the_recorded_attacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[int] = []
    monkeypatch.setitem(
        attacks.CHECKS, "tokens", lambda seed: str(ran.append(seed) or "") if seed != 2 else "broke out"
    )
    out = tmp_path / "out.jsonl"
    attacks.attack(["tokens"], 2, out)
    with out.open("a") as file:
        file.write('{"area": "tok')  # torn by a kill
    results = attacks.attack(["tokens"], 4, out)
    assert ran == [0, 1, 3] and [one["name"] for one in results] == ["0", "1", "2", "3"]
    assert [one["through"] for one in through(results)] == ["broke out"]
    assert attacks.attack(["tokens"], 4, out) == results and ran == [0, 1, 3]


@needs_locks
def test_a_successful_attack_is_detected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without its locks the tool lets them through: the campaign can fail."""
    monkeypatch.setattr(attacks, "PROGRAMS", ["read @SECRET@", "write @SECRET@", "tcp"])
    monkeypatch.setattr(sandbox, "landlock_abi", lambda: 0)
    monkeypatch.setattr(sandbox, "seccomp_works", lambda: False)
    monkeypatch.setattr(sandbox, "problems", tuple)
    results = attacks.attack(["sandbox"], 0, tmp_path / "out.jsonl")
    assert (
        len(through(results)) == 3
        and "the secret changed" in str(results[1]["through"])
        and "a connection" in str(results[2]["through"])
    )
