"""Write the files of recipes/gsm8k-python-qwen.toml from a file of GSM8K (``question`` and ``answer``).

    python recipes/gsm8k_python_qwen.py GSM8K.jsonl [--out data/gsm8k]

The last 200 questions are the test, the 100 before them are for tuning, and all others are for training. The
calculator notes of the training answers (``<<16-3-4=9>>``) become demonstrations: a line of reasoning, a call
of ``python`` with the expression, and a boxed answer at the end.
"""

import argparse
import json
import re
from pathlib import Path
from typing import Any, Final

NUM_TEST: Final = 200
NUM_VALID: Final = 100
MAX_CALLS: Final = 4
_NOTE = re.compile(r"<<([0-9.+*/() -]+)=([0-9.]+)>>")


def demonstration(row: dict[str, str]) -> dict[str, Any] | None:
    """Return the answer as a chat with one call per line, or None if it has no such form."""
    solution, _, gold = row["answer"].partition("####")
    lines = solution.strip().splitlines()
    notes = [_NOTE.findall(line) for line in lines]
    if not 0 < len(lines) <= MAX_CALLS or any(len(found) != 1 for found in notes):
        return None
    if notes[-1][0][1] != gold.strip().replace(",", ""):
        return None
    messages: list[dict[str, Any]] = [{"role": "user", "content": row["question"]}]
    for line, [(expression, value)] in zip(lines, notes, strict=True):
        function = {"name": "python", "arguments": {"code": f"print({expression.strip()})"}}
        text = line.partition("<<")[0].rstrip(" =$")
        messages.append({"role": "assistant", "content": text, "tool_calls": [{"function": function}]})
        messages.append({"role": "tool", "content": value})
    messages.append({"role": "assistant", "content": rf"The answer is \boxed{{{notes[-1][0][1]}}}."})
    return {"question": row["question"], "reward": 1.0, "messages": messages}


def main() -> None:
    """Write the splits and the demonstrations."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--out", type=Path, default=Path("data/gsm8k"))
    arguments = parser.parse_args()
    with arguments.file.open(encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    train, held_out = rows[: -NUM_TEST - NUM_VALID], rows[-NUM_TEST - NUM_VALID :]
    arguments.out.mkdir(parents=True, exist_ok=True)
    for name, records in {
        "train": train,
        "valid": held_out[:NUM_VALID],
        "test": held_out[NUM_VALID:],
        "demonstrations": [record for row in train if (record := demonstration(row))],
    }.items():
        text = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
        (arguments.out / f"{name}.jsonl").write_text(text, encoding="utf-8")
        print(f"{len(records)} records in {arguments.out / name}.jsonl")


if __name__ == "__main__":
    main()
