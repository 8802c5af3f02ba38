"""The environment of recipes/verifiers-desk.toml, written for the package verifiers: it knows nothing of
Outrider. A clerk sorts the letters of a shop and is asked two questions about each; the rows are those of
recipes/agent-desk.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import verifiers.v1 as vf

DESKS = ("billing", "shipping", "returns")
HASTE = ("urgent", "normal")


class DeskData(vf.TaskData):
    """A letter's desk and haste."""

    desk: str
    haste: str


class DeskTask(vf.Task[DeskData, vf.State, vf.TaskConfig]):
    """The prompt asks for the desk."""

    @vf.metric
    async def num_words(self, trace: vf.Trace) -> float:
        """Words of the last answer."""
        return float(len(trace.last_reply.split()))


class DeskTaskset(vf.Taskset[DeskTask, vf.TasksetConfig]):
    """The letters for training, those for validation, those of the test."""

    def load(self) -> Iterator[DeskTask]:
        """The rows of the three files, one behind the other."""
        for split in ("train", "valid", "test"):
            file = Path(__file__).parent / "agent-desk" / f"{split}.jsonl"
            for line in file.read_text(encoding="utf-8").splitlines():
                row = json.loads(line)
                desk, haste = row["answer"].split()
                data = DeskData(
                    system_prompt="You sort letters. Answer with one word.",
                    prompt=f"{row['question']}\nWhich desk: {', '.join(DESKS)}?",
                    desk=desk,
                    haste=haste,
                )
                yield DeskTask(data, self.config.task)


class DeskEnvConfig(vf.EnvConfig):
    """One agent."""

    clerk: vf.AgentConfig = vf.AgentConfig()


class DeskEnv(vf.Env[DeskEnvConfig]):
    """The shop asks; half a reward is for the right desk, half for the right haste."""

    async def run(self, task: Any, agents: Any) -> None:
        """An episode."""
        async with agents.clerk.interaction(task) as talk:
            desk = await talk.turn()
            haste = await talk.turn(f"Is it {' or '.join(HASTE)}?")
        is_desk = first_of(DESKS, desk.last_reply) == task.data.desk
        is_haste = first_of(HASTE, haste.last_reply) == task.data.haste
        talk.trace.record_reward("right_desk", float(is_desk), 0.5)
        talk.trace.record_reward("right_haste", float(is_haste), 0.5)


def first_of(words: tuple[str, ...], text: str) -> str | None:
    """The word that comes first in the text."""
    places = {text.lower().find(word): word for word in words}
    return min(((at, word) for at, word in places.items() if at >= 0), default=(0, None))[1]


__all__ = ["DeskEnv", "DeskTaskset"]
