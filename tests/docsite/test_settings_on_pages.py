"""Every TOML block of README and the documents consists of settings that exist."""

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from outrider.config import load_settings
from outrider.errors import ConfigError
from outrider.training.settings import RunSettings

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```toml[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
BLOCKS = [
    pytest.param(block, id=f"{page.relative_to(ROOT)}:{number}")
    for page in PAGES
    for number, block in enumerate(BLOCK.findall(page.read_text(encoding="utf-8")))
]
# Types that a block without one may belong to.
TYPES = [(environment, algorithm) for environment in ("factbook", "tools") for algorithm in ("grpo", "rapo")]
# Files, extras and plug-ins of the reader need not exist here.
_MISSING = re.compile(r"no such file|does not exist|no module|cannot import|needs|not installed")


@pytest.mark.parametrize("block", BLOCKS)
def test_the_settings_of_a_block_exist(block: str, tmp_path: Path) -> None:
    tree = tomllib.loads(block)
    if not set(tree) <= set(RunSettings.model_fields):
        pytest.skip("no part of a recipe")
    errors = [_error(tree, types, tmp_path / "recipe.toml") for types in TYPES]
    assert any(error is None or _MISSING.search(error) for error in errors), errors


def _error(tree: dict[str, Any], types: tuple[str, str], recipe: Path) -> str | None:
    sections = {
        name: {"type": kind} | tree.get(name, {})
        for name, kind in zip(("environment", "algorithm"), types, strict=True)
    }
    lines = [f"{key} = {_toml(value)}" for key, value in (tree | sections).items()]
    recipe.write_text("\n".join(lines), encoding="utf-8")
    try:
        load_settings(RunSettings, file=recipe, overrides=[])
    except ConfigError as error:
        return str(error)
    return None


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {_toml(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    if isinstance(value, bool):
        return str(value).lower()
    return json.dumps(value) if isinstance(value, str) else str(value)
