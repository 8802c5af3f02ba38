"""The runs of the frozen corpus: the golden cases of the tiny model, and features that those do not use."""

from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

from tests.golden import record
from tests.golden.cases import BASE, CASES, FORKS, MEMORY, SCRIPTED_ONLY, _filled, recipe
from tests.training.tool_run import write_house_model, write_python_model

_HOUSE = {
    "model": {"name": "{root}/model-house"},
    "environment": {
        "type": "house",
        "house": {"num_rooms": 2, "num_things": 2},
        "num_train": 2,
        "num_test": 1,
        "max_moves": 4,
    },
    "rollout": {"max_turn_tokens": 1, "max_response_tokens": 1200},
}
_AGENT = {
    "type": "agent",
    "function": "tests.environments.agents.programs:chatty",
    "is_repeatable": True,
    "train": {"path": "{root}/tasks.jsonl"},
    "test": {"path": "{root}/tasks.jsonl", "limit": 3},
}
_GRPO = {"type": "grpo", "group_size": 4}
_ARPO = {"type": "arpo", **FORKS}
MORE: Mapping[str, Mapping[str, Any]] = {
    "lora": {"algorithm": _GRPO, "model": {"lora": {"rank": 2}}},
    "trained layers": {"algorithm": _GRPO, "model": {"trained_layers": 1}},
    "cold start": {
        "algorithm": _GRPO,
        "cold_start": {"num_examples": 4, "batch_size": 2, "demonstrations": "{root}/shown.jsonl"},
    },
    "python tool": {
        "algorithm": _ARPO,
        "model": {"name": "{root}/model-python"},
        "environment": {
            **BASE["environment"],
            "tools": ["search", "python"],
            "python": {"num_servers": 1},
        },
    },
    "agent": {
        "algorithm": _ARPO,
        "environment": _AGENT,
        "buffer": {"embedder": "hash"},
        "rollout": {"max_turns": 6, "max_response_tokens": 400},
    },
    "empo2, rnd": {
        "algorithm": {
            "type": "empo2",
            "group_size": 4,
            "memory_probability": 0,
            "memory": {"embedder": "hash"},
            "novelty": "rnd",
        }
    },
    "gigpo, tiny house": {"algorithm": {"type": "gigpo", "group_size": 4, "similarity": 0.9}, **_HOUSE},
    "combined, tiny house": {
        "algorithm": {
            "type": "combined",
            "group_size": 6,
            "retrieval": {"num_hybrid": 3, "probability": 0.8, "mode": "execute"},
            "branch": {key: FORKS[key] for key in ("first_wave", "base_probability", "window")},
            "tips": {"memory_probability": 0.8, "memory": {**MEMORY, "scope": "all"}},
        },
        "buffer": {"embedder": "hash"},
        **_HOUSE,
    },
}


def write_inputs(root: Path) -> None:
    """Models, tasks, corpus, buffer and demonstrations of all runs."""
    record.write_inputs(root)
    write_python_model(root / "model-python")
    write_house_model(root / "model-house")


def recipes(root: Path) -> dict[str, dict[str, Any]]:
    """Every run of the corpus as a recipe, by the name of its case."""
    made = {case: recipe(case, "tiny", root=root, run=root) for case in CASES if case not in SCRIPTED_ONLY}
    for case, sections in MORE.items():
        tree = deepcopy(dict(BASE))
        for section, values in sections.items():
            tree[section] = values if section == "environment" else {**tree.get(section, {}), **values}
        made[case] = _filled(tree, {"{root}": str(root)})
    return made
