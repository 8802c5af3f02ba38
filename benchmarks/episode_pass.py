"""Update time of long episodes: all turns in one pass, compared with one row per turn with its whole history.

    python benchmarks/episode_pass.py [--turns 30] [--episodes 4] [--repeats 3] [--precision auto]

Both sides train on the same tokens, without padding and with the same kernels. Episodes are like those of
ScienceWorld: a prompt, then turns of a short action and its observation. ``off-policy`` first scores every
episode in the context with tips (EMPO², Table 3).
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable

os.environ.setdefault("GOMP_SPINCOUNT", "10000")

import torch
from rich.console import Console
from rich.table import Table

from outrider.engines.local.model import load_model, resolve_precision
from outrider.trace import Node, Trace, without_memory
from outrider.training.distill_term import score_other
from outrider.training.packing import RolloutPath, pack
from outrider.training.policy import Policy
from outrider.training.settings import OptimizerSettings
from outrider.types import Message, Origin, Task

PROMPT, ACTION, OBSERVATION, TIP = 200, 12, 30, 20
TEXT = Message(role="user", content="")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--turns", type=int, default=30)
    parser.add_argument("--episodes", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--max-tokens", type=int, default=2048)
    parser.add_argument("--precision", choices=("auto", "bfloat16", "float32"), default="auto")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    precision = resolve_precision(arguments.precision, "cpu")
    policy = Policy(load_model(arguments.model, precision=precision), OptimizerSettings(learning_rate=1e-9))
    paths = episodes(arguments.episodes, arguments.turns)
    sides = {
        "one pass an episode": lambda: update(policy, paths, arguments.max_tokens),
        "one row a turn": lambda: update(policy, rows_a_turn(paths), arguments.max_tokens),
        "one pass an episode, off-policy": lambda: off_policy(policy, paths, arguments.max_tokens),
    }
    seconds, tokens = measure(sides, arguments.repeats)
    title = (
        f"{arguments.episodes} episodes of {arguments.turns} turns, {precision}, "
        f"medians of {arguments.repeats}"
    )
    table = Table("update", "seconds", "computed tokens", "time against one pass", title=title)
    for name in sides:
        table.add_row(
            name,
            f"{seconds[name]:.1f}",
            str(tokens[name]),
            f"{seconds[name] / seconds['one pass an episode']:.2f}",
        )
    Console().print(table)


def measure(sides: dict[str, Callable[[], int]], repeats: int) -> tuple[dict[str, float], dict[str, int]]:
    """Return medians of alternating measurements."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    tokens = {}
    for _ in range(repeats):
        for name, run in sides.items():
            began = time.perf_counter()
            tokens[name] = run()
            seconds[name].append(time.perf_counter() - began)
    return {name: statistics.median(values) for name, values in seconds.items()}, tokens


def episodes(num: int, num_turns: int) -> list[RolloutPath]:
    random = torch.Generator().manual_seed(0)

    def ids(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(100, 10_000, (count,), generator=random).tolist())

    trace = Trace(task=Task(key="benchmark", question=""))
    root = trace.append(parent=None, origin=Origin.PROMPT, token_ids=ids(PROMPT), message=TEXT)
    paths = []
    for index in range(num):
        tip: Node = root
        for _ in range(num_turns):
            tip = trace.append(parent=tip.node_id, origin=Origin.MEMORY, token_ids=ids(TIP), message=TEXT)
            zeros = (0.0,) * ACTION
            tip = trace.append(
                parent=tip.node_id,
                origin=Origin.POLICY,
                token_ids=ids(ACTION),
                message=TEXT,
                logprobs=zeros,
                entropies=zeros,
            )
            tip.credit = (1.0,) * ACTION
            tip = trace.append(
                parent=tip.node_id, origin=Origin.ENVIRONMENT, token_ids=ids(OBSERVATION), message=TEXT
            )
        acted = trace.path(tip.node_id)
        paths.append(
            RolloutPath(
                nodes=without_memory(acted), rollout_index=index, rollout=index, nodes_with_tips=acted
            )
        )
    return paths


def rows_a_turn(paths: list[RolloutPath]) -> list[RolloutPath]:
    """Every turn with all that was before it; only its own tokens are trained."""
    rows = []
    for path in paths:
        for position, node in enumerate(path.nodes):
            if node.trainable:
                copies = [_copy(one, is_trained=one is node) for one in path.nodes[: position + 1]]
                rows.append(RolloutPath(nodes=copies, rollout_index=len(rows), rollout=len(rows)))
    return rows


def _copy(node: Node, *, is_trained: bool) -> Node:
    copied = Node(
        node_id=0,
        parent=None,
        origin=node.origin,
        token_ids=node.token_ids,
        message=TEXT,
        logprobs=node.logprobs,
    )
    copied.credit = node.credit if is_trained else None
    return copied


def update(policy: Policy, paths: list[RolloutPath], max_tokens: int) -> int:
    """Forward and backward; the tokens that were computed."""
    num = 0
    for batch in pack(paths, max_tokens=max_tokens):
        (-policy.score(batch).logprobs_T.mean()).backward()
        num += batch.num_tokens
    policy.drop_gradients()
    return num


def off_policy(policy: Policy, paths: list[RolloutPath], max_tokens: int) -> int:
    renderings = [(path, path.nodes_with_tips) for path in paths]
    score_other(policy, policy.ranks, renderings, max_tokens=max_tokens)
    extra = sum(
        batch.num_tokens
        for batch in pack(
            [RolloutPath(nodes=p.nodes_with_tips or (), rollout_index=0) for p in paths], max_tokens=10**9
        )
    )
    return update(policy, paths, max_tokens) + extra


if __name__ == "__main__":
    main()
