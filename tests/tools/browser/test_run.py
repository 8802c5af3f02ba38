"""A run with the tool ``browser`` in its recipe: training, record, resume."""

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

import outrider
from outrider.errors import CheckpointError, ConfigError
from tests.tiny import save_tiny_model
from tests.tools.browser.pages import ROWS


@pytest.fixture
def recipe(tmp_path: Path) -> dict[str, Any]:
    data, corpus, pages = (tmp_path / f"{name}.jsonl" for name in ("qa", "corpus", "pages"))
    data.write_text('{"question": "How high?", "answer": "330"}\n' * 4)
    for file in (corpus, pages):
        file.write_text("".join(json.dumps(row) + "\n" for row in ROWS), encoding="utf-8")
    browser = {
        "type": "browser",
        "reader": {"type": "bm25", "passage_chars": 80},
        "fetch": {"allowed_hosts": ["127.0.0.1:9"]},
    }
    return {
        "model": {"name": str(save_tiny_model(tmp_path / "model")), "precision": "float32"},
        "num_threads": 1,
        "environment": {
            "type": "tools",
            "tools": ["search", browser],
            "corpus": str(corpus),
            "pages": str(pages),
            "train": {"path": str(data)},
            "test": {"path": str(data)},
        },
        "algorithm": {"type": "grpo", "group_size": 2},
        "rollout": {"max_turns": 2, "max_turn_tokens": 8, "max_response_tokens": 16},
        "train": {"num_steps": 1, "tasks_per_step": 1},
        "evaluation": {"num_tasks": 1},
    }


def test_a_run_with_a_browser_resumes_only_with_the_same_pages(
    tmp_path: Path, recipe: dict[str, Any]
) -> None:
    folder = tmp_path / "run"
    assert outrider.train(recipe, run=folder, progress="none").steps() == (1,)
    written = tomllib.loads((folder / "config.toml").read_text(encoding="utf-8"))
    assert written["environment"]["tools"][1]["fetch"]["allowed_hosts"] == ["127.0.0.1:9"]
    more = ["train.num_steps=2"]
    assert outrider.train(resume=folder, overrides=more, progress="none").steps() == (1, 2)
    with (tmp_path / "pages.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"title": "New", "text": "new"}\n')
    with pytest.raises(CheckpointError, match=r"not what this run began with: environment\.pages"):
        outrider.train(resume=folder, overrides=["train.num_steps=3"], progress="none")


@pytest.mark.parametrize(
    ("table", "reason"),
    [
        ({"raeder": {"type": "none"}}, "reader"),
        ({"fetch": {}}, "allowed_hosts"),
        ({"fetch": {"allowed_hosts": []}}, "allowed_hosts"),
        ({"fetch": {"allowed_hosts": ["https://a.org"]}}, "is no host"),
        ({"reader": {"type": "model"}}, "endpoint"),
        ({"reader": {"type": "endpoint"}}, "endpoint"),
        ({"max_chars": 0}, "max_chars"),
    ],
)
def test_invalid_settings_are_refused_before_the_run_starts(
    tmp_path: Path, recipe: dict[str, Any], table: dict[str, Any], reason: str
) -> None:
    recipe["environment"]["tools"][1] = {"type": "browser", **table}
    with pytest.raises(ConfigError, match=reason):
        outrider.train(recipe, run=tmp_path / "run", progress="none")
    assert not (tmp_path / "run").exists()
