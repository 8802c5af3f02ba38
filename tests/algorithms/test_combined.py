"""Several methods in one run: parts that are off change no bit of whole runs; modes, errors and shares."""

import json
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.algorithms.entropy_branching import BranchHook, BranchSettings
from outrider.algorithms.exploration import (
    ArpoSettings,
    Combined,
    CombinedSettings,
    Empo2Settings,
    RapoSettings,
)
from outrider.algorithms.retrieval import (
    RetrievalAdvantageSettings,
    RetrievalHook,
    RetrievalSettings,
    retrieved_share,
)
from outrider.algorithms.tips import PLAIN, TipHook, TipSettings, tip_mode
from outrider.config import validate
from outrider.errors import ConfigError
from outrider.memory.embedders import HashEmbedder, load_embedder
from outrider.memory.step_buffer import StepTraceBuffer
from outrider.rollout.hooks import HYBRID, has_part
from outrider.trace import without_memory
from outrider.training.settings import RunSettings
from outrider.types import Origin
from tests.algorithms.builders import add_node, new_trace
from tests.golden.cases import BUFFER, FORKS, MEMORY, recipe
from tests.golden.record import play_tree, write_inputs

ROOT = Path(__file__).parents[2]
SHARED: dict[str, Any] = {
    "group_size": 6,
    "loss": {"clip_low": 0.2, "clip_high": 0.3, "dual_clip": None},
    "aggregation": "token_mean",
}
FORK = {key: FORKS[key] for key in ("first_wave", "base_probability", "window")}
REWARD = {"num_hybrid": 3, "advantage_weight": 0.5, "ratio_weight": 0.3}
TIPS = {"memory_probability": 0.8, "memory": {**MEMORY, "scope": "all"}, "intrinsic_coefficient": 0.05}
SECTIONS: dict[str, dict[str, Any]] = {
    "retrieval": {**REWARD, "probability": 0.8},
    "branch": {**FORK, "entropy_advantage": 0.2},
    "tips": TIPS,
}
OFF: dict[str, dict[str, Any]] = {
    "retrieval": {**SECTIONS["retrieval"], "num_hybrid": 0},
    "branch": {**FORK, "first_wave": SHARED["group_size"]},
    "tips": {**TIPS, "memory_probability": 0.0, "intrinsic_coefficient": 0.0},
}
ALONE: dict[tuple[str, ...], dict[str, Any]] = {
    (): {"type": "grpo"},
    ("retrieval",): {"type": "rapo", **REWARD, "retrieval": {"probability": 0.8}},
    ("branch",): {"type": "arpo", **SECTIONS["branch"]},
    ("tips",): {"type": "empo2", **TIPS},
    ("retrieval", "branch"): {"type": "rapo", **REWARD, "retrieval": {"probability": 0.8}, "branch": FORK},
}
PARTS = {
    "retrieval": RetrievalSettings,
    "reward": RetrievalAdvantageSettings,
    "branch": BranchSettings,
    "tips": TipSettings,
}
SUBSETS = [
    tuple(name for number, name in enumerate(SECTIONS) if mask >> number & 1)
    for mask in range(2 ** len(SECTIONS))
]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("combined") / "inputs"
    write_inputs(root)
    return root


def combined(*names: str, plain_branch: bool = False) -> dict[str, Any]:
    own = {name: SECTIONS[name] for name in names}
    if plain_branch and "branch" in own:
        own["branch"] = FORK
    return {"type": "combined", **own}


@pytest.fixture(scope="module")
def play(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[dict[str, Any]]]:
    """Return two steps of a scripted run: traces, advantages, gradients, rows, weights, moments, state and
    metrics. Equal runs are made once.
    """
    found: dict[str, list[dict[str, Any]]] = {}

    def run(algorithm: Mapping[str, Any], **train: Any) -> list[dict[str, Any]]:
        key = json.dumps([algorithm, train], sort_keys=True)
        if key not in found:
            folder = tmp_path_factory.mktemp("run")
            tree = recipe("grpo", "scripted", root=inputs, run=folder / "run")
            tree["algorithm"] = {**SHARED, **algorithm}
            tree["buffer"] = {name: value.replace("{root}", str(inputs)) for name, value in BUFFER.items()}
            tree["train"] |= {"num_steps": 2, **train}
            found[key] = play_tree(tree, "scripted", folder=folder)
        return found[key]

    return run


@pytest.mark.parametrize("names", [(), ("retrieval", "branch")], ids="+".join)
def test_with_these_sections_it_is_that_method_bit_for_bit(
    play: Callable[..., Any], names: tuple[str, ...]
) -> None:
    own = play(combined(*names, plain_branch=True))
    assert own == play(ALONE[names])
    assert any(step["gradients"] for step in own)


@pytest.mark.parametrize("names", list(ALONE)[1:], ids="+".join)
def test_a_section_has_the_settings_of_its_method(names: tuple[str, ...]) -> None:
    """All types are one algorithm that reads the parts of its settings, so equal parts are equal runs."""
    types: dict[str, Any] = {"rapo": RapoSettings, "arpo": ArpoSettings, "empo2": Empo2Settings}
    method = ALONE[names]
    tables = [(combined(*names, plain_branch=len(names) > 1), method)]
    if len(names) == 1:  # the defaults
        tables.append(({"type": "combined", names[0]: {}}, {"type": method["type"]}))
    for table, own in tables:
        one = validate(CombinedSettings, {"group_size": 16} | table).parts
        other = validate(types[method["type"]], {"group_size": 16} | own).parts
        for part, settings_type in PARTS.items():
            found = [
                value and {key: getattr(value, key) for key in settings_type.model_fields}
                for value in (getattr(one, part), getattr(other, part))
            ]
            assert found[0] == found[1], part
        assert one.entropy_advantage == other.entropy_advantage


@pytest.mark.parametrize(
    "names",
    [one if one in ((), ("retrieval",), ("tips",)) else pytest.param(one, marks=pytest.mark.slow)
     for one in SUBSETS[:-1]],
    ids="+".join,
)  # fmt: skip
def test_a_part_that_is_off_changes_no_bit_of_the_others(
    play: Callable[..., Any], names: tuple[str, ...]
) -> None:
    """Off by its own settings, or left out: the same advantages, gradients, weights and moments."""
    off = {name: OFF[name] for name in SECTIONS if name not in names}
    one, other = play(combined(*names) | off), play(combined(*names))
    kinds = ("credit", "gradients", "masters", "optimizer")
    assert [[step[kind] for kind in kinds] for step in one] == [
        [step[kind] for kind in kinds] for step in other
    ]


def test_the_number_of_concurrent_rollouts_changes_no_bit(play: Callable[..., Any]) -> None:
    runs = [play(combined(*SECTIONS), max_concurrent=number) for number in (1, 8)]
    # rows of a branching run have the keys of their metadata in the order of arrival
    one, other = ([{key: step[key] for key in step if key != "rows"} for step in run] for run in runs)
    assert one == other
    assert {"retrieval", "branch", "tips"} <= one[-1]["metrics"].keys()


@pytest.mark.parametrize("name", ["combined-factbook", "combined-house"])
def test_the_recipes_run_in_tiny_form(inputs: Path, tmp_path: Path, name: str) -> None:
    """With their own algorithm; model, tasks and limits are those of the tests."""
    own = tomllib.loads((ROOT / "recipes" / f"{name}.toml").read_text())["algorithm"]
    own["tips"]["memory"]["embedder"] = "hash"
    tree = recipe("combined, house" if "house" in name else "combined", "scripted",
                  root=inputs, run=tmp_path / "run")  # fmt: skip
    tree["algorithm"] = own
    tree["train"]["num_steps"] = 2
    found = play_tree(tree, "scripted", folder=tmp_path)
    assert {"retrieval", "branch", "tips"} <= found[-1]["metrics"].keys()
    assert any(step["gradients"] for step in found)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"branch": {"attribution": "hard"}, "retrieval": {}}, "hard needs ratio_weight = 0"),
        ({"retrieval": {}, "loss": {"type": "gppo"}}, "does not support RAPO's ratio"),
        ({"retrieval": {"num_hybrid": 9}}, "num_hybrid 9 exceeds group_size 8"),
        ({"branch": {"first_wave": 9}}, "first_wave 9 exceeds group_size 8"),
        ({"branch": {}, "loss": {"type": "gspo"}}, "use ratios of tokens"),
        ({"tips": {}, "loss": {"type": "reinforce"}}, "has no ratio"),
        ({"tips": {}, "loss": {"type": "gspo"}}, "student_mask cannot mask single tokens"),
        ({"retrieval": {"quality": False, "timing": "none"}}, "is no retrieval reward"),
        ({"retrieval": {"mode": "execute"}}, "needs a stateful environment"),
    ],
)
def test_combinations_without_meaning_are_errors_of_one_line(table: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as found:
        validate(
            RunSettings, {"environment": {"type": "factbook"}, "algorithm": {"type": "combined", **table}}
        )
    assert "\n" not in str(found.value)


@pytest.mark.parametrize("kind", ["gspo", "reinforce"])
def test_without_tips_the_losses_without_a_ratio_of_tokens_are_allowed(kind: str) -> None:
    for tips in ("none", {"memory_probability": 0.0}):
        found = validate(CombinedSettings, {"type": "combined", "loss": {"type": kind}, "tips": tips})
        assert found.loss.type == kind


@settings(max_examples=12)
@given(
    size=st.integers(2, 9), hybrid=st.integers(0, 9), p=st.floats(0, 1), step=st.integers(0, 40),
    group=st.integers(0, 3),
)  # fmt: skip
def test_the_modes_are_those_of_both_methods(size: int, hybrid: int, p: float, step: int, group: int) -> None:
    num_hybrid = min(size, hybrid)
    table = {
        "group_size": size, "retrieval": {"num_hybrid": num_hybrid},
        "tips": {"memory_probability": p, "memory": {"embedder": "hash"}},
    }  # fmt: skip
    both = Combined(validate(CombinedSettings, {"type": "combined", **table}), embedder=HashEmbedder())
    table.pop("retrieval")
    tips = Combined(validate(CombinedSettings, {"type": "combined", **table}), embedder=HashEmbedder())
    modes = both.modes_of(step, group)
    assert [has_part(mode, HYBRID) for mode in modes] == [i >= size - num_hybrid for i in range(size)]
    assert [tip_mode(mode) for mode in modes] == list(tips.modes_of(step, group))
    assert tip_mode("hybrid") == tip_mode("on_policy") == PLAIN


def test_tips_come_before_a_retrieved_text_and_after_a_retrieved_turn(
    tmp_path: Path,
) -> None:
    chosen = validate(CombinedSettings, {"type": "combined", **SHARED, **SECTIONS})
    with StepTraceBuffer(tmp_path / "b.sqlite", load_embedder("hash"), mode="write") as buffer:
        method = Combined(chosen, buffer=buffer, embedder=HashEmbedder(), vocabulary_size=9)
        assert [type(hook) for hook in method.hooks] == [TipHook, RetrievalHook, BranchHook]
        assert method.remembers and len(method.counts()) == 1 and method.label == "combined"
        table = {**SECTIONS, "retrieval": {**SECTIONS["retrieval"], "mode": "execute", "form": "turn"}}
        chosen = validate(CombinedSettings, {"type": "combined", **SHARED, **table})
        method = Combined(chosen, buffer=buffer, embedder=HashEmbedder(), vocabulary_size=9)
        assert [type(hook) for hook in method.hooks] == [RetrievalHook, TipHook, BranchHook]
    bare = Combined(validate(CombinedSettings, {"type": "combined"}))
    assert not bare.remembers and bare.hooks == () and bare.label == "grpo"


def test_tips_are_in_no_retrieved_share() -> None:
    """Otherwise the weight of a ratio would depend on a rendering that the update does not see."""
    trace, node = new_trace(), None
    for origin, num in ((Origin.PROMPT, 4), (Origin.MEMORY, 50), (Origin.PROMPT, 2), (Origin.POLICY, 6),
                        (Origin.ENVIRONMENT, 3), (Origin.MEMORY, 20), (Origin.ENVIRONMENT, 1),
                        (Origin.BUFFER, 5), (Origin.POLICY, 5)):  # fmt: skip
        node = add_node(trace, node, origin, num_tokens=num)
    assert node is not None
    path = trace.path(node.node_id)
    assert retrieved_share(path) == retrieved_share(without_memory(path)) == 5 / 20
