"""The mutation benchmark: which changes it makes, how they reach the code, and how it counts."""

import math
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mutmut", reason="the extra 'mutation' is not installed")

from benchmarks.mutants import mutants_of
from benchmarks.mutation_children import live_functions, run_child, swap_code
from benchmarks.mutation_score import Score, equivalents, overall, printed, survivors, wilson
from benchmarks.mutation_targets import TARGETS

SOURCE = '''"""Words."""

from dataclasses import dataclass
from typing import Literal

LIMIT = 3
Kind = Literal["a", "b"]
QUERY = "SELECT 1"


@dataclass(frozen=True)
class Box:
    """Words."""

    size: int = 1

    def grown(self, by: int | None = None) -> int:
        """Words."""
        if by is None:
            raise ValueError(f"no {by + 1}")
        for one, other in zip([by], [1], strict=True):
            by = one + other
        return by
'''


@pytest.fixture
def file(tmp_path: Path) -> Path:
    written = tmp_path / "boxes.py"
    written.write_text(SOURCE)
    return written


def test_what_is_changed_and_what_is_left_out(file: Path) -> None:
    found = {(mutant.function, *mutant.difference) for mutant in mutants_of(file)}
    assert (None, "LIMIT = 3", "LIMIT = 4") in found
    assert (None, "size: int = 1", "size: int = 2") in found
    assert ("Box.grown", "by = one + other", "by = one - other") in found
    assert ("Box.grown", "if by is None:", "if by is not None:") in found
    assert (None, 'QUERY = "SELECT 1"', 'QUERY = "XXSELECT 1XX"') in found
    changed = " ".join(after for _, _, after in found)
    for untouched in ("Words", "Literal", "frozen", "no {by", "select 1", "strict=False"):
        assert untouched not in changed
    assert not any("zip" in after and "strict" not in after for _, _, after in found)


def test_every_change_compiles_has_its_own_key_and_keeps_the_other_lines(file: Path) -> None:
    mutants = mutants_of(file)
    assert len({mutant.key for mutant in mutants}) == len(mutants)
    for mutant in mutants:
        compile(mutant.source, str(file), "exec")
        assert mutant.source != SOURCE and mutant.lines.start >= 1
        first = SOURCE.splitlines()[mutant.lines.start - 1]
        assert mutant.difference[0].startswith(first.strip()) or len(mutant.lines) > 1


def test_a_change_reaches_every_name_that_is_bound_to_the_function(file: Path) -> None:
    names: dict[str, Any] = {"__name__": "boxes"}
    exec(compile(SOURCE, str(file), "exec"), names)
    bound = names["Box"]().grown
    wanted = ("by = one + other", "by = one - other")
    (mutant,) = [one for one in mutants_of(file) if one.difference == wanted]
    functions = live_functions([str(file)])[str(file.resolve()), "Box.grown"]
    assert bound(4) == 5
    assert swap_code(functions, mutant.source, str(file))
    assert bound(4) == 3
    assert not swap_code(functions, "Box = None", str(file))


def test_how_a_child_ends() -> None:
    def endless() -> int:
        while True:
            pass

    limits: dict[str, Any] = {"cpu_seconds": 1.0, "wall_seconds": 300.0}
    assert run_child(lambda: 0, **limits) == "survived"
    assert run_child(lambda: 1, **limits) == "killed"
    assert run_child(lambda: 1 // 0, **limits) == "killed"
    assert run_child(endless, **limits) == "timeout"


def line(result: str, operator: str = "number", after: str = "2") -> dict[str, Any]:
    where = {"file": "a.py", "line": 1, "function": None, "num_tests": 3}
    return {**where, "operator": operator, "before": "1", "after": after, "result": result}


def test_equivalent_mutants_count_nowhere_and_those_that_no_test_runs_count_as_missed() -> None:
    found = [line("killed"), line("import"), line("timeout", "arg_removal"), line("not run")]
    found += [line("survived", after="3"), line("survived", after="4")]
    known = {("a.py", "", "1", "4")}
    score = Score.of("a", 100, found, known)
    assert (score.num_counted, score.num_found, score.num_equivalent, score.num_not_run) == (5, 3, 1, 1)
    assert (score.num_import, score.num_timeout, score.num_argument, score.num_argument_found) == (1, 1, 1, 1)
    assert score.share == pytest.approx(0.6)
    listed = survivors(found, known)
    assert "+ 3" in listed and "+ 4" not in listed and listed.count("a.py:1") == 2
    assert "| a | 100 | 5 | 1 | 3 | 60.0 % |" in printed([score], head=True)


def test_wilson_and_the_score_over_modules_of_different_sizes() -> None:
    low, high = wilson(85, 100)
    assert (low, high) == (
        pytest.approx(0.7672, abs=1e-4),
        pytest.approx(0.9069, abs=1e-4),
    )  # statsmodels, method "wilson"
    assert wilson(0, 0) == (0.0, 1.0)
    small = Score.of("a", 10, [line("killed")] * 5 + [line("survived")] * 5, set())
    large = Score.of("b", 90, [line("killed")] * 9 + [line("survived")], set())
    share, low, high = overall([small, large])
    assert share == pytest.approx(0.1 * 0.5 + 0.9 * 0.9) and low < share < high
    one = overall([large])
    assert one == (pytest.approx(0.9), *map(pytest.approx, wilson(9, 10)))
    assert math.isnan(Score.of("c", 5, [], set()).share)


def test_the_targets_exist_and_equivalents_name_lines_that_are_there() -> None:
    for target in TARGETS.values():
        assert all(path.is_file() for path in [*target.source_files, *target.test_files])
    paths = [path for target in TARGETS.values() for path in target.source_files]
    sources = {path.as_posix(): path.read_text() for path in paths}
    for file, _, before, _ in equivalents():
        (text,) = [text for path, text in sources.items() if path.endswith(f"outrider/{file}")]
        joined = " ".join(part.strip() for part in text.splitlines())
        assert before in joined, f"{file}: {before}"
