"""Replaying recorded rollouts: nothing differs on the same environment, and whatever changed is named."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from outrider.cli import main
from outrider.config import to_toml, validate
from outrider.engines.base import Request
from outrider.engines.scripted import ScriptedEngine
from outrider.environments.base import StepResult
from outrider.errors import DataError
from outrider.rollout.episode import Sampling
from outrider.rollout.hooks import Attempt, EpisodeState, Hook, Splice
from outrider.rollout.scheduler import Scheduler
from outrider.rollout.settings import Limits
from outrider.tokens import ChatRenderer
from outrider.trace import Trace
from outrider.training import replay
from outrider.training.replay import replay_step
from outrider.training.settings import RunSettings
from outrider.training.step_records import trace_rows
from outrider.types import Message, Origin, Outcome
from outrider.viewer.records import SCHEMA, StepFiles, TraceReader, TraceRow, step_file
from tests.tiny import tiny_tokenizer
from tests.toy import ToyEnvironment, ToyTaskSet

TOKENIZER = tiny_tokenizer()
STEP = 3


def script(request: Request, context: str) -> str:
    """Each rollout of a group ends in another way."""
    _, _, rollout, turn = request.request_id.split("/")
    asks_first = {"0000": "<answer>{n}</answer>", "0001": "<answer>0</answer>", "0002": "no tag"}
    number = context.rpartition("it is ")[2].partition("\n")[0]
    if rollout == "0003":
        return "<ask>?</ask>"  # for ever
    if rollout == "0004":
        return "<ask>" + "y" * 44 + "</ask>"
    if rollout == "0005":
        return "<crash>"
    if rollout == "0006":
        return "</ask" + ">"[: int(turn) + 1]
    return "<ask>?</ask>" if turn == "000" else asks_first[rollout].replace("{n}", number)


class Shows(Hook):
    """Puts a step before the second turn: shown only, or executed in the environment."""

    def __init__(self, executes: bool) -> None:
        self.executes = executes

    def before_turn(self, state: EpisodeState) -> Sequence[Splice | Attempt]:
        if state.turn != 1 or state.rollout > 1:
            return ()
        facts = {"step_ids": [], "similarity": 1.0, "agent": "x"}
        if not self.executes:
            return [
                Splice(origin=Origin.BUFFER, text="<retrieve><ask>a</ask>stored</retrieve>\n", metadata=facts)
            ]
        return [
            Attempt(
                action="<ask>a</ask>",
                then=lambda result: Splice(
                    origin=Origin.BUFFER,
                    text="<retrieve><ask>a</ask>"
                    f"{result.message.content if result.message else ''}</retrieve>\n",
                    metadata=facts,
                ),
            )
        ]

    def after_turn(self, state: EpisodeState) -> None: ...

    def after_group(self, trace: Trace) -> None: ...


def settings_of(mode: str | None) -> RunSettings:
    algorithm: dict[str, Any] = {"type": "grpo", "group_size": 7}
    if mode is not None:
        algorithm = {"type": "rapo", "group_size": 7, "retrieval": {"mode": mode}}
    environment = {"type": "scienceworld" if mode == "execute" else "factbook"}
    limits = Limits(max_turns=4, max_turn_tokens=100, max_response_tokens=240).model_dump()
    return validate(
        RunSettings, {"environment": environment, "algorithm": algorithm, "rollout": limits, "seed": 9}
    )


def record(
    run: Path, family: ToyTaskSet, mode: str | None = None, *, hook: type[Shows] = Shows
) -> list[Trace]:
    """Rollouts of the real loop, written as the trainer writes them."""
    settings = settings_of(mode)
    scheduler = Scheduler(
        engine=ScriptedEngine(tokenizer=TOKENIZER, script=script),
        renderer=ChatRenderer(TOKENIZER),
        factory=family.make(),
        limits=settings.rollout,
        sampling=Sampling(stop=family.stop),
        run_seed=settings.seed,
        hooks=() if mode is None else (hook(mode == "execute"),),
        max_retries=0,
    )
    report = scheduler.run(family.tasks("train"), modes=("x",) * 7, training_step=STEP - 1)
    run.mkdir()
    (run / "config.toml").write_text(to_toml(settings.model_dump(mode="json")))
    StepFiles(run / "traces").write_rows(
        step_file(STEP), trace_rows(report.traces, step=STEP, tokenizer=TOKENIZER).nodes, SCHEMA
    )
    return report.traces


@pytest.fixture
def family(monkeypatch: pytest.MonkeyPatch) -> ToyTaskSet:
    toy = ToyTaskSet(2)
    monkeypatch.setattr(replay, "make_task_set", lambda config: toy)
    monkeypatch.setenv("COLUMNS", "200")
    return toy


def cells(text: str) -> list[list[str]]:
    return [
        [cell.strip() for cell in line.strip("│").split("│")]
        for line in text.splitlines()
        if line.startswith("│")
    ]


@pytest.mark.parametrize(
    ("mode", "role"), [(None, "inline"), (None, "user"), ("context", "inline"), ("execute", "user")]
)
def test_the_same_environment_gives_the_same(
    family: ToyTaskSet, tmp_path: Path, capsys: Any, mode: str | None, role: str
) -> None:
    family.role = role
    traces = record(tmp_path / "run", family, mode)
    outcomes = {leaf.outcome for trace in traces for leaf in trace.leaves.values()}
    ends = {
        Outcome.FINISHED,
        Outcome.INVALID,
        Outcome.TRUNCATED_TURNS,
        Outcome.TRUNCATED_TOKENS,
        Outcome.ENVIRONMENT_FAULT,
    }
    assert ends <= outcomes  # every kind of end is there to be replayed
    family.num_factories_open = 0
    assert replay_step(tmp_path / "run", STEP) == 0
    assert cells(capsys.readouterr().out)[-4:] == [
        ["replayed", "12"], ["same", "12"], ["different", "0"], ["not on file (faults)", "2"],
    ]  # fmt: skip
    assert family.num_factories_open == 0


def test_a_retrieved_turn_is_replayed_with_its_observation(
    family: ToyTaskSet, tmp_path: Path, capsys: Any
) -> None:
    class Turns(Shows):
        def before_turn(self, state: EpisodeState) -> Sequence[Splice | Attempt]:
            def then(result: StepResult) -> Splice:
                facts = {"step_ids": [], "similarity": 1.0, "agent": "x"}
                return Splice(origin=Origin.BUFFER, text="", metadata=facts)

            attempt = Attempt(action="<ask>a</ask>", then=then, as_turn=True)
            return [attempt] if super().before_turn(state) else ()

    family.role = "user"
    traces = record(tmp_path / "run", family, "execute", hook=Turns)
    shown = [node for trace in traces for node in trace.nodes if node.origin is Origin.BUFFER]
    assert shown and all(node.message.role == "assistant" for node in shown)
    assert replay_step(tmp_path / "run", STEP) == 0
    family.words = "it was"
    capsys.readouterr()
    assert replay_step(tmp_path / "run", STEP) == 1


def test_what_was_tried_without_a_word_of_it_is_tried_again(
    family: ToyTaskSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A refused action is in no text, but it may have cost a move, so the environment hears it in its
    place.
    """

    class Refused(Shows):
        def before_turn(self, state: EpisodeState) -> Sequence[Splice | Attempt]:
            shown = super().before_turn(state)
            return [Attempt(action="<ask>refused</ask>", then=lambda result: None), *shown] if shown else ()

    record(tmp_path / "run", family, "execute", hook=Refused)
    heard: list[list[str]] = []
    step = ToyEnvironment.step

    def listen(environment: ToyEnvironment, message: Message) -> StepResult:
        heard[-1].append(message.content)
        return step(environment, message)

    reset = ToyEnvironment.reset
    monkeypatch.setattr(ToyEnvironment, "reset", lambda self, seed: (heard.append([]), reset(self, seed))[1])
    monkeypatch.setattr(ToyEnvironment, "step", listen)
    assert replay_step(tmp_path / "run", STEP) == 0
    assert (
        sum(
            texts[:2] == ["<ask>?</ask>", "<ask>refused</ask>"] and texts[2].startswith("<ask>a</ask>")
            for texts in heard
        )
        == 4
    )


def test_another_observation_is_named_where_it_begins(
    family: ToyTaskSet, tmp_path: Path, capsys: Any
) -> None:
    record(tmp_path / "run", family)
    family.words = "it was"
    assert replay_step(tmp_path / "run", STEP) == 1
    rows = [row for row in cells(capsys.readouterr().out) if len(row) == 6]
    assert {(row[0], row[2], row[3]) for row in rows} == {(f"toy/{i}", "0", "observation") for i in range(2)}
    assert all("it is" in row[4] and "it was" in row[5] for row in rows)


def test_another_return_is_named(family: ToyTaskSet, tmp_path: Path, capsys: Any) -> None:
    record(tmp_path / "run", family)
    family.bonus = 1e-12
    assert replay_step(tmp_path / "run", STEP) == 1
    rows = [row for row in cells(capsys.readouterr().out) if len(row) == 6]
    assert {row[3] for row in rows} == {"return"} and len(rows) == 4
    assert ["toy/0", "0", "", "return", "2.0", "2.000000000001"] in rows


def test_a_changed_executed_step_is_named(family: ToyTaskSet, tmp_path: Path, capsys: Any) -> None:
    record(tmp_path / "run", family, "execute")
    change(
        tmp_path / "run",
        lambda row: dataclasses.replace(row, text=row.text.replace("it is", "it is not")),
        Origin.BUFFER,
    )
    assert replay_step(tmp_path / "run", STEP) == 1
    rows = [row for row in cells(capsys.readouterr().out) if len(row) == 6]
    assert {(row[1], row[2], row[3]) for row in rows} == {
        ("0", "1", "executed step"),
        ("1", "1", "executed step"),
    }


@pytest.mark.parametrize("outcome", [Outcome.TRUNCATED_TURNS, Outcome.FINISHED])
def test_another_outcome_is_named(family: ToyTaskSet, tmp_path: Path, capsys: Any, outcome: Outcome) -> None:
    record(tmp_path / "run", family)
    change(tmp_path / "run", lambda row: dataclasses.replace(row, outcome=outcome) if row.outcome else row)
    assert replay_step(tmp_path / "run", STEP) == 1
    rows = [row for row in cells(capsys.readouterr().out) if len(row) == 6]
    assert {row[3] for row in rows} == {"outcome"} and {row[4] for row in rows} == {outcome.value}
    assert outcome.value not in {row[5] for row in rows}


def test_a_changed_turn_that_ends_the_episode_early_is_named(
    family: ToyTaskSet, tmp_path: Path, capsys: Any
) -> None:
    record(tmp_path / "run", family)
    first = {}

    def shorten(row: TraceRow) -> TraceRow:
        if first.setdefault((row.trace_id, row.rollout), row) is not row or row.rollout != 3:
            return row
        return dataclasses.replace(row, text="<answer>1</answer>")

    change(tmp_path / "run", shorten, Origin.POLICY)
    assert replay_step(tmp_path / "run", STEP) == 1
    rows = [row for row in cells(capsys.readouterr().out) if len(row) == 6]
    assert [row[1:] for row in rows] == [["3", "0", "end", "the episode went on", "the episode ended"]] * 2


def test_another_start_is_named(family: ToyTaskSet, tmp_path: Path, capsys: Any) -> None:
    """The seed of the start is that of the loop: with another run seed the prompt differs (it holds the seed
    modulo 7).
    """
    record(tmp_path / "run", family)
    file = tmp_path / "run" / "config.toml"
    file.write_text(file.read_text().replace("seed = 9", "seed = 10", 1))
    assert replay_step(tmp_path / "run", STEP) == 1
    assert {row[3] for row in cells(capsys.readouterr().out) if len(row) == 6} <= {
        "prompt",
        "observation",
        "return",
    }


def test_a_fault_of_the_replay_is_a_difference(family: ToyTaskSet, tmp_path: Path, capsys: Any) -> None:
    record(tmp_path / "run", family)
    family.broken.add("toy/1")
    assert replay_step(tmp_path / "run", STEP) == 1
    rows = [row for row in cells(capsys.readouterr().out) if len(row) == 6]
    assert len(rows) == 6 and {(row[0], row[3], row[5]) for row in rows} == {
        ("toy/1", "fault", "the toy broke")
    }


def test_what_is_missing_is_one_line(family: ToyTaskSet, tmp_path: Path, capsys: Any) -> None:
    record(tmp_path / "run", family)
    assert main(["replay", str(tmp_path / "none"), "--step", "3"]) == 1
    assert main(["replay", str(tmp_path / "run"), "--step", "4"]) == 1
    family.num_tasks = 1
    with pytest.raises(DataError, match="toy/1 of the record is not in the training split"):
        replay_step(tmp_path / "run", STEP)
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 2 and "no run directory" in errors[0] and "missing" in errors[1]


def test_markup_in_texts_is_shown_as_it_is(family: ToyTaskSet, tmp_path: Path, capsys: Any) -> None:
    record(tmp_path / "run", family)
    family.words = "[/red] it is"
    assert replay_step(tmp_path / "run", STEP) == 1
    assert "[/red] it is" in capsys.readouterr().out


def change(run: Path, edit: Any, origin: Origin | None = None) -> None:
    rows = TraceReader(run / "traces").read(STEP)
    StepFiles(run / "traces").write_rows(
        step_file(STEP), [edit(row) if origin in (None, row.origin) else row for row in rows], SCHEMA
    )
