"""Which vLLM the engine takes: its interfaces for new weights differ from version to version."""

import sys
import tomllib
from collections.abc import Mapping
from inspect import Parameter, Signature
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from outrider.engines.base import VllmSettings
from outrider.engines.vllm.async_engine import AsyncVllm
from outrider.engines.vllm.engine import (
    INTERFACE,
    VLLM,
    Requests,
    loading,
    require_interface,
    require_vllm,
)
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


def install(monkeypatch: pytest.MonkeyPatch, interface: Mapping[str, str]) -> None:
    """Install fake modules of vLLM with these functions and parameters."""
    modules = {"vllm": ModuleType("vllm")}
    modules["vllm"].__version__ = "dev"  # type: ignore[attr-defined]
    for path, names in interface.items():
        module, _, name = path.partition(":")
        owner: Any = modules.setdefault(module, ModuleType(module))
        *classes, function = name.split(".")
        for each in classes:
            owner = owner.__dict__.setdefault(each, SimpleNamespace())

        def fake() -> None: ...

        parameters = [Parameter(each, Parameter.KEYWORD_ONLY) for each in names.split()]
        fake.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
        setattr(owner, function, fake)
    for module, made in modules.items():
        monkeypatch.setitem(sys.modules, module, made)


TRAINER_INIT = "vllm.distributed.weight_transfer.factory:WeightTransferTrainerFactory.trainer_init"
UPDATE = "vllm.v1.engine.async_llm:AsyncLLM.update_weights"
OLDER: list[tuple[dict[str, str | None], str]] = [
    ({TRAINER_INIT: "init_info client"}, f"{TRAINER_INIT}(source)"),
    ({TRAINER_INIT: None}, TRAINER_INIT),
    ({path: None for path in INTERFACE if "factory" in path}, "factory:WeightTransferEngineFactory"),
    ({UPDATE: ""}, f"{UPDATE}(request)"),
]


def test_a_build_without_a_version_that_has_the_interface_is_accepted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install(monkeypatch, INTERFACE)
    require_interface()


@pytest.mark.parametrize(("changed", "missing"), OLDER)
def test_an_older_interface_is_an_error_that_names_the_function_and_both_versions(
    monkeypatch: pytest.MonkeyPatch, changed: dict[str, str | None], missing: str
) -> None:
    older = {path: changed.get(path, names) for path, names in INTERFACE.items()}
    install(monkeypatch, {path: names for path, names in older.items() if names is not None})
    with pytest.raises(ModelError, match="vLLM dev has no ") as error:
        require_interface()
    assert missing in str(error.value) and f"needs vLLM {VLLM}: pip install" in str(error.value)


def test_the_asynchronous_engine_checks_the_interface_before_it_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install(monkeypatch, {path: names for path, names in INTERFACE.items() if path != UPDATE})
    requests = Requests(eos_token_ids=frozenset(), eos_texts=(), context_length=8, top_k=1)
    with pytest.raises(ModelError, match=UPDATE):
        AsyncVllm(model="m", requests=requests, precision="float32", device="cpu", settings=VllmSettings())


def test_without_vllm_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ModelError, match="pip install"):
        require_vllm()


def test_the_extra_has_the_same_bounds() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    minor = int(VLLM.partition(".")[2])
    assert extras["optional-dependencies"]["vllm"] == [f"vllm>={VLLM},<0.{minor + 1}"]
