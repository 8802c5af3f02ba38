"""Items of reasoning-gym's data sets as tasks, split; no question comes twice."""

from collections.abc import Iterator
from importlib.metadata import version
from itertools import islice
from typing import Any, Final

from outrider.environments.gym.generators import Drawn, OwnDraws
from outrider.environments.reasoning_gym.settings import SPLITS, Generator, ReasoningGymConfig
from outrider.errors import ConfigError, DataError
from outrider.plugins.imports import told_of
from outrider.types import Json, Task

_ITEMS_PER_TASK: Final = 20
"""Items that are looked at for each task: small data sets repeat their questions."""


def generate(config: ReasoningGymConfig) -> dict[str, tuple[Task, ...]]:
    """All splits, in their fixed order. Raises ConfigError for a data set or an option that there is not,
    DataError where a data set has too few different questions.
    """
    sizes = dict(zip(SPLITS, (config.num_train, config.num_valid, config.num_test), strict=True))
    seen: set[str] = set()
    splits = {}
    # Some generators draw from the global generators, on top of the seed that they are given.
    with OwnDraws(Drawn.of_seed(config.seed), timeout_s=600.0).inside():
        for split, size in sizes.items():
            splits[split] = _split(config, split, size, seen)
    return splits


def _split(config: ReasoningGymConfig, split: str, size: int, seen: set[str]) -> tuple[Task, ...]:
    num = len(config.datasets)
    shares = [(size + num - 1 - number) // num for number in range(num)]
    columns = [
        list(islice(_new(one, split, config.first_seed(split), share * _ITEMS_PER_TASK, seen), share))
        for one, share in zip(config.datasets, shares, strict=True)
    ]
    for one, share, tasks in zip(config.datasets, shares, columns, strict=True):
        if len(tasks) < share:
            raise DataError(
                f"reasoning-gym: {one.name} has {len(tasks)} new questions for {split}, "
                f"not {share}: fewer tasks, or options that make more"
            )
    return tuple(columns[index % num][index // num] for index in range(size))


def _new(one: Generator, split: str, seed: int, num_items: int, seen: set[str]) -> Iterator[Task]:
    dataset = data_set(one.name, one.options, seed, num_items)
    for index in range(num_items):
        item = dataset[index]
        if str(item["question"]) not in seen:
            seen.add(str(item["question"]))
            yield _task(one, split, seed, num_items, index, item)


def _task(one: Generator, split: str, seed: int, num_items: int, index: int, item: Any) -> Task:
    options: dict[str, Json] = dict(one.options)
    answer = item["answer"]
    return Task(
        key=f"reasoning_gym/{one.name}/{split}/{seed + index}",
        question=str(item["question"]),
        answers=() if answer is None else (str(answer),),
        metadata={
            "dataset": one.name,
            "options": options,
            "seed": seed,
            "size": num_items,
            "index": index,
            "package": f"reasoning-gym {version('reasoning-gym')}",
        },
    )


def data_set(name: str, options: dict[str, Any], seed: int, size: int) -> Any:
    """A data set of the package. Raises ConfigError for one that it cannot make."""
    import reasoning_gym

    try:
        return reasoning_gym.create_dataset(name, seed=seed, size=size, **options)
    except (ValueError, TypeError, AssertionError) as error:
        raise ConfigError(f"reasoning-gym cannot make {name!r}{told_of(error)}") from error
