"""The update on the unpacked path: the same numbers and the same gradient as in packed rows, where both
exist.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from docsite.models import ARCHITECTURES
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from outrider.algorithms.base import ObjectiveSettings
from outrider.engines.base import Request
from outrider.engines.local.attention import Segment, TreePlan
from outrider.engines.local.engine import make_engine
from outrider.engines.local.model import LanguageModel, load_model
from outrider.engines.local.unpacked import (
    Pass,
    Unpacked,
    batch_sequences,
    segment_paths,
    split_into_sequences,
)
from outrider.errors import ModelError
from outrider.training.packing import pack
from outrider.training.policy import Policy
from outrider.training.settings import LoraSettings, OptimizerSettings, UpdateSettings
from outrider.training.update import rollout_paths, update
from tests.objectives import nested
from tests.tiny import tiny_model
from tests.training.test_pack_update import (
    OBJECTIVES,
    Recorder,
    assert_equal_gradients,
    double_precision,
    random_trace,
    shift,
)

__all__ = ["double_precision"]  # a fixture of every test here
WHY = Unpacked(why="a test asks for it")


def unpacked_twin(*, seed: int = 0, has_plain_head: bool = True) -> LanguageModel:
    """The tiny Llama, in float64 with attention written out."""
    model = tiny_model(dtype=torch.float64, seed=seed)
    model.model.config._attn_implementation = "written"
    return replace(model, unpacked=replace(WHY, has_plain_head=has_plain_head))


@settings(max_examples=8)
@given(
    seed=st.integers(0, 10**6),
    max_tokens=st.integers(1, 120),
    alike=st.booleans(),
    has_plain_head=st.booleans(),
)
def test_scores_and_gradients_are_those_of_the_packed_path(
    seed: int, max_tokens: int, alike: bool, has_plain_head: bool
) -> None:
    paths = rollout_paths([random_trace(seed + i, key=str(i), alike=alike) for i in range(2)])
    if not paths:
        return
    found: list[tuple[Tensor, Tensor, dict[str, Tensor]]] = []
    for model in (tiny_model(dtype=torch.float64), unpacked_twin(has_plain_head=has_plain_head)):
        policy = Policy(model, OptimizerSettings())
        logprobs, entropies = [], []
        for batch in pack(paths, max_tokens=max_tokens):
            scores = policy.score(batch)
            weights = batch.like(scores.logprobs_T).advantages_T * torch.arange(1, len(batch.token_T) + 1)
            (scores.logprobs_T * weights).sum().backward()
            logprobs.append(scores.logprobs_T.detach())
            entropies.append(scores.entropies_T)
            assert policy.num_computed_tokens(batch) >= len(set(batch.predictors_U.tolist()))
        gradients = {name: one.grad for name, one in policy.masters.items() if one.grad is not None}
        found.append((torch.cat(logprobs), torch.cat(entropies), gradients))
    (logprobs_1, entropies_1, packed), (logprobs_2, entropies_2, unpacked) = found
    assert float((logprobs_1 - logprobs_2).abs().max()) < 1e-10
    assert float((entropies_1 - entropies_2).abs().max()) < 1e-10
    assert_equal_gradients(unpacked, packed)


@pytest.mark.parametrize(
    "options", OBJECTIVES[1:5:3], ids=lambda options: "-".join(map(str, options.values()))
)
def test_every_step_of_an_update_is_that_of_the_packed_path(options: dict[str, Any]) -> None:
    """With two mini-batches and two epochs, old log-probs and the reference are scored on the path too."""
    objective = ObjectiveSettings(**nested(options))
    traces = [random_trace(seed, key=str(seed)) for seed in range(4)]
    steps = []
    for packed in (True, False):
        model = tiny_model(dtype=torch.float64) if packed else unpacked_twin()
        other = tiny_model(dtype=torch.float64, seed=9) if packed else unpacked_twin(seed=9)
        policy = Recorder(model, shift)
        update(
            policy, traces, objective=objective,
            reference=Policy(other, OptimizerSettings()).frozen_copy() if objective.kl_weight else None,
            settings=UpdateSettings(num_mini_batches=2, num_epochs=2, max_tokens=40),
        )  # fmt: skip
        steps.append(policy.gradients)
    assert len(steps[0]) == 4
    for packed_step, unpacked_step in zip(*steps, strict=True):
        assert_equal_gradients(unpacked_step, packed_step)


def test_a_shared_token_is_scored_in_one_sequence_and_nothing_else_is_computed() -> None:
    """Root 0-2, branches 3-4 and 5-7, of which the second forks into 8 and 9."""
    plan = TreePlan(
        segments=(
            Segment(length=3), Segment(length=2, ancestors=(0,)), Segment(length=3, ancestors=(0,)),
            Segment(length=1, ancestors=(0, 2)), Segment(length=1, ancestors=(0, 2)),
        )
    )  # fmt: skip
    assert segment_paths(plan) == [[0, 1, 2, 3, 4], [0, 1, 2, 5, 6, 7, 8], [0, 1, 2, 5, 6, 7, 9]]
    found = list(split_into_sequences(plan, [1, 2, 2, 7, 7], WHY))
    assert [one.tokens for one in found] == [(0, 1, 2), (0, 1, 2, 5, 6, 7)]
    assert [one.indices for one in found] == [(1, 2, 2), (5, 5)]
    assert [one.scored for one in found] == [(0, 1, 2), (3, 4)]
    # With other factors behind 4 tokens a sequence is read twice.
    turning = list(split_into_sequences(plan, [1, 3, 4, 9], replace(WHY, turns=(4,))))
    assert [len(one.tokens) for one in turning] == [4, 5, 7]
    assert [one.scored for one in turning] == [(0, 1), (2,), (3,)]


def test_sequences_of_similar_lengths_and_equal_rotations_run_together() -> None:
    passes = [Pass(tokens=(0,) * num, indices=(0,), scored=(0,)) for num in (9, 10, 100, 80, 2900, 3000, 74)]

    def lengths(unpacked: Unpacked) -> list[list[int]]:
        return [[len(one.tokens) for one in batch] for batch in batch_sequences(passes, unpacked)]

    # two of the longest are too many tokens, and 74 is less than three quarters of 100
    assert lengths(WHY) == [[3000], [2900], [100, 80], [74], [10, 9]]
    assert lengths(replace(WHY, turns=(90,))) == [[3000], [2900], [100], [80, 74], [10, 9]]
    assert {len(batch) for batch in lengths(replace(WHY, batches_scoring=False))} == {1}


def test_an_idle_pass_has_a_gradient_of_zeros() -> None:
    policy = Policy(unpacked_twin(), OptimizerSettings())
    policy.dummy_forward().backward()
    gradients = [one.grad for one in policy.masters.values()]
    assert any(one is not None for one in gradients)
    assert all(one is None or not one.any() for one in gradients)


@pytest.fixture(scope="module")
def lfm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lfm2")
    [one] = [one for one in ARCHITECTURES if one.model_type == "lfm2"]
    one.save(folder)
    return folder


def test_adapters_train_and_generate_on_the_unpacked_path(lfm2: Path) -> None:
    policy = Policy(
        load_model(str(lfm2), precision="float32"), OptimizerSettings(learning_rate=0.05),
        lora=LoraSettings(rank=2, target_modules=("q_proj", "v_proj")),
    )  # fmt: skip
    assert all("lora" in name for name in policy.masters)
    [batch] = pack(rollout_paths([random_trace(3, faults=False)]), max_tokens=10_000)
    before = policy.score(batch).logprobs_T
    (before * batch.advantages_T.float()).sum().backward()
    assert policy.step() > 0
    assert not torch.equal(before, policy.score(batch).logprobs_T)
    engine = make_engine(policy.language_model)
    (one,) = engine.generate([Request(request_id="a", token_ids=(5, 6, 7), max_tokens=9, seed=1)])
    ids = torch.tensor([(5, 6, 7, *one.token_ids)])
    with torch.no_grad():
        logprobs = torch.log_softmax(policy.model(input_ids=ids, use_cache=False).logits[0, 2:-1], dim=-1)
    found = logprobs.gather(1, ids[0, 3:, None])[:, 0]
    torch.testing.assert_close(found, torch.tensor(one.logprobs), rtol=0, atol=1e-3)


def test_an_update_of_one_seed_has_the_same_bits(lfm2: Path) -> None:
    weights = []
    for _ in range(2):
        policy = Policy(load_model(str(lfm2), precision="float32"), OptimizerSettings(learning_rate=0.01))
        traces = [random_trace(seed, key=str(seed)) for seed in range(3)]
        update(
            policy, traces, objective=ObjectiveSettings(), settings=UpdateSettings(max_logprob_gap=1e9),
            reference=None,
        )  # fmt: skip
        weights.append(policy.masters)
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(one, weights[1][name]) for name, one in weights[0].items())


def test_layers_of_other_names_are_one_line(lfm2: Path) -> None:
    with pytest.raises(
        ModelError, match=r"^model\.trained_layers: Lfm2ForCausalLM names its layers otherwise"
    ):
        Policy(load_model(str(lfm2), precision="float32"), OptimizerSettings(), trained_layers=1)
