"""A checkpoint of several ranks is read in one process."""

import warnings
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

from outrider.training.policy import SHARDS, read_tensors


def test_reading_the_shards_of_ranks_prints_no_warning_of_torch(tmp_path: Path) -> None:
    weights = {"model.a": torch.arange(6.0).reshape(2, 3)}
    writer = HuggingFaceStorageWriter(path=str(tmp_path / SHARDS), save_distributed=True)
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        state_dict_saver.save(weights, storage_writer=writer, no_dist=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        read = read_tensors(tmp_path, with_optimizer=False)
    assert read.keys() == weights.keys() and torch.equal(read["model.a"], weights["model.a"])
