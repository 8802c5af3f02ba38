"""GSM8K as tasks with the Python tool (``recipes/gsm8k-qwen.toml``): splits, and programs for a cold start.

    python -m benchmarks.gsm8k gsm8k.jsonl --out runs/gsm8k

The file has the columns of ``openai/gsm8k``: ``question``, and ``answer`` with calculations such as
``<<16-3-4=9>>`` and the result after ``####``. The files contain the questions with at most ``--max-steps``
calculations, in the order of the input: the first 64 as valid, the next 128 as test, and the rest as train.
Demonstrations are programs whose comments are the sentences of the answer without the calculations.
"""

import argparse
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

NUM_VALID, NUM_TEST = 64, 128
_CALCULATION = re.compile(r"<<([^<>=]+)=([^<>]+)>>")
_ARITHMETIC = re.compile(r"[\d.+\-*/() ]+")
_NUMBER = re.compile(r"\d*\.?\d+")


def as_program(answer: str) -> str | None:
    """The calculations of an answer as a program that prints the result; None if it cannot be computed."""
    *sentences, _ = answer.split("\n")
    names: dict[float, str] = {}  # by result; a later number that equals a result is that variable
    lines: list[str] = []
    num_calculations = 0
    for sentence in sentences:
        lines.append(f"# {_CALCULATION.sub('', sentence).strip()}")
        for expression, result in _CALCULATION.findall(sentence):
            expression, result = (re.sub(r"[$,]", "", text).strip() for text in (expression, result))
            if not _ARITHMETIC.fullmatch(expression) or not _NUMBER.fullmatch(result):
                return None
            num_calculations += 1
            name = f"x{num_calculations}"
            with_names = _NUMBER.sub(
                lambda number: names.get(float(number[0])) or number[0].lstrip("0") or "0", expression
            )
            lines.append(f"{name} = {with_names}")
            names[float(result)] = name
    result = result_of(answer)
    final = names.get(float(result)) if _NUMBER.fullmatch(result.removeprefix("-")) else None
    return None if final is None else "\n".join([*lines, f"print({final})"])


def result_of(answer: str) -> str:
    """The result that an answer of the data set ends with, without thousands separators."""
    return answer.split("####")[-1].strip().replace(",", "")


def demonstration(row: dict[str, Any]) -> dict[str, Any] | None:
    """A record of ``docs/formats.md``: a call of the Python tool, its output, and the answer."""
    program, result = as_program(row["answer"]), result_of(row["answer"])
    if program is None:
        return None
    messages = [
        {"role": "user", "content": row["question"]},
        {"role": "assistant", "content": f"<python>{program}</python>"},
        {"role": "tool", "content": f"<result>{result}</result>"},
        {"role": "assistant", "content": f"<answer>\\boxed{{{result}}}</answer>"},
    ]
    return {"question": row["question"], "reward": 1.0, "messages": messages}


def main(arguments: Sequence[str] | None = None) -> int:
    """Write ``train.jsonl``, ``valid.jsonl``, ``test.jsonl`` and ``demonstrations.jsonl``."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--max-steps", type=int, default=3)
    parsed = parser.parse_args(arguments)
    rows = [json.loads(line) for line in parsed.file.read_text(encoding="utf-8").splitlines()]
    rows = [row for row in rows if 1 <= len(_CALCULATION.findall(row["answer"])) <= parsed.max_steps]
    train = rows[NUM_VALID + NUM_TEST :]
    files = {
        "valid": rows[:NUM_VALID],
        "test": rows[NUM_VALID : NUM_VALID + NUM_TEST],
        "train": train,
        "demonstrations": [record for row in train if (record := demonstration(row)) is not None],
    }
    parsed.out.mkdir(parents=True, exist_ok=True)
    for name, written in files.items():
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in written)
        (parsed.out / f"{name}.jsonl").write_text(text, encoding="utf-8")
        print(f"{name}: {len(written)} rows")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
