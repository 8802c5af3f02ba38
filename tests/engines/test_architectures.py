"""Every architecture of docs/models.md on its path, against transformers' own forward pass: log-probs and
gradients of a tree, and what the engine says of the tokens that it wrote.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from docsite.models import ARCHITECTURES, Architecture, load
from torch import Tensor
from transformers import AutoModelForCausalLM

from outrider.engines.base import Request
from outrider.engines.local.engine import make_engine
from outrider.engines.local.model import LanguageModel
from outrider.errors import ModelError
from outrider.trace import Leaf, Share, Trace
from outrider.training.packing import pack
from outrider.training.policy import Policy, Scorer, UnpackedScoring
from outrider.training.settings import OptimizerSettings
from outrider.training.update import rollout_paths
from outrider.types import Message, Origin, Outcome, Task

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
KNOWN = [one for one in ARCHITECTURES if one.is_known]
TEXT = Message(role="user", content="")
Ids = tuple[int, ...]


def tree(length: int) -> Trace:
    """Two rollouts of ``length`` tokens: a prompt and a turn that both train on, then each its own."""
    trace = Trace(task=Task(key="t", question=""))
    quarter = length // 4
    dice = torch.Generator().manual_seed(length)

    def add(parent: int | None, origin: Origin, num: int) -> int:
        ids = tuple(torch.randint(3, 90, (num,), generator=dice).tolist())
        scores = (-1.0,) * num if origin is Origin.POLICY else ()
        node = trace.append(
            parent=parent, origin=origin, token_ids=ids, message=TEXT, logprobs=scores, entropies=scores
        )
        return node.node_id

    prompt = add(None, Origin.PROMPT, quarter)
    shared = add(prompt, Origin.POLICY, quarter)
    trace.nodes[shared].shares = {0: Share((0.75,) * quarter), 1: Share((-0.5,) * quarter)}
    for rollout in range(2):
        seen = add(shared, Origin.ENVIRONMENT, quarter)
        last = add(seen, Origin.POLICY, length - 3 * quarter)
        trace.nodes[last].credit = (1.0 - 3 * rollout,) * (length - 3 * quarter)
        trace.finish(Leaf(node_id=last, rollout=rollout, outcome=Outcome.FINISHED, episode_return=1.0))
    return trace


def logprobs_by_prefix(model: Any, ids: Ids, num_turns: Sequence[int]) -> Tensor:
    """[N - 1] of every token but the first; where a longer sequence turns its positions anew, each from the
    sequence that ends in front of it: that is what it is sampled from.
    """
    bounds = sorted({0, *(length for length in num_turns if length < len(ids)), len(ids)})
    parts = []
    for start, end in pairwise(bounds):
        logits = model(input_ids=torch.tensor([ids[:end]]), use_cache=False).logits[0].float()
        parts.append(torch.log_softmax(logits[start:], dim=-1))
    rows = torch.cat(parts)[:-1]
    return rows.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]


def reference_gradients(model: Any, trace: Trace, turns: Sequence[int]) -> tuple[list[Tensor], Tensor]:
    """Log-probs of every rollout's trained tokens, and the sum that is differentiated."""
    found, total = [], torch.zeros(())
    for rollout, path in ((leaf.rollout, path) for leaf, path in trace.rollouts()):
        ids = tuple(token for node in path for token in node.token_ids)
        logprobs, credits = logprobs_by_prefix(model, ids, turns), []
        for node in path:
            share = node.shares[rollout].credit if node.shares else node.credit
            credits += [0.0] * len(node.token_ids) if share is None else list(share)
        weights = torch.tensor(credits[1:])
        total = total + (logprobs * weights).sum()
        found.append(logprobs[weights != 0])
    return found, total


@pytest.fixture(params=KNOWN, ids=lambda one: f"{one.model_type}-{one.title}", scope="module")
def case(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Architecture, Path, LanguageModel | ModelError]]:
    folder = tmp_path_factory.mktemp("model")
    request.param.save(folder)
    yield request.param, folder, load(request.param, folder)


def test_the_models_page_matches(case: tuple[Architecture, Path, LanguageModel | ModelError]) -> None:
    architecture, folder, found = case
    page = PAGE.read_text(encoding="utf-8")
    if f"transformers {transformers.__version__}" not in page:
        pytest.skip("the page is of another version of transformers")
    assert architecture.row(found, folder) in page.splitlines()


def test_logprobs_and_gradients_are_those_of_transformers(
    case: tuple[Architecture, Path, LanguageModel | ModelError],
) -> None:
    _, folder, found = case
    if isinstance(found, ModelError):
        pytest.skip(f"refused: {found}")
    trace = tree(min(26, found.context_length))
    turns = () if found.unpacked is None else found.unpacked.turns
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    expected, total = reference_gradients(plain, trace, turns)
    total.backward()
    policy = Policy(found, OptimizerSettings())
    [batch] = pack(rollout_paths([trace]), max_tokens=10_000)
    scores = policy.score(batch)
    for rollout, logprobs in enumerate(expected):
        ours = scores.logprobs_T[batch.rollout_index_T == rollout]
        torch.testing.assert_close(ours, logprobs, rtol=1e-3, atol=1e-3)
    (scores.logprobs_T * batch.advantages_T.float()).sum().backward()
    gradients = {name: one.grad for name, one in plain.named_parameters() if one.grad is not None}
    assert len(gradients) > 10
    for name, gradient in gradients.items():
        ours_of = policy.masters[name].grad
        assert ours_of is not None, name
        assert float((ours_of - gradient).norm()) <= 1e-3 * float(gradient.norm()) + 1e-5, name
    policy.drop_gradients()


def test_engine_and_trainer_have_the_same_logprobs(
    case: tuple[Architecture, Path, LanguageModel | ModelError],
) -> None:
    """Two rollouts of one prompt and their second turns, which go past windows and other lengths."""
    _, _, found = case
    if isinstance(found, ModelError):
        pytest.skip(f"refused: {found}")
    engine, trace = make_engine(found), Trace(task=Task(key="t", question=""))
    root = trace.append(parent=None, origin=Origin.PROMPT, token_ids=(5, 6, 7, 8, 9), message=TEXT)
    tips = [root.node_id, root.node_id]
    is_short = found.context_length < 26
    for turn, num in enumerate((4, 3) if is_short else (5, 9)):
        asked = [
            Request(
                request_id=str(i), token_ids=trace.token_ids(tip), max_tokens=num, seed=7 * turn + i,
                cache_key=str(i),
            )
            for i, tip in enumerate(tips)
        ]  # fmt: skip
        for i, one in enumerate(engine.generate(asked)):
            node = trace.append(
                parent=tips[i], origin=Origin.POLICY, token_ids=one.token_ids, message=TEXT,
                logprobs=one.logprobs, entropies=one.entropies,
            )  # fmt: skip
            node.credit = (1.0,) * len(one.token_ids)
            seen = (20 + i, 21) if is_short else (20 + i, 21, 22, 23)
            tips[i] = trace.append(
                parent=node.node_id, origin=Origin.ENVIRONMENT, token_ids=seen, message=TEXT
            ).node_id
    for i, tip in enumerate(tips):
        trace.finish(Leaf(node_id=tip, rollout=i, outcome=Outcome.FINISHED, episode_return=1.0))
    [batch] = pack(rollout_paths([trace]), max_tokens=10_000)
    with torch.no_grad():
        scores = Policy(found, OptimizerSettings()).score(batch)
    torch.testing.assert_close(scores.logprobs_T.double(), batch.engine_logprobs_T, rtol=0, atol=2e-3)


def test_a_batch_of_an_unpacked_model_equals_one_sequence_at_a_time(
    case: tuple[Architecture, Path, LanguageModel | ModelError],
) -> None:
    """Two turns of prompts of several lengths, and the gradient of rollouts of several lengths."""
    _, _, found = case
    if isinstance(found, ModelError) or found.unpacked is None:
        pytest.skip("not unpacked")
    assert found.unpacked.batches_generation and found.unpacked.batches_scoring
    batched, found = found.unpacked, replace(found, eos_token_ids=frozenset())
    alone = replace(batched, batches_generation=False, batches_scoring=False)
    engines = make_engine(found), make_engine(replace(found, unpacked=alone))
    contexts: list[Ids] = [tuple(range(5, 5 + num)) for num in (3, 9, 3, 14)]
    for turn in range(2):
        requests = [
            Request(request_id=f"{i}", token_ids=ids, max_tokens=2 + i, seed=9 * turn + i, cache_key=f"{i}")
            for i, ids in enumerate(contexts)
        ]
        together, singly = (engine.generate(requests) for engine in engines)
        for one, other in zip(together, singly, strict=True):
            assert one.token_ids == other.token_ids
            assert one.num_prefilled_tokens == other.num_prefilled_tokens
            assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)
        contexts = [
            (*ids, *one.token_ids, *range(40, 42 + i))
            for i, (ids, one) in enumerate(zip(contexts, together, strict=True))
        ]
    [batch] = pack(rollout_paths([tree(length) for length in (26, 12, 23)]), max_tokens=10_000)
    scorer, results = Scorer(found), []
    named = dict(found.model.named_parameters())
    for unpacked in (batched, alone):
        scorer.scoring = UnpackedScoring(found.model, unpacked)
        logprobs_T = scorer.score(batch).logprobs_T
        loss = (logprobs_T * batch.advantages_T.float()).sum()
        found_gradients = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
        gradients = {name: one for name, one in zip(named, found_gradients, strict=True) if one is not None}
        results.append((logprobs_T.detach(), gradients))
    (logprobs_T, ours), (expected_T, theirs) = results
    torch.testing.assert_close(logprobs_T, expected_T, rtol=0, atol=1e-5)
    assert ours.keys() == theirs.keys()
    differences = {name: float((one - theirs[name]).norm()) for name, one in ours.items()}
    total = math.hypot(*(float(one.norm()) for one in theirs.values()))
    assert math.hypot(*differences.values()) <= 1e-5 * total
    # a sum with little left of its terms is rounded more
    for name, difference in differences.items():
        assert difference <= 1e-4 * float(theirs[name].norm()) + 1e-8 * total, name
