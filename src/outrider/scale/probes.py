"""A few tokens of every engine that nothing trains on: whether its weights are the trainer's, where the
tokens that are trained on are of older ones and cannot say.
"""

from typing import Final

from outrider.engines.base import Engine, Request
from outrider.trace import Leaf, Trace
from outrider.types import Message, Origin, Outcome

_NUM_TOKENS: Final = 16


def probes(engine: Engine, trace: Trace, *, num: int) -> list[Trace]:
    """``num`` continuations of the prompt of a played group, one an engine: groups take the engines in turn.
    Empty where none of its rollouts has a prompt that leaves room. Raises what the engine raises.
    """
    longest = engine.context_length - 1
    prompt = next(
        (path[0] for _, path in trace.rollouts() if path and 0 < len(path[0].token_ids) <= longest), None
    )
    if prompt is None:
        return []
    requests = [
        Request(
            request_id=f"probe-{number}/0",
            cache_key=f"probe-{number}/0",
            token_ids=prompt.token_ids,
            max_tokens=min(_NUM_TOKENS, engine.context_length - len(prompt.token_ids)),
            seed=number,
        )
        for number in range(num)
    ]
    generations = engine.generate(requests)
    engine.release([request.request_id for request in requests])
    traces = []
    for generation in generations:
        probe = Trace(task=trace.task, modes=("probe",))
        root = probe.append(
            parent=None, origin=Origin.PROMPT, token_ids=prompt.token_ids, message=prompt.message
        )
        node = probe.append(
            parent=root.node_id,
            origin=Origin.POLICY,
            token_ids=generation.token_ids,
            message=Message(role="assistant", content=""),
            logprobs=generation.logprobs,
            entropies=generation.entropies,
            weight_version=generation.weight_version,
            credit=(0.0,) * len(generation.token_ids),
        )
        probe.finish(Leaf(node_id=node.node_id, rollout=0, outcome=Outcome.FINISHED, episode_return=0.0))
        traces.append(probe)
    return traces
