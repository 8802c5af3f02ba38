"""EMPO²'s vectors and groups of episodes by hand."""

import json
from pathlib import Path
from typing import Any

from outrider.algorithms.exploration import Empo2, Empo2Settings
from outrider.config import validate
from outrider.memory.embedders import HashEmbedder
from outrider.trace import Leaf, Trace
from outrider.types import Message, Origin, Outcome, Task

VECTORS: dict[str, Any] = json.loads((Path(__file__).parents[1] / "vectors" / "empo2.json").read_text())


def vector(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    return VECTORS[name]["inputs"], VECTORS[name]["expected"]


def played(
    returns: list[float], observations: list[list[str]], *, modes: str = "plain",
    reflections: list[str] | None = None,
    actions: list[str] | None = None,
) -> Trace:  # fmt: skip
    """One group by hand: what every rollout was told, turn by turn, and what all of them did (else: act 0,
    act 1 and so on).
    """
    trace = Trace(task=Task(key="t", question="q"), modes=(modes,) * len(returns))
    for rollout, (value, told) in enumerate(zip(returns, observations, strict=True)):
        parent = None
        for turn, text in enumerate(told):
            said = Message(role="assistant", content=actions[turn] if actions else f"act {turn}")
            origin = Origin.ENVIRONMENT if turn else Origin.PROMPT
            observed = trace.append(
                parent=parent, origin=origin, token_ids=(1,), message=Message(role="user", content=text)
            )
            node = trace.append(
                parent=observed.node_id,
                origin=Origin.POLICY,
                token_ids=(2,),
                message=said,
                logprobs=(-1.0,),
                entropies=(0.5,),
            )
            parent = node.node_id
        reflection = reflections[rollout] if reflections else ""
        trace.finish(
            Leaf(
                node_id=parent,
                rollout=rollout,
                outcome=Outcome.FINISHED,
                episode_return=value,
                reflection=reflection,
            )
        )
    return trace


def algorithm(**given_: Any) -> Empo2:
    return Empo2(
        validate(Empo2Settings, {"group_size": 4, **given_}),
        embedder=HashEmbedder(),
        count_tokens=len,
        groups_per_step=2,
        seed=0,
    )
