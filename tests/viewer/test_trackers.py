"""Trackers: started before the run or a config error; a failure while running is loud, counted and
harmless.
"""

import sys
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from outrider.errors import ConfigError
from outrider.plugins.registry import BUILT_IN
from outrider.trace import Leaf, Trace
from outrider.types import Message, Origin, Outcome, Task, ToolCall
from outrider.viewer.trackers import COLUMNS, TrackerSet, TrackingSettings, make_trackers

TRACKER_NAMES = tuple(BUILT_IN["trackers"])


class Recorder:
    def __init__(self, fail_at: int | None = None) -> None:
        self.seen: list[tuple[int, dict[str, float]]] = []
        self.num_closed = 0
        self.fail_at = fail_at

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if step == self.fail_at:
            raise ConnectionError("no route")
        self.seen.append((step, dict(metrics)))

    def close(self) -> None:
        self.num_closed += 1


def test_a_failing_tracker_is_switched_off_once_and_the_others_go_on() -> None:
    good, bad = Recorder(), Recorder(fail_at=2)
    warnings: list[str] = []
    trackers = TrackerSet({"bad": bad, "good": good}, warn=warnings.append)
    for step in (1, 2, 3, 4):
        trackers.log(step, {"reward/mean": 0.5})
    assert [step for step, _ in good.seen] == [1, 2, 3, 4]
    assert [step for step, _ in bad.seen] == [1]
    assert trackers.num_failures == {"bad": 1, "good": 0}
    assert len(warnings) == 1
    assert "bad" in warnings[0]
    assert "no route" in warnings[0]
    trackers.close()
    trackers.close()
    assert (good.num_closed, bad.num_closed) == (1, 0)


def test_a_tracker_without_a_method_is_switched_off() -> None:
    warnings: list[str] = []
    for name in ("log", "close"):
        trackers = TrackerSet({name: object()}, warn=warnings.append)  # type: ignore[dict-item]
        trackers.log(1, {}) if name == "log" else trackers.close()
    assert ["no attribute" in warning for warning in warnings] == [True, True]


def test_undefined_and_non_finite_values_are_left_out() -> None:
    tracker = Recorder()
    TrackerSet({"t": tracker}).log(1, {"a": None, "b": float("nan"), "c": float("-inf"), "d": 2})
    assert tracker.seen == [(1, {"d": 2.0})]


@pytest.mark.parametrize(
    ("name", "module"), [("tensorboard", "tensorboardX"), ("wandb", "wandb"), ("trackio", "trackio")]
)
def test_a_missing_extra_is_a_config_error_that_names_it(
    name: str, module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)  # makes the import fail also where the extra is installed
    with pytest.raises(ConfigError, match=rf"outrider\[{name}\]"):
        make_trackers([name], run_dir=tmp_path, config={})


@pytest.mark.parametrize("names", [["tensorbored"], ["wandb", "wandb"]])
def test_unknown_or_repeated_names_are_config_errors(names: list[str], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="tracker"):
        make_trackers(names, run_dir=tmp_path, config={})


class FakeService:
    """Stands in for the third-party modules and records the calls that their documentation promises to
    accept.
    """

    def __init__(self, *, run_id: str = "id", run_name: str = "name", offline: bool = False) -> None:
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        self.run = {"id": run_id, "name": run_name, "offline": offline}

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def record(name: str) -> Any:
            def call(*args: Any, **kwargs: Any) -> Any:
                self.calls.append((name, args, kwargs))
                return run

            return call

        run = types.SimpleNamespace(
            **{
                name: record(name)
                for name in (
                    "log",
                    "finish",
                    "define_metric",
                    "alert",
                    "add_scalar",
                    "add_text",
                    "flush",
                    "close",
                )
            },
            **self.run,
        )
        for module in ("wandb", "trackio", "tensorboardX"):
            fake = types.ModuleType(module)
            fake.init = record(f"{module}.init")  # type: ignore[attr-defined]
            fake.SummaryWriter = record("SummaryWriter")  # type: ignore[attr-defined]
            fake.Table = lambda **table: table  # type: ignore[attr-defined]
            monkeypatch.setitem(sys.modules, module, fake)


def test_each_tracker_gets_the_values_at_its_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    service = FakeService()
    service.install(monkeypatch)
    (tmp_path / "run-7").mkdir()
    trackers = make_trackers(TRACKER_NAMES, run_dir=tmp_path / "run-7", config={"seed": 1})
    trackers.log(3, {"reward/mean": 0.5})
    trackers.close()
    calls = service.calls
    assert ("add_scalar", ("reward/mean", 0.5), {"global_step": 3}) in calls
    assert ("log", ({"outrider_step": 3, "reward/mean": 0.5},), {}) in calls  # wandb
    assert ("log", ({"reward/mean": 0.5},), {"step": 3}) in calls  # trackio
    assert [name for name, _, _ in calls].count("finish") == 2
    inits = {name: kwargs for name, _, kwargs in calls if name.endswith(".init")}
    assert inits["trackio.init"] == {
        "project": "outrider",
        "name": "run-7",
        "config": {"seed": 1},
        "resume": "never",
    }
    assert not {"id", "resume"} & inits["wandb.init"].keys()
    assert next(kwargs for name, _, kwargs in calls if name == "SummaryWriter").keys() == {"logdir"}
    assert sum(trackers.num_failures.values()) == 0


def test_the_names_of_a_run_are_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    service = FakeService()
    service.install(monkeypatch)
    tracking = TrackingSettings(project="desk", entity="us", group="seeds", name="first", tags=("a", "b"))
    make_trackers(["wandb", "trackio"], run_dir=tmp_path, tracking=tracking, config={})
    inits = {name: kwargs for name, _, kwargs in service.calls if name.endswith(".init")}
    names = {"project": "desk", "name": "first", "group": "seeds"}
    assert inits["wandb.init"].items() >= {**names, "entity": "us"}.items()
    assert inits["wandb.init"]["tags"] == ["a", "b"]
    assert inits["trackio.init"].items() >= names.items()
    assert not {"entity", "tags"} & inits["trackio.init"].keys()


def group(question: str, *, outcome: Outcome = Outcome.FINISHED) -> Trace:
    trace = Trace(task=Task(key=f"key of {question}", question=question))
    prompt = Message(role="user", content=question)
    node = trace.append(parent=None, origin=Origin.PROMPT, token_ids=(1,), message=prompt)
    call = ToolCall(name="add", arguments={"a": 1}, call_id="1")
    answer = Message(role="assistant", content="Three.", tool_calls=(call,))
    node = trace.append(
        parent=node.node_id, origin=Origin.POLICY, token_ids=(2,), message=answer, logprobs=(-0.5,),
        entropies=(0.5,),
    )  # fmt: skip
    lost = outcome.is_fault
    trace.finish(
        Leaf(
            node_id=None if lost else node.node_id, rollout=0, outcome=outcome,
            episode_return=None if lost else 1.0, success=not lost,
        )
    )  # fmt: skip
    return trace


def test_sample_rollouts_are_tables_of_every_tracker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    service = FakeService()
    service.install(monkeypatch)
    monkeypatch.setitem(
        sys.modules, "pandas", types.SimpleNamespace(DataFrame=lambda rows, columns: (columns, rows))
    )
    tracking = TrackingSettings(num_rollouts=2, rollouts_every=5)
    trackers = make_trackers(TRACKER_NAMES, run_dir=tmp_path, tracking=tracking, config={})
    traces = [group("1+2?"), group("lost", outcome=Outcome.ENGINE_FAULT), group("third")]
    for step in (1, 2, 6):
        trackers.log_rollouts(step, traces)
    text = '[user] 1+2?\n[assistant] Three.\nadd({"a": 1})'
    rows = {s: [s, "training", "key of 1+2?", "1+2?", text, 1.0, True, "finished"] for s in (1, 6)}
    tables = {step: {"columns": list(COLUMNS), "data": [row]} for step, row in rows.items()}
    calls = service.calls
    logged = [args[0] for name, args, _ in calls if name == "log" and "outrider_step" in args[0]]
    assert logged == [{"outrider_step": step, "rollouts/train": tables[step]} for step in (1, 6)]
    frames = [args[0]["rollouts/train"] for name, args, kwargs in calls if name == "log" and "step" in kwargs]
    assert frames == [{"dataframe": (list(COLUMNS), [row])} for row in rows.values()]
    [text, _] = [args for name, args, _ in calls if name == "add_text"]
    assert text[0] == "rollouts/train" and "    return: 1.0\n" in text[1] and "[assistant] Three." in text[1]
    trackers.log_rollouts(3, traces, label="step 3")
    [_, _, evaluation] = [args[0] for name, args, _ in calls if name == "log" and "outrider_step" in args[0]]
    assert [row[:3] for row in evaluation["rollouts/eval"]["data"]] == [
        [3, "step 3", "key of 1+2?"],
        [3, "step 3", "key of third"],
    ]
    assert sum(trackers.num_failures.values()) == 0


def test_every_training_step_sends_a_table_by_default() -> None:
    assert all(TrackingSettings().sends_rollouts(step) for step in range(1, 5))


def test_alarms_are_alerts_of_every_tracker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    service = FakeService()
    service.install(monkeypatch)
    trackers = make_trackers(TRACKER_NAMES, run_dir=tmp_path, config={})
    text = "ALARM: step 7: no group has a learning signal: of 32 rollouts 19 failed"
    trackers.alert(7, text)
    trackers.alert(None, "step 8: 3 of 32 rollouts were lost to faults: timeout")
    alerts = [kwargs for name, _, kwargs in service.calls if name == "alert"]
    title = "no group has a learning signal"
    assert {"title": title, "text": text, "level": "WARN", "wait_duration": 3600} in alerts  # wandb
    assert {"title": title, "text": text, "step": 7} in alerts  # trackio
    assert all(len(one["title"]) < 64 for one in alerts)
    # A title without numbers: W&B sends no second alert of one title within the hour.
    assert alerts[-1]["title"] == "N of N rollouts were lost to faults"
    assert ("add_text", ("alarms", text), {"global_step": 7}) in service.calls
    assert sum(trackers.num_failures.values()) == 0
    TrackerSet({"own": Recorder()}).alert(1, text)  # a tracker without alerts gets none


def configured(folder: Path, *, seed: int = 0, steps: int = 9) -> Path:
    folder.mkdir()
    lines = [
        f"seed = {seed}", 'algorithm.type = "grpo"', 'algorithm.preset = "dapo"',
        'environment.type = "my_worlds:House"', 'model.name = "HuggingFaceTB/SmolLM2-135M"',
        f'model.initial_checkpoint = "/home/me/sft-{seed}"', f"train.num_steps = {steps}",
    ]  # fmt: skip
    (folder / "config.toml").write_text("\n".join(lines) + "\n")
    return folder


def test_runs_that_differ_only_in_the_seed_share_a_group_and_have_tags(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("WANDB_RUN_GROUP", "WANDB_TAGS"):
        monkeypatch.delenv(name, raising=False)
    service = FakeService()
    service.install(monkeypatch)

    def start(folder: Path, **tracking: Any) -> dict[str, dict[str, Any]]:
        service.calls.clear()
        make_trackers(TRACKER_NAMES, run_dir=folder, tracking=TrackingSettings(**tracking), config={})
        return {name: kwargs for name, _, kwargs in service.calls if name.endswith(".init")}

    first, second = start(configured(tmp_path / "a")), start(configured(tmp_path / "b", seed=1))
    other = start(configured(tmp_path / "c", steps=10))
    group = first["wandb.init"]["group"]
    assert group.startswith("dapo ")
    assert [inits["trackio.init"]["group"] == group for inits in (first, second, other)] == [
        True,
        True,
        False,
    ]
    assert second["wandb.init"]["group"] == group
    assert first["wandb.init"]["tags"] == ["dapo", "House", "SmolLM2-135M"]
    assert ("run", f"{other['wandb.init']['group']}, dapo, House, SmolLM2-135M") in [
        args for name, args, _ in service.calls if name == "add_text"
    ]
    monkeypatch.setenv("WANDB_RUN_GROUP", "mine")
    monkeypatch.setenv("WANDB_TAGS", "night,dapo")
    inits = start(tmp_path / "a")
    assert inits["wandb.init"]["group"] == inits["trackio.init"]["group"] == "mine"
    assert inits["wandb.init"]["tags"] == ["night", "dapo", "House", "SmolLM2-135M"]
    inits = start(tmp_path / "a", group="ours", tags=("a",))
    assert inits["wandb.init"]["group"] == "ours" and inits["wandb.init"]["tags"][0] == "a"


def test_a_tracker_without_tables_gets_none() -> None:
    tracker = Recorder()
    trackers = TrackerSet({"own": tracker})
    trackers.log_rollouts(1, [group("1+2?")])
    assert trackers.num_failures == {"own": 0} and not tracker.seen


def test_a_resumed_run_goes_on_in_the_trackers_own_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Trackio's name where "grpo-0" is another experiment's
    service = FakeService(run_id="abc", run_name="grpo-0-brave-fox")
    service.install(monkeypatch)
    run_dir = tmp_path / "grpo-0"
    run_dir.mkdir()
    # begun, killed before the first checkpoint, killed after the one of step 3
    for newest in (None, None, 3):
        make_trackers(TRACKER_NAMES, run_dir=run_dir, config={}, newest_step=newest)
        (run_dir / "tensorboard").mkdir(exist_ok=True)
    inits = [(name, kwargs) for name, _, kwargs in service.calls if name.endswith((".init", "SummaryWriter"))]
    # step 3 stays
    assert [kwargs.get("purge_step") for name, kwargs in inits if name == "SummaryWriter"] == [None, 0, 4]
    trackio = [(kwargs["name"], kwargs["resume"]) for name, kwargs in inits if name == "trackio.init"]
    assert trackio == [("grpo-0", "never"), ("grpo-0-brave-fox", "allow"), ("grpo-0-brave-fox", "allow")]
    wandb = [(kwargs.get("id"), kwargs.get("resume")) for name, kwargs in inits if name == "wandb.init"]
    assert wandb == [(None, None), ("abc", "allow"), ("abc", "allow")]


def test_tensorboard_forgets_the_cold_start_of_a_run_that_begins_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its steps are at most 0."""
    service = FakeService()
    service.install(monkeypatch)
    (tmp_path / "tensorboard").mkdir()
    for newest in (None, 0):
        make_trackers(["tensorboard"], run_dir=tmp_path, config={}, newest_step=newest, first_step=-4)
    assert [kwargs["purge_step"] for name, _, kwargs in service.calls if name == "SummaryWriter"] == [-4, 1]


def test_a_run_that_wandb_wrote_offline_is_not_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two offline parts of one id overwrite each other when they are synchronised."""
    service = FakeService(offline=True)
    service.install(monkeypatch)
    for _ in range(2):
        make_trackers(["wandb"], run_dir=tmp_path, config={}, newest_step=3)
    assert all("id" not in kwargs for name, _, kwargs in service.calls if name == "wandb.init")
    assert not (tmp_path / "trackers.json").exists()


def test_a_tracker_that_cannot_start_is_a_config_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = types.ModuleType("wandb")

    def init(**_: Any) -> None:
        raise RuntimeError("not logged in")

    fake.init = init  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", fake)
    with pytest.raises(ConfigError, match="not logged in"):
        make_trackers(["wandb"], run_dir=tmp_path, config={})
