"""GSM8K as tasks with the Python tool (``recipes/gsm8k-qwen.toml``): splits, and demonstrations.

    python -m benchmarks.gsm8k gsm8k.jsonl --out runs/gsm8k

The file has the columns of ``openai/gsm8k``: ``question``, and ``answer`` with calculations such as
``<<16-3-4=9>>`` and the result after ``####``. The files contain the questions with at most ``--max-steps``
calculations, in the order of the input: the first 128 as valid, the next 64 as test, and the rest as train.
Demonstrations are the sentences of the answers, in which Python computes what the answers state.
"""

import argparse
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

NUM_VALID, NUM_TEST = 128, 64
_CALCULATION = re.compile(r"<<([^<>=]+)=([^<>]+)>>")
_ARITHMETIC = re.compile(r"[\d.+\-*/() ]+")
# The calculation as text, in front of the call; the x of a word is none.
_WRITTEN = re.compile(r"\s*(?:[\d.,+\-*/() $]|(?<![A-Za-z])x)*=[\s$]*$")
_NUMBER = re.compile(r"\d*\.?\d+")


def as_turns(answer: str) -> list[str] | None:
    """Turns that state an answer: each calculation is a call of Python in the place of its text, and the
    last turn is the final answer. None for an answer with other calculations or without any.
    """
    text, _, _ = answer.rpartition("\n####")
    turns: list[str] = []
    start = 0
    for match in _CALCULATION.finditer(text):
        expression, result = (re.sub(r"[$,]", "", part).strip() for part in match.groups())
        if not _ARITHMETIC.fullmatch(expression) or not _NUMBER.fullmatch(result):
            return None
        turns.append(
            f"{_WRITTEN.sub('', text[start : match.start()])} <python>print({expression})</python>".lstrip()
        )
        start = match.end()
    return [*turns, f"{text[start:]}\n<answer>\\boxed{{{result_of(answer)}}}</answer>"] if turns else None


def result_of(answer: str) -> str:
    """The result that an answer of the data set ends with, without thousands separators."""
    return answer.split("####")[-1].strip().replace(",", "")


def demonstration(row: dict[str, Any]) -> dict[str, Any] | None:
    """A record of ``docs/formats.md``: the calls of the Python tool with their results, and the answer."""
    turns = as_turns(row["answer"])
    if turns is None:
        return None
    results = [result.replace(",", "") for _, result in _CALCULATION.findall(row["answer"])]
    messages = [{"role": "user", "content": row["question"]}]
    for turn, result in zip(turns, [*results, None], strict=True):
        messages.append({"role": "assistant", "content": turn})
        if result is not None:
            messages.append({"role": "tool", "content": f"<result>{result}</result>"})
    return {"question": row["question"], "reward": 1.0, "messages": messages}


def main(arguments: Sequence[str] | None = None) -> int:
    """Write ``train.jsonl``, ``valid.jsonl``, ``test.jsonl`` and ``demonstrations.jsonl``."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--max-steps", type=int, default=2)
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
