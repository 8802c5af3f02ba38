"""Calls from the answers of GSM8K, and the files that a recipe reads."""

import contextlib
import io
import json
import re
from pathlib import Path

import pytest
from benchmarks.gsm8k import as_turns, demonstration, main
from hypothesis import given
from hypothesis import strategies as st


def test_calculations_are_calls_in_the_place_of_their_text() -> None:
    answer = "16 - 3 = <<16-3=13>>13 eggs are left.\nShe gets 1,000 * 2 = $<<1,000*2=2000>>2000.\n#### 2,000"
    assert as_turns(answer) == [
        "<python>print(16-3)</python>",
        "13 eggs are left.\nShe gets <python>print(1000*2)</python>",
        "2000.\n<answer>\\boxed{2000}</answer>",
    ]
    with_x = "The tax 5 x 2=<<5*2=10>>10 and 2x3=<<2*3=6>>6.\n#### 6"
    assert as_turns(with_x) == [
        "The tax <python>print(5*2)</python>",
        "10 and <python>print(2*3)</python>",
        "6.\n<answer>\\boxed{6}</answer>",
    ]


@given(st.lists(st.tuples(st.integers(0, 99), st.sampled_from("+-*"), st.integers(0, 99)), min_size=1))
def test_calls_compute_what_the_answer_states(steps: list[tuple[int, str, int]]) -> None:
    ordered = [(max(a, b), operator, min(a, b)) for a, operator, b in steps]  # no negative results
    expressions = [f"{left}{operator}{right}" for left, operator, right in ordered]
    values = [eval(expression) for expression in expressions]
    text = " ".join(f"Then <<{one}={value}>>{value}." for one, value in zip(expressions, values, strict=True))
    record = demonstration({"question": "q", "answer": f"{text}\n#### {values[-1]}"})
    assert record is not None
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        for message in record["messages"]:
            for program in re.findall("<python>(.*)</python>", message["content"]):
                exec(program, {})
    results = [message["content"] for message in record["messages"] if message["role"] == "tool"]
    assert results == [f"<result>{line}</result>" for line in printed.getvalue().split()]
    assert len(results) == len(steps)


@pytest.mark.parametrize("answer", ["No calculation.\n#### 4", "20% of 50 are <<20%*50=10>>10.\n#### 10"])
def test_other_answers_have_no_calls(answer: str) -> None:
    assert as_turns(answer) is None


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
