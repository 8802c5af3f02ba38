"""The token bill: equal to the tokens of rollouts with the same commands, and its forms add up."""

from collections.abc import Sequence

import pytest

from outrider.engines.base import Request
from outrider.environments.alfworld.environment import AlfworldConfig
from outrider.environments.base import make_task_set, split_tasks
from outrider.errors import DataError
from outrider.planning.token_bill import ALL_STEPS, search_commands, token_bill, trace_lengths, window_samples
from outrider.rollout.settings import Limits
from outrider.tokens import ChatRenderer
from outrider.trace import split_contexts
from outrider.types import Origin
from tests.rollout.fakes import TOKENIZER, scheduler, scripted

RENDERER = ChatRenderer(TOKENIZER)
NUM_TURNS = 4
WINDOW = {
    "steps": 2,
    "actions": "quoted",
    "hide": ["help"],
    "parse": "verl-agent-30",
    "max_prompt_tokens": 10**6,
}


def games(context: str, num_steps: int = 2, **changes: object) -> AlfworldConfig:
    window = {"window": WINDOW | {"steps": num_steps}} if context == "window" else {}
    return AlfworldConfig.model_validate({"context": context, "num_test": 3, **window, **changes})


def rollout_tokens(settings: AlfworldConfig, replies: Sequence[str]) -> list[int]:
    """Tokens of the samples of a rollout, up to its last turn."""
    remaining = list(replies)

    def script(request: Request, text: str) -> str:
        return remaining.pop(0)

    task_set = make_task_set(settings)
    report = scheduler(
        scripted(script, context_length=10**6),
        task_set.make(),  # type: ignore[arg-type]
        limits=Limits(
            max_turns=NUM_TURNS,
            max_turn_tokens=10**4,
            max_response_tokens=10**6,
            max_observation_tokens=10**6,
        ),
        stop=task_set.stop,
    ).run([split_tasks(task_set, "test")[0]], modes=("plain",), training_step=0)
    assert not report.faults
    ((_, path),) = report.traces[0].rollouts()
    counts = []
    for context in split_contexts(path):
        last = max((n for n, node in enumerate(context) if node.origin is Origin.POLICY), default=-1)
        if last >= 0:
            counts.append(sum(len(node.token_ids) for node in context[: last + 1]))
    return counts


@pytest.fixture(scope="module")
def replies() -> list[str]:
    task_set = make_task_set(games("chat", max_moves=NUM_TURNS + 1))
    commands = search_commands(task_set, split_tasks(task_set, "test")[0], num_turns=NUM_TURNS)
    assert commands is not None
    assert len(set(commands)) > 2
    return [f"<think>a thought</think>\n<action>{command}</action>" for command in commands]


@pytest.mark.parametrize("num_steps", [0, 2, 5])
def test_window_samples_are_those_of_a_rollout(num_steps: int, replies: list[str]) -> None:
    settings = games("window", num_steps)
    task_set = make_task_set(settings)
    samples = window_samples(task_set, split_tasks(task_set, "test")[0], replies, RENDERER)
    assert [sum(sample) for sample in samples] == rollout_tokens(settings, replies)


@pytest.mark.parametrize("shows_list", [True, False])
def test_trace_is_that_of_a_rollout(shows_list: bool, replies: list[str]) -> None:
    settings = games("chat", show_admissible=shows_list)
    task_set = make_task_set(settings)
    lengths = trace_lengths(task_set, split_tasks(task_set, "test")[0], replies, RENDERER)
    assert lengths[-1:] == rollout_tokens(settings, replies)


def test_forms_of_the_bill() -> None:
    bill = token_bill(
        games("window"), RENDERER, windows=(1, ALL_STEPS), turns=(1, 3), num_games=2, num_thought_tokens=5
    )
    first, third = bill.tokens[1], bill.tokens[3]
    assert bill.num_games == 2
    assert first["window of 1"] == first["window of all steps"]  # no history yet
    assert third["window of 1"] < third["window of all steps"]
    for lists in ("lists", "no lists"):
        assert first[f"chat of every turn, {lists}"] == first[f"one trace, {lists}"]
        assert third[f"chat of every turn, {lists}"] > third[f"one trace, {lists}"]
    assert third["one trace, no lists"] < third["one trace, lists"]
    assert bill.prompts["window of 1"] < third["window of 1"]
    longer = token_bill(
        games("window"), RENDERER, windows=(1,), turns=(3,), num_games=2, num_thought_tokens=9
    )
    # A thought is in every sample of a window once: 4 more tokens for each of 3 turns.
    assert longer.tokens[3]["window of 1"] == third["window of 1"] + 12


def test_too_few_games_are_an_error() -> None:
    with pytest.raises(DataError, match="only 3 of 4 games"):
        token_bill(games("window"), RENDERER, windows=(1,), turns=(2,), num_games=4, num_thought_tokens=0)
