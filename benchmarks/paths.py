"""Cost of the unpacked path compared with the packed one, for a model that both compute exactly.

    python -m benchmarks.paths [--model smollm2-135m-instruct] [--record records/paths.json]

Requests are generated one at a time, and all at once; an update is a forward and a backward pass over the
rollouts. One thread, float32; the table has medians of processor seconds, and the median ratio of pairs.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Final

import torch

from benchmarks.markdown_table import markdown
from outrider.engines.base import Engine, Generation, Request
from outrider.engines.local.engine import make_engine
from outrider.engines.local.model import Forward, LanguageModel, load_model
from outrider.engines.local.processor import read_processor
from outrider.trace import Trace
from outrider.training.packing import RolloutPath, pack
from outrider.training.policy import Policy, set_threads
from outrider.training.settings import OptimizerSettings
from outrider.types import Message, Origin, Task

PATHS: Final[tuple[Forward, ...]] = ("packed", "unpacked")
COLUMNS: Final = ("8 rollouts of 128 + 32 tokens", "packed, CPU s", "unpacked, CPU s", "unpacked / packed")
_NUM, _PROMPT, _NEW = 8, 128, 32


def requests_of(model: LanguageModel, *, num: int, prompt: int, new: int, seed: int = 0) -> list[Request]:
    """Return requests with one random prompt, which generate all of their tokens."""
    dice = torch.Generator().manual_seed(seed)
    top = min(90, int(model.model.config.get_text_config().vocab_size))
    ids = tuple(torch.randint(3, top, (prompt,), generator=dice).tolist())
    return [
        Request(request_id=str(one), token_ids=ids, max_tokens=new, seed=seed * num + one)
        for one in range(num)
    ]


def endless(model: LanguageModel) -> LanguageModel:
    """The model, without ids that end a turn."""
    return replace(model, eos_token_ids=frozenset(), eos_texts=())


def written_by(
    model: LanguageModel, *, num: int, prompt: int, new: int, seed: int = 0
) -> tuple[list[Request], list[Generation]]:
    """Return the requests and the generations of the model's engine."""
    asked = requests_of(model, num=num, prompt=prompt, new=new, seed=seed)
    return asked, make_engine(endless(model)).generate(asked)


def paths_of(asked: Sequence[Request], written: Sequence[Generation]) -> list[RolloutPath]:
    """Rollouts of a group as the update packs them, each token with a credit of 1."""
    trace, message = Trace(task=Task(key="t", question="")), Message(role="user", content="")
    root = trace.append(parent=None, origin=Origin.PROMPT, token_ids=asked[0].token_ids, message=message)
    paths = []
    for number, one in enumerate(written):
        node = trace.append(
            parent=root.node_id, origin=Origin.POLICY, token_ids=one.token_ids, message=message,
            logprobs=one.logprobs, entropies=one.entropies,
        )  # fmt: skip
        node.credit = (1.0,) * len(one.token_ids)
        paths.append(RolloutPath(nodes=[root, node], rollout_index=number, rollout=number))
    return paths


def works(model: LanguageModel) -> dict[str, Callable[[], None]]:
    """What is timed of a model, by name."""
    asked, written = written_by(model, num=_NUM, prompt=_PROMPT, new=_NEW)
    policy = Policy(model, OptimizerSettings())

    def engine() -> Engine:
        return make_engine(endless(model))  # without a cache of another run

    def one_by_one() -> None:
        playing = engine()
        for request in asked:
            playing.generate([request])

    def update() -> None:
        [batch] = pack(paths_of(asked, written), max_tokens=10_000)
        (-policy.score(batch).logprobs_T.mean()).backward()

    return {
        "generation, a request at a time": one_by_one,
        "generation, all at once": lambda: [engine().generate(asked), None][1],
        "update": update,
    }


def rows(name: str, *, num_pairs: int) -> Iterator[tuple[str, ...]]:
    """Yield a row per kind of work; the two paths alternate."""
    both = [works(load_model(name, precision="float32", forward=forward)) for forward in PATHS]
    for what in both[0]:
        times: list[tuple[float, ...]] = [
            tuple(_seconds(one[what]) for one in both) for _ in range(num_pairs)
        ]
        medians = [median(pair[side] for pair in times) for side in range(2)]
        ratio = median(unpacked / packed for packed, unpacked in times)
        yield what, *(f"{one:.1f}" for one in medians), f"{ratio:.1f}"


def _seconds(work: Callable[[], None]) -> float:
    began = time.process_time()  # processor time of one thread, without other processes
    work()
    return time.process_time() - began


def record(file: Path, columns: Sequence[str], found: Sequence[Sequence[str]], *, command: str) -> None:
    """Keep a table for ``benchmarks.figures``."""
    source = f"measured on {read_processor().model}, one thread, torch {torch.__version__}"
    cells = {
        "kind": "cells", "source": source, "command": command, "columns": list(columns),
        "rows": [list(row) for row in found],
    }  # fmt: skip
    file.write_text(json.dumps(cells, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--record", type=Path, help="write the table there too")
    given = parser.parse_args()
    set_threads(1)
    found = list(rows(given.model, num_pairs=given.pairs))
    print(markdown(COLUMNS, found))
    if given.record:
        record(given.record, COLUMNS, found, command="python -m benchmarks.paths")


if __name__ == "__main__":
    main()
