"""The taskset of recipes/verifiers-desk.toml: an environment of the package verifiers, which knows nothing of
Outrider. Letters to a shop are sorted in one answer; the rows are those of recipes/agent-desk.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import verifiers.v1 as vf

DESKS = ("billing", "shipping", "returns")
HASTE = ("urgent", "normal")
PROMPT = (
    "{letter}\nWhich desk: billing, shipping, returns? And is it urgent or normal? Answer with two words."
)


class DeskData(vf.TaskData):
    """A letter's desk and haste."""

    desk: str
    haste: str


class DeskTask(vf.Task[DeskData, vf.State, vf.TaskConfig]):
    """Half a reward for the right desk, half for the right haste."""

    @vf.reward(weight=0.5)
    async def right_desk(self, trace: vf.Trace) -> float:
        """The first desk that is named."""
        return float(first_of(DESKS, trace.last_reply) == self.data.desk)

    @vf.reward(weight=0.5)
    async def right_haste(self, trace: vf.Trace) -> float:
        """The first haste that is named."""
        return float(first_of(HASTE, trace.last_reply) == self.data.haste)

    @vf.metric
    async def num_words(self, trace: vf.Trace) -> float:
        """Words of the answer."""
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
                prompt = PROMPT.format(letter=row["question"])
                data = DeskData(prompt=prompt, system_prompt="You sort letters.", desk=desk, haste=haste)
                yield DeskTask(data, self.config.task)


def first_of(words: tuple[str, ...], text: str) -> str | None:
    """The word that comes first in the text."""
    places = {text.lower().find(word): word for word in words}
    return min(((at, word) for at, word in places.items() if at >= 0), default=(0, None))[1]


__all__ = ["DeskTaskset"]
