"""Reference values of papers and of other libraries, one JSON file per subject."""

import json
from pathlib import Path
from typing import Any


def load_vectors(*names: str) -> dict[str, dict[str, Any]]:
    """Return the cases of ``NAME.json`` by their ids, each with its ``inputs`` and ``expected`` values."""
    found: dict[str, dict[str, Any]] = {}
    for name in names:
        cases = json.loads((Path(__file__).parent / f"{name}.json").read_text())
        found |= cases if isinstance(cases, dict) else {case["id"]: case for case in cases}
    return found


def load_vector(file: str, case: str) -> tuple[Any, Any]:
    """Return the inputs and the expected values of one case."""
    found = load_vectors(file)[case]
    return found["inputs"], found["expected"]
