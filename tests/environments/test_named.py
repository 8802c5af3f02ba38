"""``--dry-run`` finds what a recipe names and a run would miss, and starts nothing for it."""

from pathlib import Path

import pytest

from outrider.cli import main
from outrider.environments.agent.programs import WorkerProcess
from tests.tiny import save_tiny_model

HERE = "tests.environments.agents.misnamed"
RECIPE = """
[model]
name = "{root}/model"
precision = "float32"
[algorithm]
type = "grpo"
[environment]
"""
AGENT = f"""{RECIPE}
type = "agent"
function = "{HERE}:agent"
train = {{{{ path = "{{root}}/tasks.jsonl" }}}}
test = {{{{ path = "{{root}}/tasks.jsonl" }}}}
"""
GYM = f'{RECIPE}type = "gym"\n'


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(autouse=True)
def _files(model: Path, tmp_path: Path) -> None:
    """The model and the tasks of the recipes, which ``--dry-run`` opens."""
    (tmp_path / "model").symlink_to(model)
    rows = [f'{{"question": "q{number}?", "answer": "a"}}\n' for number in range(8)]
    (tmp_path / "tasks.jsonl").write_text("".join(rows))


def dry(tmp_path: Path, recipe: str, *overrides: str) -> int:
    file = tmp_path / "recipe.toml"
    file.write_text(recipe.format(root=tmp_path))
    return main(["train", str(file), "--dry-run", *overrides])


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("function=nomodule:run", "environment.function: there is no module 'nomodule'"),
        (f"function={HERE}:run", "has no 'run'"),
        (f"function={HERE}:nothing", "is called with (task) and accepts ()"),
        (f"function={HERE}:apart", "is called with (task)"),
        (f"function={HERE}:yielding", "yields"),
        (f"function={HERE}:Agent", "is a class"),
        (f"function={HERE}:TABLE", "is a dict, which cannot be called"),
        (f"reward={HERE}:nothing", "environment.reward: "),
        (f"reward={HERE}:yielding", "yields"),
        (f"expert={HERE}:waiting", "environment.expert: "),
    ],
)
def test_a_function_that_is_not_there(
    override: str, line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert dry(tmp_path, AGENT, f"environment.{override}") == 2
    told = capsys.readouterr().err
    assert line in told and told.count("\n") == 1


def test_functions_that_are_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WorkerProcess, "__init__", lambda *_, **__: pytest.fail("a program was started"))
    for override in (f"function={HERE}:agent", f"function={HERE}:waiting", f"reward={HERE}:agent"):
        assert dry(tmp_path, AGENT, f"environment.{override}") == 0


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("FrozenLake-v1", ""),
        ("FrozenLake", ""),
        ("FrozenLake-v99", "environment.id: "),
        ("FrozenLak-v1", "environment.id: "),
        ("no such id", "environment.id: "),
        ("nomodule:FrozenLake-v1", "the module 'nomodule' cannot be imported"),
    ],
)
def test_an_environment_of_gymnasium(
    name: str, line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("gymnasium")
    assert dry(tmp_path, GYM, f"environment.id={name}") == (2 if line else 0)
    assert line in capsys.readouterr().err
