"""What an unknown key or name is answered with: suggestions that work in the configuration at hand, the type
that has the key, and presets as types.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from outrider.cli import main
from outrider.config import validate
from outrider.errors import ConfigError
from outrider.plugins.registry import BUILT_IN, load_settings_class, preset_types
from outrider.training.settings import RunSettings

BASE: dict[str, Any] = {"environment": {"type": "factbook"}, "algorithm": {"type": "grpo"}}


def refusal(tree: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as error:
        validate(RunSettings, tree)
    return str(error.value)


def put(tree: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    copied = {key: dict(one) if isinstance(one, dict) else one for key, one in tree.items()}
    *above, key = path.split(".")
    inner = copied
    for part in above:
        inner[part] = dict(inner.get(part, {}))
        inner = inner[part]
    inner[key] = value
    return copied


@pytest.mark.parametrize(
    ("path", "sections", "message"),
    [
        ("algorithm.first_wave", {}, "first_wave belongs to type arpo, yours is grpo"),
        ("algorithm.temperature", {}, "temperature belongs to type rollout_replay, yours is grpo"),
        ("algorithm.first_wave", {"algorithm": {"type": "empo2"}}, "belongs to type arpo, yours is empo2"),
        ("algorithm.branch", {}, "branch belongs to types rapo and combined, yours is grpo"),
        ("algorithm.num_generated", {"algorithm": {"type": "empo2"}}, "unknown key"),
        ("algorithm.loss.ratio_cap", {}, ": ratio_cap belongs to type cispo, yours is clip"),
        ("environment.corpus", {}, "corpus belongs to type tools, yours is factbook"),
        ("environment.task_types", {}, "task_types belongs to type alfworld, yours is factbook"),
        ("engine.max_rows", {"engine": {"type": "vllm"}}, "yours is vllm"),
        ("algorithm.first_wav", {}, "did you mean first_wave? It belongs to type arpo, yours is grpo"),
        ("algorithm.first_wave", {"algorithm": {"type": "rapo"}}, "did you mean algorithm.branch.first_wave"),
        ("train.batch_size", {}, "did you mean train.tasks_per_step?"),
        ("rollout.n", {}, "did you mean algorithm.group_size?"),
        ("algorithm.num_generations", {}, "did you mean algorithm.group_size?"),
        ("optimizer.lr", {}, "did you mean optimizer.learning_rate?"),
        ("algorithm.kl_coef", {}, "did you mean algorithm.kl_weight?"),
        ("algorithm.beta", {}, "did you mean algorithm.kl_weight or optimizer.beta2?"),
        ("train.max_steps", {}, "did you mean train.num_steps?"),
        ("rollout.max_new_tokens", {}, "mean rollout.max_turn_tokens or rollout.max_response_tokens?"),
        ("optimizer.grad_clip", {}, "did you mean optimizer.max_grad_norm?"),
        ("rollout.temperature", {}, "evaluation.temperature is that of evaluations"),
        ("rollout.top_p", {}, "temperature 1, without top_p"),
        ("engine.min_p", {}, "temperature 1, without top_p"),
        ("optimizer.lr_scheduler", {}, "constant after a linear warm-up of optimizer.warmup_steps"),
        ("optimizer.lr_scheduler_type", {}, "constant after a linear warm-up of optimizer.warmup_steps"),
        ("optimizer.warmup_ratio", {}, "constant after a linear warm-up of optimizer.warmup_steps"),
        ("train.learning_rate", {}, "did you mean cold_start.learning_rate or optimizer.learning_rate?"),
        ("trackers.wandb", {}, "trackers: is a list and has no keys (wandb)"),
        ("buffer.embedder.type", {}, "buffer.embedder: is a string and has no keys (type)"),
    ],
)
def test_an_unknown_key_names_the_type_that_has_it(path: str, sections: dict[str, Any], message: str) -> None:
    assert message in refusal(put({**BASE, **sections}, path, 1))


@pytest.mark.parametrize("name", ["arpo", "aepo"])
def test_a_first_wave_larger_than_the_group_names_the_keys_to_set(name: str) -> None:
    message = refusal({**BASE, "algorithm": {"type": name, "group_size": 4, "first_wave": 8}})
    assert "set algorithm.first_wave to at most 4, or algorithm.group_size to at least 8" in message


def test_a_branch_larger_than_the_group_names_the_keys_to_set() -> None:
    branch = {"first_wave": 8}
    message = refusal({**BASE, "algorithm": {"type": "combined", "group_size": 4, "branch": branch}})
    assert "set algorithm.branch.first_wave to at most 4, or algorithm.group_size to at least 8" in message


def test_a_key_of_a_tool_names_the_tool_that_has_it(tmp_path: Path) -> None:
    own = {"path": str(tmp_path / "q.jsonl")}
    tools = [{"type": "mcp", "max_page_chars": 500}]
    tree = {**BASE, "environment": {"type": "tools", "tools": tools, "train": own}}
    assert "max_page_chars belongs to type browser, yours is mcp" in refusal(tree)


def _keys(section: type[BaseModel]) -> Iterator[str]:
    yield from section.model_fields


@pytest.mark.parametrize("kind", ["algorithms", "environments", "engines"])
def test_no_suggestion_leads_to_another_unknown_key(kind: Any) -> None:
    """For every type, and every key that another type has: an eighth of the keys with each."""
    section = {"algorithms": "algorithm", "environments": "environment", "engines": "engine"}[kind]
    keys = sorted({key for name in BUILT_IN[kind] for key in _keys(load_settings_class(kind, name))})
    for number, name in enumerate(BUILT_IN[kind]):
        tree = {**BASE, section: {"type": name}}
        for key in keys[number % 8 :: 8]:
            if key in load_settings_class(kind, name).model_fields:
                continue
            path = f"{section}.{key}"
            message = refusal(put(tree, path, 1))
            line = next(one for one in message.split("; ") if one.startswith(f"{path}: unknown key"))
            assert f"yours is {name}" in line or "did you mean" in line, message
            whole = message[message.index(path) :]
            for suggested in re.findall(r"did you mean ([\w.]+)(?: or ([\w.]+))?\?", whole):
                for one in filter(None, suggested):
                    if "." in one:
                        try:
                            validate(RunSettings, put(tree, one, 1))
                        except ConfigError as error:
                            assert f"{one}: unknown key" not in str(error), (path, one, str(error))


@pytest.mark.parametrize(
    ("spelled", "owner", "preset"),
    [
        ("aepo", "arpo", "aepo"), ("dapo", "grpo", "dapo-paper"), ("drgrpo", "grpo", "dr-grpo"),
        ("Dr. GRPO", "grpo", "dr-grpo"), ("dr_grpo", "grpo", "dr-grpo"), ("gspo", "grpo", "gspo"),
        ("cispo", "grpo", "cispo-paper"), ("DAPO-official", "grpo", "dapo-official"),
        ("reinforce++-baseline", "reinforce++", "reinforce++-baseline"),
        ("tree-grpo-official", "tree_grpo", "tree-grpo-official"),
    ],
)  # fmt: skip
def test_a_preset_as_type_is_the_long_spelling(spelled: str, owner: str, preset: str) -> None:
    short = validate(RunSettings, {**BASE, "algorithm": {"type": spelled}})
    assert short == validate(RunSettings, {**BASE, "algorithm": {"type": owner, "preset": preset}})
    assert short.model_dump() == validate(RunSettings, short.model_dump()).model_dump()


@pytest.mark.parametrize("spelled", sorted(preset_types("algorithms")))
def test_every_preset_may_be_a_type_and_explicit_settings_win(spelled: str) -> None:
    settings = validate(RunSettings, {**BASE, "algorithm": {"type": spelled, "kl_weight": 0.125}})
    assert settings.algorithm.kl_weight == 0.125
    assert (settings.algorithm.type, settings.algorithm.preset) == preset_types("algorithms")[spelled]


def test_a_preset_and_another_one_contradict() -> None:
    assert "contradicts" in refusal({**BASE, "algorithm": {"type": "aepo", "preset": "arpo-released"}})
    official = {"type": "dapo", "preset": "dapo-official"}
    assert validate(RunSettings, {**BASE, "algorithm": official}).algorithm.preset == "dapo-official"


@pytest.mark.parametrize(
    ("path", "name", "message"),
    [
        ("algorithm.type", "dpao", "did you mean dapo?"),
        ("algorithm.type", "wandb", "it is one of the trackers"),
        ("engine.type", "hermes", "it is one of the call formats"),
        ("environment.type", "grpo", "it is one of the algorithms"),
        ("trackers", ["minilm"], "it is one of the embedders"),
    ],
)
def test_an_unknown_name_lists_presets_and_finds_other_kinds(path: str, name: Any, message: str) -> None:
    line = refusal(put(BASE, path, name))
    assert message in line and "\n" not in line
    assert ("presets: " in line and "aepo" in line) == path.startswith("algorithm")


def test_the_list_has_presets(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "algorithms"]) == 0
    listed = capsys.readouterr().out
    for name in ("aepo", "dapo", "dr-grpo", "gspo", "cispo", "rloo", "reinforce++-baseline"):
        assert re.search(rf"{re.escape(name)}\s+.* of \S+", listed), name
