"""Splits of reasoning-gym's data sets without repeated questions.

Runs as a program of its own that reads a request and writes rows; see
:mod:`outrider.environments.reasoning_gym.environment`.
"""

import copy
import json
import os
import random
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Final

import numpy as np

from outrider.errors import ConfigError, DataError
from outrider.plugins.imports import describe_exception

_ITEMS_PER_TASK: Final = 20
"""Number of items that are tried per task, because small data sets repeat their questions."""


def make_rows(request: Mapping[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """All splits in their order.

    Args:
        request: ``datasets`` with the name and options of each, and ``splits`` with the size and first seed.

    Raises ConfigError for an unknown data set or option, and DataError if a data set has too few different
    questions.
    """
    seen: set[str] = set()
    return {
        split: _split(request["datasets"], split, size, first_seed, seen)
        for split, (size, first_seed) in request["splits"].items()
    }


def _split(
    datasets: Sequence[Mapping[str, Any]], split: str, size: int, seed: int, seen: set[str]
) -> list[dict[str, Any]]:
    num, count, columns = len(datasets), Counter[str](), []
    for number, dataset in enumerate(datasets):
        label, share = dataset["name"], (size + num - 1 - number) // num
        count[label] += 1
        if count[label] > 1:  # a data set that is named again, with other options, has keys of its own
            label = f"{label}.{count[label]}"
        items = _new_items(dataset, f"{label}/{split}", seed, share * _ITEMS_PER_TASK, seen)
        columns.append(list(islice(items, share)))
        if len(columns[-1]) < share:
            raise DataError(
                f"reasoning-gym: {dataset['name']} has {len(columns[-1])} new questions for {split}, "
                f"not {share}: use fewer tasks, or options that make more"
            )
    return [columns[index % num][index // num] for index in range(size)]


def _new_items(
    spec: Mapping[str, Any], label: str, seed: int, num_items: int, seen: set[str]
) -> Iterator[dict[str, Any]]:
    import reasoning_gym

    name, options = spec["name"], copy.deepcopy(dict(spec["options"]))
    try:
        dataset = reasoning_gym.create_dataset(name, seed=seed, size=num_items, **options)
    except (ValueError, TypeError, AssertionError) as error:
        raise ConfigError(f"reasoning-gym cannot make {name!r}{describe_exception(error)}") from error
    for index in range(num_items):
        # Some data sets also draw from the global random generators.
        random.seed(seed + index)
        np.random.seed((seed + index) % 2**32)
        item = dataset[index]
        question, answer = str(item["question"]), item["answer"]
        if question in seen:
            continue
        seen.add(question)
        yield {
            "key": f"reasoning_gym/{label}/{seed + index}",
            "question": question,
            "answers": [] if answer is None else [str(answer)],
            "dataset": spec["name"],
            "options": spec["options"],
            "seed": seed,
            "size": num_items,
            "index": index,
        }


def main() -> None:
    """Read a request from standard input and write rows or an error to standard output. Output of the package
    goes to standard error.
    """
    answer: dict[str, Any]
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as out:
        os.dup2(2, 1)
        try:
            answer = {"rows": make_rows(json.load(sys.stdin))}
        except (ConfigError, DataError) as error:
            answer = {"raised": type(error).__name__, "message": str(error)}
        json.dump(answer, out)


if __name__ == "__main__":
    main()
