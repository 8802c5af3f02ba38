"""Plug-ins that were written for the names of 0.3.0 still work, with a warning that names the new ones."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

import outrider
from outrider.algorithms.base import Algorithm, GroupAdvantages, GroupFilter, TaskChoice, write_advantages
from outrider.algorithms.grpo import Grpo, GrpoSettings
from outrider.deprecated import MODULES, NAMES
from outrider.environments.base import EnvironmentFactory
from outrider.environments.house import HouseConfig, HouseEnvironment
from outrider.plugins.registry import read_settings
from outrider.testing import check_environment
from outrider.trace import Trace
from outrider.types import Task


def test_an_algorithm_with_the_old_method_is_one() -> None:
    with pytest.warns(FutureWarning, match="Old.credit is now Old.assign_advantages"):

        class Old(Algorithm):
            def credit(self, trace: Trace) -> GroupAdvantages:
                raise NotImplementedError("the old method")

    with pytest.raises(NotImplementedError, match="the old method"):
        Old().assign_step_advantages([object()])  # type: ignore[list-item]


def test_an_old_override_of_the_step_may_call_its_base_class() -> None:
    with pytest.warns(FutureWarning, match="Shifted.advantages is now Shifted.assign_step_advantages"):

        class Shifted(Grpo):
            def advantages(self, traces: list[Trace]) -> list[GroupAdvantages]:
                return [*super().advantages(traces), "shifted"]  # type: ignore[misc]

    with pytest.warns(FutureWarning, match="Grpo.advantages is now Grpo.assign_step_advantages"):
        assert Shifted(GrpoSettings()).assign_step_advantages([]) == ["shifted"]


def test_a_call_of_an_old_method_warns_at_the_line_of_the_caller() -> None:
    with pytest.warns(FutureWarning, match="Grpo.advantages is now Grpo.assign_step_advantages") as caught:
        assert Grpo(GrpoSettings()).advantages([]) == []  # type: ignore[attr-defined]
    assert [warning.filename for warning in caught] == [__file__]


def test_the_old_key_of_a_task_choice_and_the_old_name_of_a_function_work() -> None:
    kept = GroupFilter(select=list, max_extra_batches=1)
    with pytest.warns(FutureWarning, match="group_filter"):
        assert TaskChoice(num_groups=1, groups=kept) == TaskChoice(num_groups=1, group_filter=kept)
    with pytest.warns(FutureWarning, match="outrider.assign_advantages is now outrider.write_advantages"):
        assert outrider.assign_advantages is write_advantages  # type: ignore[attr-defined]


def test_old_modules_and_names_lead_to_the_new_ones() -> None:
    code = """
import warnings
warnings.simplefilter("ignore")
from outrider.algorithms.algorithm import Algorithm
from outrider.algorithms.base import GroupCredit, write_credit
from outrider.environments.base import TaskFamily
from outrider.tokens.calls import FoundCalls, CallFormat, read_turn
from outrider.tokens.calls.format import FoundCalls as same
from outrider.memory.embedder import HashEmbedder
from outrider.algorithms.common.loss_settings import LossSettings
import outrider.algorithms.base as new, outrider.environments.base as environments
assert Algorithm is new.Algorithm and GroupCredit is new.GroupAdvantages
assert TaskFamily is environments.TaskSet
assert FoundCalls is same and write_credit is new.write_advantages
warnings.simplefilter("error")
try:
    from outrider.algorithms.base import GroupCredit
except FutureWarning as warning:
    print(warning)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (
        "outrider.algorithms.base.GroupCredit is now outrider.algorithms.base.GroupAdvantages" in done.stdout
    )


def test_names_that_never_were_are_unknown() -> None:
    import outrider.algorithms.base as base

    with pytest.raises(AttributeError, match="has no attribute 'Grpo'"):
        base.Grpo  # type: ignore[attr-defined]  # noqa: B018
    with pytest.raises(ModuleNotFoundError):
        import outrider.algorithms.rapo  # type: ignore[import-not-found]  # noqa: F401
    assert not set(NAMES) & set(NAMES.values()) and all(name.startswith("outrider.") for name in MODULES)


class OldWorld:
    """An environment as 0.3.0 had it: a task set with a factory."""

    Settings = HouseConfig
    name, stop, protocol, stateful = "old", ("</action>",), "chat", True

    def __init__(self, config: HouseConfig) -> None:
        self.config = config

    def tasks(self, split: str) -> Sequence[Task]:
        return HouseEnvironment.tasks(self.config, split)

    def make(self) -> EnvironmentFactory:
        return HouseEnvironment.build(self.config).make()

    def expert(self, task: Task, seed: int) -> None:
        return None

    def close(self) -> None:
        pass


def test_an_environment_in_the_old_form_works_and_names_the_new_one() -> None:
    with pytest.warns(
        FutureWarning, match=r"OldWorld is an environment in the old form .* outrider.Environment"
    ):
        settings = read_settings("environments", {"type": f"{__name__}:OldWorld", "num_train": 1})
    with pytest.warns(FutureWarning):
        check_environment({"type": f"{__name__}:OldWorld", "num_train": 1})
    assert isinstance(settings, HouseConfig) and settings.num_train == 1


def test_a_mixin_may_define_the_old_name_and_a_class_a_helper_of_that_name() -> None:
    class Mixin:
        def advantages(self, traces: object) -> str:
            return "mixin"

    with pytest.warns(FutureWarning, match="Mixin.advantages is now Mixin.assign_step_advantages"):

        class Mixed(Mixin, Grpo):  # type: ignore[misc]
            pass

    assert Mixed.assign_step_advantages is Mixin.advantages

    class Own(Grpo):
        def assign_advantages(self, trace: object) -> object:  # type: ignore[override]
            return self.credit(trace)

        def credit(self, trace: object) -> str:
            return "helper"

    assert Own.assign_advantages(object.__new__(Own), None) == "helper"


def test_the_old_name_of_a_filter_is_read_with_a_warning() -> None:
    chosen = GroupFilter(select=list, max_extra_batches=1)
    choice = TaskChoice(num_groups=1, group_filter=chosen)
    with pytest.warns(FutureWarning, match="group_filter"):
        assert choice.groups is chosen


@pytest.mark.parametrize(
    "lines",
    [
        ["from outrider.algorithms.algorithm import Algorithm"],
        ["from outrider.tokens.calls import FoundCalls"],  # a package, whose names the import system looks up
        ["import outrider.algorithms.algorithm as old", "old.Algorithm"],
        ["import importlib", "importlib.import_module('outrider.algorithms.algorithm').Algorithm"],
        ["from outrider.algorithms.base import GroupCredit"],
        ["from outrider import write_credit"],
        ["import outrider", "class Mine(outrider.Algorithm):", "    def credit(self, trace): ..."],
    ],
    ids=lambda lines: lines[-1],
)
def test_a_warning_has_the_line_of_the_user(lines: list[str], tmp_path: Path) -> None:
    file = tmp_path / "plug_in.py"
    file.write_text("\n".join(["# a plug-in", *lines]) + "\n")
    code = compile(file.read_text(), str(file), "exec")
    with pytest.warns(FutureWarning, match="is now") as caught:
        exec(code, {"__name__": "plug_in"})
    line = 3 if lines[-1].startswith("    ") else len(lines) + 1
    assert {(warning.filename, warning.lineno) for warning in caught} == {(str(file), line)}
