"""A folder without one of its weights is refused in one line that names it, however it is loaded; what may be
missing is not counted.
"""

import json
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from docsite.models import ARCHITECTURES
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaForSequenceClassification

from outrider import cli
from outrider.engines.local.engine import describe_path
from outrider.engines.local.model import load_model
from outrider.errors import ModelError
from outrider.files import first_folder, replacing_by_name, replacing_folder
from outrider.smoke import save_model, tiny_config

DOWN = "model.layers.1.mlp.down_proj.weight"
Change = Callable[[dict[str, Tensor], Path], Any]


def changed(folder: Path, change: Change = lambda weights, folder: None) -> Path:
    save_model(folder)
    weights = load_file(folder / "model.safetensors")
    change(weights, folder)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def configure(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values), encoding="utf-8")


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda weights, folder: weights.pop(DOWN), rf"the weight {DOWN} is in none of its files"),
        (
            lambda weights, folder: [weights.pop(key) for key in list(weights) if ".0.mlp" in key],
            r"model\.layers\.0\.mlp\.down_proj\.weight \(and 2 more\)",
        ),
        (
            lambda weights, folder: weights.update({"model.norm.weight": torch.ones(7)}),
            r"model\.norm\.weight in the shape \[7\]",
        ),
        (
            lambda weights, folder: configure(folder, num_hidden_layers=1),
            r"which its configuration leaves out",
        ),
        (
            lambda weights, folder: weights.update({"model.layers.0.mlp.up_proj.bias": torch.ones(64)}),
            r"up_proj\.bias, which its configuration leaves out",
        ),
        (
            lambda weights, folder: (
                configure(folder, tie_word_embeddings=False) or weights.pop("lm_head.weight", None)
            ),
            r"the weight lm_head\.weight",
        ),
    ],
)
def test_a_model_that_is_not_whole_is_refused(tmp_path: Path, change: Change, expected: str) -> None:
    folder = changed(tmp_path / "model", change)
    with pytest.raises(ModelError, match=expected) as caught:
        load_model(str(folder), precision="float32")
    assert "\n" not in str(caught.value)


def test_whole_models_and_heads_of_other_tasks_are_loaded(tmp_path: Path) -> None:
    assert load_model(str(changed(tmp_path / "whole")), precision="float32").unused == ()
    old = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    assert (
        load_model(
            str(changed(tmp_path / "old", lambda weights, folder: weights.update(old))), precision="float32"
        ).unused
        == ()
    )
    head = {"v_head.summary.weight": torch.ones(1, 32)}
    loaded = load_model(
        str(changed(tmp_path / "head", lambda weights, folder: weights.update(head))), precision="float32"
    )
    assert loaded.unused == ("v_head.summary.weight",)
    assert "no place for 1 weight of its files, such as v_head.summary.weight" in describe_path(
        loaded, "head"
    )
    # a layer that predicts several tokens, of which the model here has none
    more = {"model.layers.2.eh_proj.weight": torch.ones(1), "model.layers.2.norm.weight": torch.ones(1)}
    folder = changed(tmp_path / "mtp", lambda weights, folder: weights.update(more))
    assert len(load_model(str(folder), precision="float32").unused) == 2


def test_shards_and_bin_files(tmp_path: Path) -> None:
    folder = changed(tmp_path / "shards")
    AutoModelForCausalLM.from_pretrained(folder).save_pretrained(folder, max_shard_size="20KB")
    (folder / "model.safetensors").unlink(missing_ok=True)
    load_model(str(folder), precision="float32")
    shards = sorted(folder.glob("*.safetensors"))
    assert len(shards) > 2
    kept = load_file(shards[1])
    name = sorted(kept)[0]
    save_file({key: one for key, one in kept.items() if key != name}, shards[1], metadata={"format": "pt"})
    with pytest.raises(ModelError, match=name):
        load_model(str(folder), precision="float32")
    shards[1].unlink()
    with pytest.raises(ModelError, match=shards[1].name):
        load_model(str(folder), precision="float32")
    other = changed(tmp_path / "bin")
    weights = load_file(other / "model.safetensors")
    (other / "model.safetensors").unlink()
    torch.save(weights, other / "pytorch_model.bin")
    load_model(str(other), precision="float32")
    torch.save({key: one for key, one in weights.items() if key != DOWN}, other / "pytorch_model.bin")
    with pytest.raises(ModelError, match=DOWN):
        load_model(str(other), precision="float32")


def test_a_classifier_has_no_vocabulary_projection(tmp_path: Path) -> None:
    config = tiny_config()
    config.tie_word_embeddings, config.num_labels = False, 1
    save_model(tmp_path / "model")
    LlamaForSequenceClassification(config).save_pretrained(tmp_path / "model")
    with pytest.raises(ModelError, match=r"the weight lm_head\.weight"):
        load_model(str(tmp_path / "model"), precision="float32")


def test_an_expert_that_is_missing_is_refused(tmp_path: Path) -> None:
    next(one for one in ARCHITECTURES if one.model_type == "qwen3_moe").save(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.layers.1.mlp.experts.2.up_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError):
        load_model(str(tmp_path), precision="float32")


def test_the_doctor_refuses_it_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = changed(tmp_path / "model", lambda weights, folder: weights.pop(DOWN))
    assert cli.main(["doctor", "--model", str(folder)]) == 1
    assert "down_proj" in capsys.readouterr().out.replace("\n", "")


@pytest.mark.parametrize("mask", [0o022, 0o027, 0o077])
def test_files_that_writers_make_follow_the_umask(
    tmp_path: Path, mask: int, request: pytest.FixtureRequest
) -> None:
    import os

    before = os.umask(mask)
    request.addfinalizer(lambda: os.umask(before))

    def write(path: Path) -> None:
        save_file({"a": torch.ones(1)}, path)

    with replacing_folder(tmp_path / "folder") as folder:
        write(folder / "w.safetensors")
        (folder / "weights").mkdir(0o700)
        write(folder / "weights" / "w.safetensors")
    with first_folder(tmp_path / "first") as folder:
        write(folder / "w.safetensors")
    with replacing_by_name(tmp_path / "reference.safetensors") as path:
        write(path)
    assert os.umask(mask) == mask
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) == 4
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o666 & ~mask}
    folders = [path for path in tmp_path.rglob("*") if path.is_dir()]
    assert {stat.S_IMODE(path.stat().st_mode) for path in folders} == {0o777 & ~mask}
