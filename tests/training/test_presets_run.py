"""Every preset trains: one step on the tiny model, with its update and an evaluation."""

import json
import math
import re
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from outrider.algorithms.distill import DISTILL_PRESETS
from outrider.plugins.registry import preset_types, read_settings
from tests.golden.cases import recipe
from tests.golden.record import play_tree, write_inputs

OF_TYPES = dict(sorted((preset, kind) for kind, preset in preset_types("algorithms").values()))
FORM = re.compile(r"-(paper|released|official|advised|trl|verl)$")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    write_inputs(folder)
    return folder


@pytest.mark.long
@pytest.mark.parametrize("name", OF_TYPES)
def test_every_preset_trains_a_step(name: str, root: Path, tmp_path: Path) -> None:
    tree = recipe(name, "tiny", root=root, run=tmp_path / "run")
    tree["train"] |= {"num_steps": 1}
    [step] = play_tree(tree, "tiny", folder=tmp_path / "folder")
    assert step["gradients"] and step["rows"]
    assert all(value is None or math.isfinite(value) for value in step["shown"].values())


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in DISTILL_PRESETS if name != "none"])
def test_every_preset_of_self_distillation_trains_a_step(name: str, root: Path, tmp_path: Path) -> None:
    # demonstrations are those of an environment with experts
    has_expert = "demonstration" in DISTILL_PRESETS[name]["help"]
    case, player = ("gigpo, house", "scripted") if has_expert else ("grpo", "tiny")
    distill: dict[str, Any] = {"preset": name, "max_help_tokens": 60}
    if "file" in DISTILL_PRESETS[name]["help"]:
        distill["path"] = str(tmp_path / "help.jsonl")
        (tmp_path / "help.jsonl").write_text(json.dumps({"text": "look twice", "task": "*"}) + "\n")
    tree = recipe(case, player, root=root, run=tmp_path / "run")  # type: ignore[arg-type]
    tree["train"] |= {"num_steps": 1}
    tree["algorithm"] = {"type": "grpo", "group_size": 4, "distill": distill}
    [step] = play_tree(tree, player, folder=tmp_path / "folder")  # type: ignore[arg-type]
    assert step["rows"] and all(value is None or math.isfinite(value) for value in step["shown"].values())


def test_forms_of_one_method_are_presets_of_their_own() -> None:
    """The paper, the released code and what its authors advise differ, and no name stands for two of them."""
    methods: dict[tuple[str, str], list[str]] = {}
    for name, kind in OF_TYPES.items():
        methods.setdefault((kind, FORM.sub("", name)), []).append(name)
    forms = {key: names for key, names in methods.items() if len(names) > 1}
    assert {method for _, method in forms} >= {"aepo", "cispo", "dapo", "gigpo", "luffy", "rloo"}
    for (kind, _), names in forms.items():
        section = {"memory": {"embedder": "hash"}} if kind == "empo2" else {}
        filled = {
            name: read_settings("algorithms", {"type": kind, "preset": name, **section}).model_dump(
                exclude={"preset"}
            )
            for name in names
        }
        for one, other in combinations(names, 2):
            assert filled[one] != filled[other], f"{one} and {other} are the same settings"
