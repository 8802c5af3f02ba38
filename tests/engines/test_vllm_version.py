"""Which vLLM the engine takes: its interfaces for new weights differ from version to version."""

import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

from outrider.engines.vllm.engine import VLLM, loading, require_vllm
from outrider.errors import ModelError

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("version", ["0.10.2", "0.31.1", "0.33.0", "1.0", "0.3.2", "0.320.0"])
def test_another_version_is_refused_by_its_number(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    module = ModuleType("vllm")
    module.__version__ = version  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", module)
    with (
        pytest.raises(ModelError, match=rf"vLLM {version} is installed, and Outrider needs {VLLM}"),
        loading(),
    ):
        pass


@pytest.mark.parametrize("version", ["0.32", "0.32.0", "0.32.1+cpu", "0.32.2.dev3", "dev"])
def test_the_one_that_was_tried_is_taken(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    module = ModuleType("vllm")
    module.__version__ = version  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", module)
    require_vllm()


def test_without_vllm_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ModelError, match="pip install"):
        require_vllm()


def test_the_extra_has_the_same_bounds() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    minor = int(VLLM.partition(".")[2])
    assert extras["optional-dependencies"]["vllm"] == [f"vllm>={VLLM},<0.{minor + 1}"]
