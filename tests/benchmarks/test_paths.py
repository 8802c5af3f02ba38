"""The two paths do the same work when they are timed beside each other."""

from pathlib import Path

from benchmarks.paths import PATHS, paths_of, rows, written_by

from outrider.engines.local.model import load_model
from outrider.training.policy import set_threads
from tests.tiny import save_tiny_model


def test_a_row_for_each_kind_of_work(tmp_path: Path) -> None:
    set_threads(1)
    found = list(rows(str(save_tiny_model(tmp_path)), num_pairs=1))
    assert [row[0] for row in found] == [
        "generation, a request at a time",
        "generation, all at once",
        "update",
    ]
    assert all(float(row[-1]) > 0 for row in found)


def test_both_paths_write_and_score_as_many_tokens(tmp_path: Path) -> None:
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
