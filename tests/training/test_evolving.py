"""An evolving buffer: which trajectories it retains if returns are equal."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from outrider.config import validate
from outrider.memory.embedders import load_embedder
from outrider.memory.step_buffer import StepTraceBuffer
from outrider.rollout.experts import play_experts
from outrider.rollout.settings import Limits
from outrider.seeding import reset_seed
from outrider.trace import Trace
from outrider.training.experts import evolve_buffer, fill_buffer
from outrider.training.settings import BufferSettings, RunSettings
from outrider.types import Step
from tests.rollout.fakes import TOKENIZER
from tests.toy import ToyTaskSet

FAMILY = ToyTaskSet(1)
SETTINGS = validate(RunSettings, {"environment": {"type": "factbook"}, "algorithm": {"type": "rapo"}})


@pytest.fixture
def buffer(tmp_path: Path) -> Iterator[StepTraceBuffer]:
    with StepTraceBuffer(tmp_path / "b.sqlite", load_embedder("hash"), mode="write") as made:
        yield made


def solved(num_thoughts: int) -> Trace:
    """A successful rollout whose answer comes after so many words."""

    def path(number: int) -> Sequence[Step]:
        return (
            Step(text="so " * num_thoughts + "<ask>?</ask>", observation=""),
            Step(text=f"<answer>{number}</answer>", observation="", is_terminal=True),
        )

    [trace] = play_experts(
        tasks=FAMILY.tasks("train"), expert=lambda task: path(reset_seed(0, 0, task.key) % 1000),
        factory=FAMILY.make(), tokenizer=TOKENIZER, limits=Limits(), stop=FAMILY.stop, run_seed=0,
        context_length=4096,
    )  # fmt: skip
    assert trace.leaves[0].success
    return trace


def evolve(buffer: StepTraceBuffer, *num_thoughts: int) -> dict[str, int]:
    """Who is in the buffer after steps with one success each."""
    for step, count in enumerate(num_thoughts):
        evolve_buffer(
            buffer, [solved(count)], settings=BufferSettings(evolve=True), step=step, count_tokens=len
        )
    return dict(buffer.stats().num_trajectories_by_agent)


@pytest.mark.parametrize("counted", [True, False])
def test_long_rollouts_of_the_agent_do_not_push_the_expert_out(
    buffer: StepTraceBuffer, counted: bool
) -> None:
    """Nor do they where the expert's length is unknown."""
    count = len if counted else None
    fill_buffer(buffer, FAMILY, FAMILY.make(), FAMILY.tasks("train"), SETTINGS, print, count_tokens=count)
    assert evolve(buffer, *range(20, 27)) == {"expert": 1, "self": 4}


def test_what_is_known_to_be_shorter_displaces_the_longest(buffer: StepTraceBuffer) -> None:
    fill_buffer(
        buffer,
        FAMILY,
        FAMILY.make(),
        FAMILY.tasks("train"),
        SETTINGS,
        print,
        count_tokens=lambda text: 100 * len(text),
    )
    assert evolve(buffer, *range(20, 27)) == {"self": 5}
