"""The runs of the golden record, as recipes: the one place that a renamed setting touches.

Nothing of this file is part of a hash. A case is played with the scripted engine and with the tiny real
model, unless it is among :data:`SCRIPTED_ONLY`.
"""

from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any, Literal

from outrider.algorithms.exploration import ARPO_PRESETS as ARPO
from outrider.algorithms.exploration import EMPO2_PRESETS as EMPO2
from outrider.algorithms.luffy import PRESETS as LUFFY
from outrider.algorithms.presets import GIGPO_PRESETS, GRPO_PRESETS, REINFORCE_PLUS_PLUS_PRESETS
from outrider.algorithms.rollout_replay import PRESETS as REPLAY
from outrider.algorithms.tree_grpo import PRESETS as TREE

Table = Mapping[str, Any]
Player = Literal["scripted", "tiny"]

NUM_STEPS = 3
BASE: Table = {
    "seed": 3,
    "num_threads": 1,
    "model": {"name": "{root}/model", "precision": "float32"},
    "environment": {
        "type": "tools",
        "tools": ["search"],
        "corpus": "{root}/corpus.jsonl",
        "prompt": "none",
        "max_invalid": 4,
        "search": {"top_k": 1},
        "reward": {"require_think": False, "require_boxed": False},
        "train": {"path": "{root}/tasks.jsonl"},
        "test": {"path": "{root}/tasks.jsonl", "limit": 3},
    },
    "rollout": {"max_turns": 4, "max_turn_tokens": 16, "max_response_tokens": 300},
    "train": {
        "num_steps": NUM_STEPS,
        "tasks_per_step": 2,
        "checkpoint_every": 1,
        "keep_checkpoints": NUM_STEPS + 1,
        "max_concurrent": 8,
    },
    "optimizer": {"learning_rate": 1e-3},
    "update": {"num_mini_batches": 2},  # the second step's ratios are not 1
    "evaluation": {"num_tasks": 1, "temperature": 1.0, "at_start": False},
}
PLAYERS: Mapping[Player, Table] = {
    "tiny": {},
    "scripted": {
        "update": {"num_mini_batches": 1, "num_epochs": 2, "max_logprob_gap": 1e9, "max_tokens": 200}
    },
}
HOUSE: Table = {
    "model": {"name": "{root}/model-long"},
    "environment": {
        "type": "house",
        "house": {"num_rooms": 2, "num_things": 2},
        "num_train": 2,
        "num_test": 1,
        "max_moves": 4,
    },
    "rollout": {"max_turns": 5, "max_turn_tokens": 40, "max_response_tokens": 1200},
    "update": {"num_epochs": 1, "max_tokens": 4096},
}
BUFFER: Table = {"embedder": "hash", "path": "{root}/buffer.sqlite"}
DAPO: Table = {
    "group_size": 3,
    "overlong": {"max_tokens": 40, "buffer": 40},
    "dynamic_sampling": {"max_extra_batches": 1},
}
MEMORY: Table = {"embedder": "hash", "min_similarity": 0.1, "max_shown_tokens": 120, "max_tip_tokens": 24}
FORKS: Table = {"group_size": 6, "first_wave": 3, "base_probability": 1.0, "window": 4}


def _algorithm(kind: str, **options: Any) -> Table:
    return {"algorithm": {"type": kind, **options}}


def _grpo(preset: str, *, kind: str = "grpo") -> Table:
    """Presets that leave groups out play a second round."""
    shared: dict[str, Any] = {"preset": preset, "group_size": 2 if preset == "rloo-trl" else 4}
    if preset.startswith("dapo"):
        shared |= DAPO
    elif preset in ("gppo-official", "reinforce++-baseline-official"):
        shared |= {"dynamic_sampling": DAPO["dynamic_sampling"]}
    return _algorithm(kind, **shared)


def _arpo(preset: str) -> Table:
    # its rule forks above the base
    forks = {**FORKS, "base_probability": 0.0} if preset in ("aepo-released", "aepo-advised") else FORKS
    return _algorithm("arpo", preset=preset, **forks)


def _empo2(preset: str, **options: Any) -> Table:
    return _algorithm("empo2", preset=preset, group_size=4, memory_probability=0.6, memory=MEMORY, **options)


def _rapo(**options: Any) -> Table:
    return {**_algorithm("rapo", **{"group_size": 4, "num_hybrid": 2, **options}), "buffer": BUFFER}


def _combined(**options: Any) -> Table:
    """All three methods; tips of all tasks, because no task comes twice."""
    sections: dict[str, Any] = {
        "retrieval": {"num_hybrid": 3, "probability": 0.8},
        "branch": {key: FORKS[key] for key in ("first_wave", "base_probability", "window")},
        "tips": {"memory_probability": 0.8, "memory": {**MEMORY, "scope": "all"}},
    }
    return {**_algorithm("combined", **{"group_size": 6, **sections, **options}), "buffer": BUFFER}


def _replay(preset: str) -> Table:
    return {
        **_algorithm("rollout_replay", preset=preset, group_size=4, buffer_size=5),
        "train": {"tasks_per_step": 4},
    }


CASES: Mapping[str, Table] = (
    {name: _grpo(name) for name in GRPO_PRESETS}
    | {
        "grpo, batch std": _algorithm("grpo", group_size=4, advantage_std="batch"),
        "grpo, engine masks": _algorithm("grpo", group_size=4, sampler_rejection={"upper": 2.0}),
        "grpo, reference": _algorithm("grpo", group_size=4, kl_weight=0.5, kl_estimator="k3_ratio"),
    }
    | {name: _grpo(name, kind="reinforce++") for name in REINFORCE_PLUS_PLUS_PRESETS}
    | {"rejection": _algorithm("rejection", group_size=8, threshold=0.5)}
    | {name: _algorithm("gigpo", preset=name, group_size=4) for name in GIGPO_PRESETS}
    | {"gigpo, std": _algorithm("gigpo", normalization="std", group_size=4)}
    | {"gigpo, house": {**_algorithm("gigpo", group_size=4, similarity=0.9), **HOUSE}}
    | {
        name: _algorithm("luffy", preset=name, group_size=4, demonstrations="{root}/shown.jsonl")
        for name in LUFFY
    }
    | {
        "luffy, split": _algorithm(
            "luffy", statistics="on_policy", group_size=4, demonstrations="{root}/shown.jsonl"
        )
    }
    | {"luffy, experts": {**_algorithm("luffy", group_size=4), **HOUSE}}
    | {name: _replay(name) for name in REPLAY}
    | {name: _algorithm("tree_grpo", preset=name) for name in TREE}
    | {
        f"tree-grpo, {kind}": _algorithm("tree_grpo", combination=kind, num_kept=2)
        for kind in ("inner", "nested")
    }
    | {"lamer": _algorithm("lamer", group_size=4, num_episodes=2, max_reflection_tokens=12)}
    | {name: _arpo(name) for name in ARPO}
    | {"arpo, hard": _algorithm("arpo", attribution="hard", **FORKS)}
    | {"arpo, house": {**_algorithm("arpo", **FORKS), **HOUSE}}
    | {name: _empo2(name) for name in EMPO2}
    | {
        "empo2, environment": {
            **_empo2("empo2"),
            **HOUSE,
            "cold_start": {"num_examples": 4, "tip_share": 0.5},
        }
    }
    | {
        "rapo": _rapo(),
        "rapo, plain": _rapo(num_hybrid=0),
        "rapo, evolve": {**_rapo(), "buffer": {**BUFFER, "evolve": True}},
        "rapo, branch": _rapo(
            group_size=6, branch={key: FORKS[key] for key in ("first_wave", "base_probability", "window")}
        ),
        "rapo, execute": {**_rapo(retrieval={"mode": "execute"}), "buffer": {"embedder": "hash"}, **HOUSE},
        "combined": _combined(),
        "combined, house": {
            **_combined(
                retrieval={"num_hybrid": 3, "probability": 0.8, "mode": "execute"},
                tips={
                    "memory_probability": 0.8,
                    "memory": {**MEMORY, "scope": "all", "max_shown_tokens": 240},
                },
            ),
            "buffer": {"embedder": "hash"},
            **HOUSE,
        },
    }
)
CASES["empo2, environment"]["algorithm"]["memory"] = {  # type: ignore[index]
    **MEMORY,
    "writer": "environment",
    "scope": "world",
}
# its prompts exceed the tiny model
SCRIPTED_ONLY = frozenset(name for name, table in CASES.items() if "environment" in table)
# One preset a page, played in the fast tests; the others are slow.
SAMPLE = (
    "grpo", "dapo-official", "gspo", "rloo-trl", "reinforce++-baseline-official", "rejection", "gigpo",
    "luffy-paper", "rollout-replay-official", "tree-grpo-official", "lamer", "arpo", "aepo-released", "empo2",
    "rapo, evolve", "rapo, execute", "combined",
)  # fmt: skip


def runs(*, sample: bool = False) -> list[tuple[str, Player]]:
    """Every case with every player, in the order of the record."""
    chosen = SAMPLE if sample else tuple(CASES)
    players: tuple[Player, ...] = ("scripted", "tiny")
    return [
        (case, player)
        for case in chosen
        for player in players
        if player == "scripted" or case not in SCRIPTED_ONLY
    ]


def recipe(case: str, player: Player, *, root: Path, run: Path) -> dict[str, Any]:
    """The settings of one run as a tree. An evolving buffer is the run's own."""
    tree = deepcopy(dict(BASE))
    for table in (PLAYERS[player], CASES[case]):
        for section, values in table.items():
            swapped = section == "environment" or section not in tree
            tree[section] = dict(values) if swapped else {**tree[section], **values}
    return _filled(tree, {"{root}": str(root), "{run}": str(run)})


def _filled(value: Any, places: Mapping[str, str]) -> Any:
    if isinstance(value, Mapping):
        return {key: _filled(one, places) for key, one in value.items()}
    if isinstance(value, str):
        for mark, place in places.items():
            value = value.replace(mark, place)
    return value
