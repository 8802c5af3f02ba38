"""Items of reasoning-gym's data sets, split; no question comes twice. Run as a program of its own, which
reads a request and writes rows (:mod:`outrider.environments.reasoning_gym.environment`).
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
"""Items that are looked at for each task: small data sets repeat their questions."""


def make_rows(request: Mapping[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """All splits, in their order. ``request``: ``datasets`` (name and options of each), ``splits`` (size
    and first seed of each).

    Raises ConfigError for a data set or an option that there is not, DataError where a data set has too few
    different questions.
    """
    seen: set[str] = set()
    return {
        split: _split(request["datasets"], split, size, first_seed, seen)
        for split, (size, first_seed) in request["splits"].items()
    }


def _split(
    datasets: Sequence[Mapping[str, Any]], split: str, size: int, seed: int, seen: set[str]
) -> list[dict[str, Any]]:
    num = len(datasets)
    shares = [(size + num - 1 - number) // num for number in range(num)]
    columns = [
        list(islice(_new(dataset, f"{label}/{split}", seed, share * _ITEMS_PER_TASK, seen), share))
        for dataset, label, share in zip(datasets, _labels(datasets), shares, strict=True)
    ]
    for dataset, share, rows in zip(datasets, shares, columns, strict=True):
        if len(rows) < share:
            raise DataError(
                f"reasoning-gym: {dataset['name']} has {len(rows)} new questions for {split}, "
                f"not {share}: fewer tasks, or options that make more"
            )
    return [columns[index % num][index // num] for index in range(size)]


def _labels(datasets: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """A data set that is named again, with other options, has keys of its own."""
    count = Counter[str]()
    for dataset in datasets:
        count[dataset["name"]] += 1
        yield (
            dataset["name"] if count[dataset["name"]] == 1 else f"{dataset['name']}.{count[dataset['name']]}"
        )


def _new(
    spec: Mapping[str, Any], label: str, seed: int, num_items: int, seen: set[str]
) -> Iterator[dict[str, Any]]:
    dataset = data_set(spec["name"], spec["options"], seed, num_items)
    for index in range(num_items):
        # Some generators draw from the global generators, on top of the seed that they are given.
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


def data_set(name: str, options: Mapping[str, Any], seed: int, size: int) -> Any:
    """A data set of the package. Raises ConfigError for one that it cannot make."""
    import reasoning_gym

    try:
        return reasoning_gym.create_dataset(name, seed=seed, size=size, **copy.deepcopy(dict(options)))
    except (ValueError, TypeError, AssertionError) as error:
        raise ConfigError(f"reasoning-gym cannot make {name!r}{describe_exception(error)}") from error


def main() -> None:
    """A request on standard input, rows or what was wrong on standard output; what the package prints goes to
    standard error.
    """
    answer: dict[str, Any]
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as out:
        os.dup2(2, 1)
        try:
            answer = {"rows": make_rows(json.load(sys.stdin))}
        except (ConfigError, DataError) as error:
            answer = {"raised": type(error).__name__, "told": str(error)}
        json.dump(answer, out)


if __name__ == "__main__":
    main()
