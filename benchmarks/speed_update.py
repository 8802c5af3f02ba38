"""Update workloads of ``speed.py``: forward and backward of a group, padded by transformers and packed by
Outrider.

Both sides count the padded tokens, so that the ratio of their rates is a ratio of times.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from outrider.trace import Trace
from outrider.training.packing import PackedBatch, RolloutPath, pack
from outrider.training.policy import Policy
from outrider.types import Message, Origin, Task


@dataclass(frozen=True, kw_only=True)
class Shape:
    """``rollouts`` rows of ``shared`` common, ``own`` different and ``new`` trained tokens; plain
    micro-batches of ``rows``.
    """

    rollouts: int
    shared: int
    own: int
    new: int
    rows: int = 4


UPDATES = {
    "group of 16, 512 common + 128 new": Shape(rollouts=16, shared=512, own=0, new=128),
    "4 rows of 512, nothing common": Shape(rollouts=4, shared=0, own=384, new=128),
    "group of 8, 150 common + 60 + 60 new (the demo's rows)": Shape(rollouts=8, shared=150, own=60, new=60),
}


def _paths(shape: Shape) -> list[RolloutPath]:
    random = torch.Generator().manual_seed(0)

    def ids(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(100, 10_000, (count,), generator=random).tolist())

    trace = Trace(task=Task(key="benchmark", question=""))
    message = Message(role="user", content="")
    common = ids(shape.shared)
    root = (
        trace.append(parent=None, origin=Origin.PROMPT, token_ids=common, message=message) if common else None
    )
    paths = []
    for index in range(shape.rollouts):
        tip = root
        if shape.own:
            parent = None if tip is None else tip.node_id
            tip = trace.append(
                parent=parent, origin=Origin.ENVIRONMENT, token_ids=ids(shape.own), message=message
            )
        assert tip is not None
        zeros = (0.0,) * shape.new
        node = trace.append(
            parent=tip.node_id,
            origin=Origin.POLICY,
            token_ids=ids(shape.new),
            message=message,
            logprobs=zeros,
            entropies=zeros,
        )
        node.credit = (1.0,) * shape.new
        paths.append(RolloutPath(nodes=trace.path(node.node_id), rollout_index=index))
    return paths


def rollout_batch(prompt: Sequence[int], new: Sequence[int], logprobs: Sequence[float]) -> PackedBatch:
    """One sampled continuation, to be scored by the trainer."""
    trace = Trace(task=Task(key="gap", question=""))
    message = Message(role="user", content="")
    root = trace.append(parent=None, origin=Origin.PROMPT, token_ids=tuple(prompt), message=message)
    node = trace.append(
        parent=root.node_id,
        origin=Origin.POLICY,
        token_ids=tuple(new),
        message=message,
        logprobs=tuple(logprobs),
        entropies=(0.0,) * len(new),
    )
    node.credit = (1.0,) * len(new)
    path = RolloutPath(nodes=trace.path(node.node_id), rollout_index=0)
    return next(iter(pack([path], max_tokens=10_000)))


def batches(shape: Shape) -> list[PackedBatch]:
    """The micro-batches that :func:`packed` computes."""
    return list(pack(_paths(shape), max_tokens=4096))


def padded(model: Any, shape: Shape, *, lower: bool) -> Callable[[], int]:
    rows = torch.tensor(
        [[t for node in path.nodes for t in node.token_ids] for path in _paths(shape)], device=model.device
    )

    def run() -> int:
        for batch in rows.split(shape.rows):
            with torch.autocast(model.device.type, dtype=torch.bfloat16, enabled=lower):
                logits = model(batch, logits_to_keep=shape.new + 1).logits[:, :-1].float()
            picked = torch.log_softmax(logits, -1).gather(2, batch[:, -shape.new :, None])
            (-picked.mean()).backward()
        model.zero_grad(set_to_none=True)
        return rows.numel()

    return run


def packed(policy: Policy, shape: Shape) -> Callable[[], int]:
    paths = _paths(shape)
    total = sum(len(node.token_ids) for path in paths for node in path.nodes)

    def run() -> int:
        for batch in pack(paths, max_tokens=4096):
            (-policy.score(batch).logprobs_T.mean()).backward()
        policy.drop_gradients()
        return total

    return run
