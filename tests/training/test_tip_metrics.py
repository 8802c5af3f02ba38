"""Metrics of tips: what counts as one tip depends on whose buffer it came from."""

import pytest

from outrider.algorithms.tips import MemorySettings, TipHook, tip_metrics
from outrider.config import validate
from outrider.memory.embedders import HashEmbedder
from outrider.trace import Leaf, Trace
from outrider.types import Message, Origin, Outcome, Task


def shown(task: str, tip_ids: list[int]) -> Trace:
    """One rollout of one turn that read these tips."""
    trace = Trace(task=Task(key=task, question="q"), modes=("tips_on",))
    text = Message(role="user", content="x")
    metadata = {"tip_ids": tip_ids, "similarities": [0.9] * len(tip_ids), "scores": [0.0] * len(tip_ids)}
    root = trace.append(parent=None, origin=Origin.PROMPT, token_ids=(1,), message=text)
    tip = trace.append(
        parent=root.node_id, origin=Origin.MEMORY, token_ids=(2, 2), message=text, metadata=metadata
    )
    act = trace.append(
        parent=tip.node_id,
        origin=Origin.POLICY,
        token_ids=(3,),
        message=text,
        logprobs=(-1.0,),
        entropies=(0.5,),
    )
    trace.finish(Leaf(node_id=act.node_id, rollout=0, outcome=Outcome.FINISHED, episode_return=0.0))
    return trace


@pytest.mark.parametrize(("scope", "num_distinct"), [("all", 3), ("task", 4)])
def test_a_tip_that_two_tasks_read_is_one_where_they_share_a_buffer(scope: str, num_distinct: int) -> None:
    hook = TipHook(
        validate(MemorySettings, {"scope": scope}), embedder=HashEmbedder(), count_tokens=len, seed=0
    )
    metrics = tip_metrics([shown("a", [0, 7]), shown("b", [7, 8])], hook)
    assert (metrics["tips/num_shown"], metrics["tips/num_distinct_shown"]) == (4, num_distinct)
