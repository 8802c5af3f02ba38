"""``import outrider``: its names, their documentation, and that users need no other import."""

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import outrider
from outrider.scaffold import render

ROOT = Path(__file__).parents[2]
# The one example of the parts below the public names; see its docstring.
INTERNALS = "grpo_one_screen.py"


def test_every_public_name_is_imported_when_it_is_used_and_documented() -> None:
    reference = (ROOT / "docs" / "reference" / "api.md").read_text(encoding="utf-8")
    documented = re.findall(r"^::: outrider\.(\w+)$", reference, re.MULTILINE)
    assert sorted(documented) == sorted(set(outrider.__all__) - {"__version__"})
    for name in documented:
        value = getattr(outrider, name)
        assert name in dir(outrider)
        assert name == "ToolSchema" or (value.__doc__ or "").strip(), f"{name} has no docstring"
    with pytest.raises(AttributeError, match="no attribute 'Enviroment'"):
        outrider.Enviroment  # noqa: B018


def test_type_checkers_see_the_same_names() -> None:
    tree = ast.parse(Path(outrider.__file__).read_text(encoding="utf-8"))
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    imported = {
        alias.asname: node.module
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert imported == dict(outrider._MODULES)


def test_the_import_alone_loads_no_large_package() -> None:
    code = """
import sys, outrider
assert not {'numpy', 'pydantic'} & set(sys.modules)
import outrider.testing
assert "train" in dir(outrider) and outrider.Environment and outrider.Algorithm and outrider.tool
print(sorted({"torch", "transformers", "pyarrow.dataset", "ray"} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def sources() -> Iterator[tuple[str, str]]:
    """All code that users read or that `outrider new` writes."""
    for file in sorted((ROOT / "examples").glob("*.py")):
        if file.name != INTERNALS:
            yield file.name, file.read_text(encoding="utf-8")
    for file in sorted((ROOT / "examples").glob("*.ipynb")):
        notebook = json.loads(file.read_text(encoding="utf-8"))
        cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
        yield file.name, "\n".join(cells)
    for page in [*sorted((ROOT / "docs" / "start").glob("*.md")), ROOT / "docs" / "plugins.md"]:
        for block in re.findall(
            r"^```python.*?\n(.*?)^```$", page.read_text("utf-8"), re.MULTILINE | re.DOTALL
        ):
            yield page.name, block
    for kind in ("environment", "gym", "agent", "tool", "functions", "algorithm"):
        for name, text in render(kind, name="my-world", package="my_world", folder=Path("my-world")).items():
            if name.endswith(".py"):
                yield f"{kind}: {name}", text


@pytest.mark.parametrize(("name", "text"), list(sources()))
def test_users_import_outrider_and_outrider_testing_only(name: str, text: str) -> None:
    for node in ast.walk(ast.parse(text)):
        modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        modules += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        for module in modules:
            assert not module.startswith("outrider.") or module == "outrider.testing", f"{name}: {module}"
    assert set(re.findall(r"\bo\.([A-Za-z]\w+)", text)) <= set(outrider.__all__)
