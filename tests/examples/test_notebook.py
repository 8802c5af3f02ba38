"""The notebooks of the examples run from the first cell to the last, each in a kernel of its own."""

import ast
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from nbformat import NotebookNode

from tests.tiny import save_tiny_model

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


def _execute(notebook: NotebookNode, folder: Path) -> NotebookNode:
    """A cell that fails raises."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(folder))  # where explore.ipynb puts its runs
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        patch.setenv("PYTHONPATH", str(ROOT / "src"))
        resources = {"metadata": {"path": str(folder)}}
        return NotebookClient(notebook, timeout=300, kernel_name="python3", resources=resources).execute()


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> NotebookNode:
    """With one more cell, which tells what the run learned. A cell that fails raises."""
    notebook = nbformat.read(EXAMPLES / "explore.ipynb", as_version=4)
    rewards = 'runs["group-16"].metrics()["reward/mean"].to_pylist()'
    told = f"({rewards}, [str(one.path.parent) for one in runs.values()])"
    notebook.cells.append(nbformat.v4.new_code_cell(told, id="told"))
    return _execute(notebook, tmp_path_factory.mktemp("notebook"))


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


def _printed(notebook: NotebookNode, cell: str) -> str:
    (found,) = (one for one in notebook.cells if one.id == cell)
    return "".join(output.text for output in found.outputs if output.output_type == "stream")


@pytest.mark.long
def test_the_notebook_of_the_demo_trains(tmp_path: Path) -> None:
    notebook = nbformat.read(EXAMPLES / "demo.ipynb", as_version=4)
    small = [
        f"model.name={save_tiny_model(tmp_path / 'model', context=4096)}", "environment.num_train=8",
        "algorithm.group_size=2", "algorithm.num_hybrid=2", "buffer.embedder=hash", "model.trained_layers=1",
        "rollout.max_turn_tokens=99", "rollout.max_response_tokens=1500", "cold_start.num_examples=1",
        "train.tasks_per_step=2", "train.num_steps=2", "evaluation.num_tasks=2",
    ]  # fmt: skip
    (cell,) = (one for one in notebook.cells if one.id == "overrides")
    assert cell.source.startswith("overrides = []")
    cell.source = f"overrides = {small}"
    (cell,) = (one for one in notebook.cells if one.id == "train")
    notebook.cells.append(nbformat.v4.new_code_cell(cell.source, id="again"))  # it resumes what it finds
    played = _execute(notebook, tmp_path)
    assert "step 2/2" in _printed(played, "train")
    for cell_id in ("train", "again"):
        assert _shown(played, cell_id).startswith(
            "<Run runs/demo: rapo on factbook, 2 of 2 steps, after RAPO:"
        )
    assert "after cold start" in _shown(played, "scores") and "<svg" in _shown(played, "plot", "text/html")
    assert _shown(played, "rollouts").splitlines()[0].startswith("outcome")
    assert "episode_return" in _shown(played, "turns")


@pytest.mark.long
def test_the_notebook_for_a_gpu_runs_in_its_smallest_form_on_a_cpu(tmp_path: Path) -> None:
    played = _execute(nbformat.read(EXAMPLES / "gpu.ipynb", as_version=4), tmp_path)
    assert "not on a\nGPU" in played.cells[0].source
    assert _printed(played, "gpu").startswith("no GPU")
    assert "16 GB per GPU" in _printed(played, "settings") and "fits  " in _printed(played, "settings")
    assert "1 of 1 step" in _shown(played, "train") and "after RAPO" in _shown(played, "scores")
    assert "time/step" in _shown(played, "speed")


@pytest.mark.parametrize("file", sorted(EXAMPLES.glob("*.ipynb")), ids=lambda file: file.name)
def test_notebooks_are_stored_without_outputs(file: Path) -> None:
    notebook = nbformat.read(file, as_version=4)
    nbformat.validate(notebook)
    code = [one for one in notebook.cells if one.cell_type == "code"]
    assert code and all(not one.outputs and one.execution_count is None for one in code)
