"""Programs from the answers of GSM8K, and the files that a recipe reads."""

import contextlib
import io
import json
from pathlib import Path

import pytest
from benchmarks.gsm8k import as_program, main
from hypothesis import given
from hypothesis import strategies as st


def _printed(program: str) -> float:
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        exec(program, {})
    return float(output.getvalue())


def test_results_are_variables_of_later_calculations() -> None:
    answer = "Left: 16 - 3 = <<16-3=13>>13 eggs.\nIt is 13 * 2 = $<<13*2=26>>26.\n#### 26"
    assert (
        as_program(answer)
        == "# Left: 16 - 3 = 13 eggs.\nx1 = 16-3\n# It is 13 * 2 = $26.\nx2 = x1*2\nprint(x2)"
    )


@given(
    st.lists(st.tuples(st.sampled_from("+-*"), st.integers(0, 9)), min_size=1, max_size=8), st.integers(1, 9)
)
def test_programs_print_the_result(steps: list[tuple[str, int]], value: int) -> None:
    lines = []
    for operator, operand in steps:
        before, value = value, abs(eval(f"{value}{operator}{operand}"))
        text = (
            f"{before}{operator}{operand}"
            if value == eval(f"{before}{operator}{operand}")
            else f"{operand}-{before}"
        )
        lines.append(f"Now {text} = <<{text}={value}>>{value}.")
    program = as_program("\n".join([*lines, f"#### {value}"]))
    assert program is not None and _printed(program) == value


@pytest.mark.parametrize(
    "answer",
    ["No calculation.\n#### 4", "20% of 50 are <<20%*50=10>>10.\n#### 10", "It is <<1+1=2>>2.\n#### 3"],
)
def test_other_answers_have_no_program(answer: str) -> None:
    assert as_program(answer) is None


def test_the_files_of_a_recipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        {"question": f"{i} + 1?", "answer": f"<<{i}+1={i + 1}>>{i + 1}\n#### {i + 1}"} for i in range(200)
    ]
    rows.append({"question": "long", "answer": "<<1+1=2>>2 <<2+1=3>>3 <<3+1=4>>4 <<4+1=5>>5\n#### 5"})
    file = tmp_path / "gsm8k.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    assert main([str(file), "--out", str(tmp_path / "out")]) == 0
    assert "train: 8 rows" in capsys.readouterr().out
    read = {
        name: [json.loads(line) for line in (tmp_path / "out" / f"{name}.jsonl").read_text().splitlines()]
        for name in ("valid", "test", "train", "demonstrations")
    }
    assert read["valid"] + read["test"] + read["train"] == rows[:-1]
    assert [row["question"] for row in read["demonstrations"]] == [row["question"] for row in read["train"]]
