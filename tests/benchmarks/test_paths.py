"""The two paths do the same work when they are timed beside each other."""

from pathlib import Path

import pytest
from benchmarks.paths import PATHS, paths_of, rows, written_by
from benchmarks.unpacked_batches import COLUMNS, measure

from outrider.engines.local.model import load_model
from outrider.training.policy import set_threads
from tests.tiny import save_tiny_model


def test_a_row_for_each_kind_of_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_threads(1)
    for name, size in (("_NUM", 2), ("_PROMPT", 16), ("_NEW", 4)):
        monkeypatch.setattr(f"benchmarks.paths.{name}", size)
    found = list(rows(str(save_tiny_model(tmp_path)), num_pairs=1))
    assert [row[0] for row in found] == [
        "generation, a request at a time",
        "generation, all at once",
        "update",
    ]
    assert all(float(row[-1]) > 0 for row in found)


def test_both_paths_generate_and_score_the_same_number_of_tokens(tmp_path: Path) -> None:
    name = str(save_tiny_model(tmp_path))
    for forward in PATHS:
        model = load_model(name, precision="float32", forward=forward)
        asked, written = written_by(model, num=3, prompt=20, new=5)
        assert [len(one.token_ids) for one in written] == [5, 5, 5]
        assert len({one.token_ids for one in asked}) == 1 and len({one.seed for one in asked}) == 3
        paths = paths_of(asked, written)
        assert [len(path.nodes) for path in paths] == [2, 2, 2] and len(
            {id(path.nodes[0]) for path in paths}
        ) == 1


def test_batches_and_single_sequences_of_a_random_model_are_compared() -> None:
    sizes = {"num_hidden_layers": 3, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128, "vocab_size": 98}
    row = measure("Granite", num_rows=3, sizes=sizes)
    assert len(row) == len(COLUMNS) and float(row[-2]) <= 1e-5 and float(row[-1]) <= 1e-5
