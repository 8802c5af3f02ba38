"""The notebook of the examples runs from its first cell to its last, in a kernel of its own."""

import ast
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from nbformat import NotebookNode

NOTEBOOK = Path(__file__).parents[2] / "examples" / "explore.ipynb"


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> NotebookNode:
    """With one more cell, which tells what the run learned. A cell that fails raises."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    rewards = 'runs["group-16"].metrics()["reward/mean"].to_pylist()'
    told = f"({rewards}, [str(one.path.parent) for one in runs.values()])"
    notebook.cells.append(nbformat.v4.new_code_cell(told, id="told"))
    folder = tmp_path_factory.mktemp("notebook")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(folder))  # where the notebook puts its runs
        patch.setenv("HF_HUB_OFFLINE", "1")
        resources = {"metadata": {"path": str(folder)}}
        return NotebookClient(notebook, timeout=300, kernel_name="python3", resources=resources).execute()


def _shown(notebook: NotebookNode, cell: str, kind: str = "text/plain") -> str:
    (found,) = (one for one in notebook.cells if one.id == cell)
    (output,) = (one for one in found.outputs if one.output_type == "execute_result")
    return output.data[kind]


@pytest.mark.long
def test_the_notebook_trains_and_has_outputs(played: NotebookNode) -> None:
    rewards, folders = ast.literal_eval(_shown(played, "told"))
    assert len(rewards) == 8 and rewards[-1] > 2 * rewards[0] > 0
    assert len(set(folders)) == 1 and "notebook" in folders[0]
    assert _shown(played, "table").count("\n") >= 8
    assert "before training" in _shown(played, "evaluations")
    assert _shown(played, "plot", "text/html").count("<svg") == 2
    assert "episode_return" in _shown(played, "traces")
    assert _shown(played, "comparison", "text/markdown").startswith("# Comparison of runs")


def test_the_notebook_is_stored_without_outputs() -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    code = [one for one in notebook.cells if one.cell_type == "code"]
    assert code and all(not one.outputs and one.execution_count is None for one in code)
