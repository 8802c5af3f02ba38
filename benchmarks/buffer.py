"""Speed of the Step-Trace Buffer at the size of the RAPO paper (arXiv 2603.03078): 169,489 steps of 384
dimensions.

    python benchmarks/buffer.py [--steps 169489] [--dim 384] [--queries 64]

Keys are seeded random unit vectors, so that the table shows the buffer without the embedder.
"""

import argparse
import dataclasses
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from outrider.memory.embedders import Vectors, load_embedder
from outrider.memory.step_buffer import StepTraceBuffer
from outrider.memory.step_store import StepFilter
from outrider.types import Message, Step, Trajectory

STEPS_A_TRAJECTORY = 4
TRAJECTORIES_A_TASK = 5


class RandomEmbedder:
    """A fresh random direction a text, in order of calls."""

    def __init__(self, dim: int) -> None:
        self.dim = dim
        self.name = f"random:{dim}"
        self._generator = np.random.Generator(np.random.PCG64(0))

    def embed(self, texts: Sequence[str]) -> Vectors:
        """See :class:`outrider.memory.embedders.Embedder`."""
        rows = self._generator.standard_normal((len(texts), self.dim), np.float32)
        unit: Vectors = rows / np.linalg.norm(rows, axis=1, keepdims=True)
        return unit


def trajectories(num_steps: int) -> Iterator[Trajectory]:
    """Trajectories of about the paper's lengths: 92 tokens a step."""
    for number in range(-(-num_steps // STEPS_A_TRAJECTORY)):
        length = min(STEPS_A_TRAJECTORY, num_steps - number * STEPS_A_TRAJECTORY)
        yield Trajectory(
            trajectory_id=f"trajectory-{number}",
            task_key=f"task-{number // TRAJECTORIES_A_TASK}",
            agent="benchmark",
            prompt=(Message(role="user", content=f"question {number // TRAJECTORIES_A_TASK} " * 10),),
            steps=tuple(
                Step(
                    text=f"thought {index} " * 18,
                    observation=f"seen {number} " * 18,
                    is_terminal=index == length - 1,
                )
                for index in range(length)
            ),
            reward=(number % 7) / 6,
        )


def median_ms(action: Callable[[int], object], num: int) -> float:
    """Return the median wall-clock time of a call in ms, after one warm-up call."""
    times = []
    for index in range(num + 1):
        start = time.perf_counter()
        action(index)
        times.append(time.perf_counter() - start)
    return 1000 * statistics.median(times[1:])


def main() -> None:
    """Build, reopen, query; print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=169_489)
    parser.add_argument("--dim", type=int, default=384)
    parser.add_argument("--queries", type=int, default=64)
    options = parser.parse_args()
    rows: list[tuple[str, str]] = [("steps x dimensions", f"{options.steps:,} x {options.dim}")]
    embedder = RandomEmbedder(options.dim)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "buffer.sqlite"
        offered = list(trajectories(options.steps))
        start = time.perf_counter()
        with StepTraceBuffer(path, embedder, mode="write") as buffer:
            buffer.add_trajectories(offered, keep_best=TRAJECTORIES_A_TASK)
        seconds = time.perf_counter() - start
        rows.append(("build (filter, write), steps/s", f"{options.steps / seconds:,.0f}  ({seconds:.1f} s)"))
        rows.append(("file", f"{path.stat().st_size / 2**20:,.0f} MiB"))
        start = time.perf_counter()
        buffer = StepTraceBuffer(path, embedder, mode="read")
        rows.append(("open (integrity check, load)", f"{time.perf_counter() - start:.2f} s"))
        queries = embedder.embed([""] * options.queries)
        some = StepFilter(exclude=frozenset(range(1, 9)))
        mine = [StepFilter(scope="same_task", task_key=f"task-{i}") for i in range(options.queries)]
        single = median_ms(lambda i: buffer.query_vectors(queries[i : i + 1], [some]), options.queries - 1)
        rows.append(("query, single, top-1", f"{single:.1f} ms"))
        top = median_ms(lambda i: buffer.query_vectors(queries[i : i + 1], [some], k=10), options.queries - 1)
        rows.append(("query, single, top-10", f"{top:.1f} ms"))
        batched = median_ms(lambda i: buffer.query_vectors(queries, [some] * options.queries), 3)
        rows.append(
            (f"query, {options.queries} in a batch, top-1", f"{batched / options.queries:.1f} ms a query")
        )
        same = median_ms(
            lambda i: buffer.query_vectors(queries[i : i + 1], mine[i : i + 1]), options.queries - 1
        )
        rows.append(("query, single, same task only", f"{same:.2f} ms"))
        rows.append(("stats", f"{median_ms(lambda i: buffer.stats(), 1):.0f} ms"))
        buffer.close()
        with StepTraceBuffer(path, embedder, mode="write") as buffer:
            new = list(trajectories(40))
            better = [dataclasses.replace(t, trajectory_id=f"new-{t.trajectory_id}", reward=2.0) for t in new]
            start = time.perf_counter()
            buffer.add_trajectories(better)
            rows.append(
                ("add 10 trajectories to the full buffer", f"{1000 * (time.perf_counter() - start):.0f} ms")
            )
            start = time.perf_counter()
            buffer.rollback(buffer.revision - 1)
            rows.append(("rollback of that", f"{time.perf_counter() - start:.2f} s"))
    rows.append(("peak memory", f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10:,.0f} MiB"))
    minilm = load_embedder("minilm")
    for num_words in (30, 100, 300):
        texts = [f"{i} " + "the agent looks around " * (num_words // 4) for i in range(24)]
        start = time.perf_counter()
        minilm.embed(texts)
        rows.append(
            (
                f"minilm, texts of {num_words} words",
                f"{len(texts) / (time.perf_counter() - start):.0f} a second",
            )
        )
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        print(f"{name:<{width}}  {value}")


if __name__ == "__main__":
    main()
