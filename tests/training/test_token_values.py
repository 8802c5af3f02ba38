"""Recorded values of tokens against a plain forward pass over the context in which they were sampled."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from outrider.algorithms.base import ObjectiveSettings
from outrider.engines.local.model import LanguageModel
from outrider.trace import Leaf, Node, Share, Trace
from outrider.training.policy import Policy
from outrider.training.settings import OptimizerSettings, UpdateSettings
from outrider.training.step_records import trace_rows, values_by_node
from outrider.training.update import split_mini_batches, update
from outrider.types import Message, Origin, Outcome, Task
from tests.tiny import tiny_model

TEXT = Message(role="assistant", content="")


class Letters:
    """A tokenizer as far as records need one."""

    def decode(self, tokens: Sequence[int], **_: Any) -> str:
        return "".join(f"<{token}>" for token in tokens)

    def encode(self, text: str, **_: Any) -> list[int]:
        return [ord(letter) for letter in text]


class Group:
    """A trace that is written node by node."""

    def __init__(self, key: str) -> None:
        self.trace = Trace(task=Task(key=key, question=""))

    def observe(self, parent: Node | None, *tokens: int, restarts: bool = False) -> Node:
        origin = Origin.PROMPT if parent is None else Origin.ENVIRONMENT
        return self.trace.append(parent=None if parent is None else parent.node_id, origin=origin,
                                 token_ids=tokens, message=TEXT, restarts=restarts)  # fmt: skip

    def act(self, parent: Node, rollout: int, credit: float | dict[int, float], *tokens: int) -> Node:
        scores: Any = {"logprobs": (-0.5,) * len(tokens), "entropies": (0.1,) * len(tokens)}
        node = self.trace.append(parent=parent.node_id, origin=Origin.POLICY, token_ids=tokens, message=TEXT,
                                 metadata={"rollout": rollout}, **scores)  # fmt: skip
        if isinstance(credit, dict):
            node.shares = {number: Share((one,) * len(tokens)) for number, one in credit.items()}
        else:
            node.credit = (credit,) * len(tokens)
        return node

    def ends(self, rollout: int, node: Node | None) -> None:
        outcome = Outcome.TOOL_FAULT if node is None else Outcome.FINISHED
        self.trace.finish(
            Leaf(node_id=None if node is None else node.node_id, rollout=rollout, outcome=outcome,
                 episode_return=None if node is None else 0.0)
        )  # fmt: skip


def forked() -> Trace:
    """Rollout 0 writes a turn, from which rollouts 1 and 2 go on, and is lost; 3 begins a context anew; 4
    gets no credit.
    """
    group = Group("forked")
    root = group.observe(None, 3, 4, 5)
    shared = group.observe(group.act(root, 0, {1: 0.5, 2: -1.5}, 6, 7), 8)
    lost = group.act(shared, 0, 0.0, 9)
    lost.credit = None
    group.ends(0, None)
    group.ends(1, group.act(shared, 1, 0.5, 10, 11))
    group.ends(2, group.act(shared, 2, -1.5, 10, 12))  # begins as its sibling does, in a node of its own
    anew = group.observe(group.act(root, 3, 2.0, 6, 13), 3, 14, restarts=True)
    group.ends(3, group.act(anew, 3, 2.0, 15, 16, 17))
    group.ends(4, group.act(root, 4, 0.0, 18, 19))
    group.trace.number_by_rollout()
    return group.trace


def other() -> Trace:
    group = Group("other")
    root = group.observe(None, 20, 21)
    for rollout, credit in enumerate((1.0, -1.0)):
        group.ends(rollout, group.act(root, rollout, credit, 22 + rollout, 24))
    return group.trace


def written_out(model: LanguageModel) -> LlamaForCausalLM:
    """The same weights before any step, in transformers' own attention."""
    config = type(model.model.config).from_dict(model.model.config.to_dict())
    config._attn_implementation = "eager"
    plain = LlamaForCausalLM(config)
    plain.load_state_dict(model.model.state_dict())
    return plain.eval()


@pytest.mark.parametrize(("max_tokens", "num_mini_batches"), [(1000, 1), (8, 1), (1000, 2), (8, 2)])
def test_every_tokens_log_prob_is_that_of_its_own_context(max_tokens: int, num_mini_batches: int) -> None:
    model = tiny_model()
    plain = written_out(model).requires_grad_(False)
    traces = [forked(), other()]
    settings = UpdateSettings(max_tokens=max_tokens, num_mini_batches=num_mini_batches, max_logprob_gap=1e9)
    policy = Policy(model, OptimizerSettings())
    report = update(policy, traces, objective=ObjectiveSettings(), settings=settings, reference=None)
    values = values_by_node(split_mini_batches(traces, num_mini_batches), report.tokens)
    rows = {
        (row.task_key, row.node_id): row
        for row in trace_rows(traces, step=1, tokenizer=Letters(), values=values).nodes
    }
    trained = 0
    for trace in traces:
        for node in trace.nodes:
            row = rows[trace.task.key, node.node_id]
            is_trained = node.trainable and (node.shares is not None or any(node.credit or ()))
            assert len(row.trainer_logprobs) == len(row.ratios) == (len(node.token_ids) if is_trained else 0)
            if not is_trained:
                continue
            trained += 1
            expected = torch.log_softmax(plain(torch.tensor([trace.token_ids(node.node_id)])).logits[0], -1)
            start = len(trace.token_ids(node.node_id)) - len(node.token_ids)
            of_node = [float(expected[start + i - 1, token]) for i, token in enumerate(node.token_ids)]
            assert row.trainer_logprobs == pytest.approx(of_node, abs=1e-4)
            credit = node.credit if node.shares is None else node.shares[row.rollout].credit
            assert row.advantages == credit
    assert trained == 7


def test_what_a_lost_rollout_shares_has_the_values_of_one_that_was_trained() -> None:
    [shared] = [node for node in forked().nodes if node.shares is not None]
    rows = trace_rows([forked()], step=1, tokenizer=Letters())
    row = rows.nodes[shared.node_id]
    assert (row.rollout, row.advantages) == (1, (0.5, 0.5))
    assert [one.forked_from for one in rows.rollouts] == [0, 0, 0, 3, 4]  # who wrote the turn
    assert [one.num_turns for one in rows.rollouts] == [2, 2, 2, 2, 1]
