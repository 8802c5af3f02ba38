"""Every example trains with a tiny random model, and passes the contract check of its kind."""

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from outrider.algorithms.base import ObjectiveSettings
from outrider.algorithms.losses import OldLogprobs, TokenLossInputs
from outrider.runs import Run
from outrider.testing import build_group, check_algorithm, check_environment, check_tool
from outrider.tools.functions import tool_class
from outrider.trace import Trace
from outrider.training.packing import RolloutPath
from outrider.training.policy import Policy
from outrider.training.settings import OptimizerSettings, UpdateSettings
from outrider.training.update import MetricAccumulator, rollout_paths, update
from outrider.types import Message
from tests.tiny import save_tiny_model, tiny_model

SMALL = ("train.num_steps=2", "num_threads=1", "model.precision=float32")
EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def example(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """A module of the folder, found as from a recipe beside it."""
    monkeypatch.syspath_prepend(EXAMPLES)
    yield importlib.import_module(request.param)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_model(tmp_path_factory.mktemp("tiny") / "model"))


def named(name: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("example", [name], indirect=True)


def trained(example: ModuleType, model: str, folder: Path) -> Run:
    """Two steps, with the example's own code on record."""
    run = example.main(model, str(folder / "run"), SMALL)
    assert run.metrics("train").column("step").to_pylist() == [1, 2]
    recorded = json.loads((run.path / "plugins.json").read_text(encoding="utf-8"))
    assert example.__file__ in [one["file"] for one in recorded.values()]
    return run


def test_every_example_has_a_test() -> None:
    text = "".join(one.read_text(encoding="utf-8") for one in Path(__file__).parent.glob("test_*.py"))
    assert [one.stem for one in EXAMPLES.glob("*.py") if f'named("{one.stem}")' not in text] == []


@named("grpo_one_screen")
def test_grpo_in_one_screen_learns(example: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    rewards = example.train(tiny_model(), num_steps=4, learning_rate=1e-2)
    assert rewards[-1] > 2 * rewards[0] > 0
    assert [line.split()[:2] for line in capsys.readouterr().out.splitlines()] == [
        ["step", str(step)] for step in range(1, 5)
    ]


@named("grpo_one_screen")
def test_one_step_equals_the_update_of_the_library(
    example: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    played: list[Trace] = []

    def seen(groups: list[Trace]) -> list[RolloutPath]:
        played.extend(groups)
        return rollout_paths(groups)

    monkeypatch.setattr(example, "rollout_paths", seen)
    short, whole, before = tiny_model(), tiny_model(), tiny_model()
    example.train(short, num_steps=1, learning_rate=1e-2)
    update(
        Policy(whole, OptimizerSettings(learning_rate=1e-2)), played, objective=ObjectiveSettings(),
        settings=UpdateSettings(), reference=None,
    )  # fmt: skip
    triples = zip(*(one.model.parameters() for one in (short, whole, before)), strict=True)
    for mine, theirs, old in triples:
        assert not torch.equal(mine, old)
        # Adam's first step has one size everywhere: rounding shows only where a gradient is almost 0
        assert float(((mine - theirs).abs() > 1e-4).float().mean()) < 0.01


@named("own_environment")
def test_own_environment(example: ModuleType, model: str, tmp_path: Path) -> None:
    run = trained(example, model, tmp_path)
    assert run.config["environment"] == {"type": "own_environment:WordChain", "num_turns": 3}
    check_environment(example.WordChain, texts=["night", "table", "table", "1"])
    family = example.WordChain.build(example.WordChain.Settings())
    for task in (*family.tasks("train"), *family.tasks("test")):
        play = family.make()(task)
        play.reset(0)
        steps = family.expert(task, 0)
        assert [play.step(Message(role="assistant", content=step.text)).done for step in steps] == [
            False,
            False,
            True,
        ]
        assert play.result().success and play.result().episode_return == 1.0


@named("own_tool")
def test_own_tool(example: ModuleType, model: str, tmp_path: Path) -> None:
    run = trained(example, model, tmp_path)
    assert run.config["environment"]["tools"] == ["own_tool:weekday"]
    check_tool(example.weekday, texts=["2024-02-29"])
    tool = tool_class(example.weekday)()
    assert tool.run_text(" 2024-02-29 ").text == "Thursday"
    assert tool.run_text("2023-02-29").failed


@named("own_algorithm")
def test_own_algorithm(example: ModuleType, model: str, tmp_path: Path) -> None:
    run = trained(example, model, tmp_path)
    table = run.metrics("train")
    assert all(value is not None for value in table.column("past_baseline/known").to_pylist())
    assert any(value is not None for value in table.column("past_baseline/below_fraction").to_pylist())
    check_algorithm(example.PastBaseline(example.PastBaseline.Settings(group_size=2)))


@named("own_algorithm")
def test_the_loss_of_the_example(example: ModuleType) -> None:
    accumulator = MetricAccumulator()
    old = torch.tensor([-1.0, -1.0])
    inputs = TokenLossInputs(
        logprobs_T=old + torch.tensor([2.0, 3.0]).log(), old_logprobs=OldLogprobs(old_T=old, trainer_T=old),
        advantages_T=torch.tensor([1.0, -2.0]), ratio_scale_T=torch.ones(2), engine_logprobs_T=old,
        is_off_policy_T=torch.zeros(2, dtype=torch.bool), rollout_T=torch.arange(2), turn_T=torch.arange(2),
        measures=accumulator,
    )  # fmt: skip
    found = example.PastBaseline(example.PastBaseline.Settings(failure_weight=0.5)).token_loss(inputs)
    # 1 x 2 is not clipped at 1.2; 2 x 3 weighs half
    assert found.losses.tolist() == pytest.approx([-2.0, 3.0])


@named("own_algorithm")
def test_the_memory_of_the_example_changes_the_baseline(example: ModuleType) -> None:
    algorithm = example.PastBaseline(example.PastBaseline.Settings(memory_weight=0.5))
    modes = ("on_policy",) * 2
    for value, expected in ((0.0, 0.0), (1.0, 0.5), (1.0, 0.25)):  # remembered: 0, then 0.5
        credit = algorithm.assign_advantages(build_group([value, value], key="task", modes=modes))
        assert credit.advantages.values.tolist() == [expected, expected]
