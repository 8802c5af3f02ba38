"""In bfloat16 on a CPU, a sampled token has the same bits alone, in a batch, over turns and in the update."""

import random
from collections.abc import Sequence

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

from outrider.engines.base import Generation, Request
from outrider.engines.local.attention import IMPLEMENTATION, prefers_products, register
from outrider.engines.local.cpu_kernels import fuse, linear, linear_into, pack, packed_linear
from outrider.engines.local.engine import LocalEngine
from outrider.engines.local.model import LanguageModel
from outrider.engines.local.processor import read_processor
from outrider.trace import Trace
from outrider.training.packing import RolloutPath
from outrider.training.packing import pack as pack_rollouts
from outrider.training.policy import Policy
from outrider.training.settings import OptimizerSettings
from outrider.types import Message, Origin, Task
from tests.tiny import tiny_tokenizer

pytestmark = pytest.mark.skipif(
    not (read_processor().lacks_blas and prefers_products(torch.empty(0, dtype=torch.bfloat16))),
    reason="measured on Zen 5 only",
)
NUM_GROUPS, GROUP, NEW, OBSERVED = 3, 4, 9, 15
PROMPTS = [(40, 41, 42), (700, 1018, 1100)]  # tokens of the groups' prompts; products are split at 1,024 keys
Conversation = list[tuple[Sequence[int], Generation]]
"""The context and the generation of every turn."""


@pytest.fixture(scope="module", params=[LlamaConfig, Qwen2Config, Qwen3Config])
def model(request: pytest.FixtureRequest) -> LanguageModel:
    """Large enough that torch gives every product to oneDNN."""
    torch.manual_seed(0)
    register()
    tokenizer = tiny_tokenizer()
    config = request.param(
        vocab_size=len(tokenizer), hidden_size=128, intermediate_size=256, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, head_dim=64, max_position_embeddings=2048,
        attn_implementation=IMPLEMENTATION,
    )  # fmt: skip
    network = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    for parameter in network.parameters():
        parameter.data += torch.randn_like(parameter) / 8  # far from uniform, and with biases
    fuse(network)
    return LanguageModel(model=network, tokenizer=tokenizer, context_length=2048, eos_token_ids=frozenset())


@pytest.mark.parametrize("bias", [True, False])
def test_a_row_alone_has_the_bits_of_the_row_in_a_batch(bias: bool) -> None:
    """Every form of a linear layer; of 8,192 terms, so that another order of addition shows."""
    generator = torch.Generator().manual_seed(0)
    rows, weight = (torch.randn(num, 8192, generator=generator).bfloat16() for num in (48, 700))
    offset = torch.randn(700, generator=generator).bfloat16() if bias else None
    packed, memory = pack(weight), torch.empty(48, 700, dtype=torch.bfloat16)
    for product in (
        lambda some: linear(some, weight, offset),
        lambda some: packed_linear(some, packed, offset),
        lambda some: linear_into(memory[: len(some)], some, weight, offset).clone(),
    ):
        whole = product(rows)
        assert torch.equal(whole, torch.cat([product(rows[i : i + 1]) for i in range(48)]))
        assert torch.equal(whole, torch.cat([product(rows[i : i + 7]) for i in range(0, 48, 7)]))
    leading = linear(rows[:1].view(1, 1, 1, 8192), weight, offset)
    assert leading.shape == (1, 1, 1, 700) and torch.equal(leading[0, 0], linear(rows, weight, offset)[:1])


def converse(model: LanguageModel, rollouts: Sequence[int], prompts: Sequence[int]) -> list[Conversation]:
    """Two turns of these rollouts in one batch; those of a group begin with the same prompt."""
    engine = LocalEngine(model)
    conversations: list[Conversation] = [[] for _ in rollouts]
    for turn in range(2):
        requests = []
        for rollout, conversation in zip(rollouts, conversations, strict=True):
            draw = random.Random(f"{rollout if turn else rollout // GROUP}/{turn}")
            heard = [draw.randrange(3, 60) for _ in range(OBSERVED if turn else prompts[rollout // GROUP])]
            context = [token for ids, one in conversation for token in (*ids, *one.token_ids)] + heard
            requests.append(
                Request(
                    request_id=f"{rollout}",
                    token_ids=tuple(context),
                    max_tokens=NEW,
                    seed=rollout,
                    cache_key=f"{rollout}",
                )
            )
        for conversation, request, one in zip(
            conversations, requests, engine.generate(requests), strict=True
        ):
            before = sum(len(ids) + len(earlier.token_ids) for ids, earlier in conversation)
            conversation.append((request.token_ids[before:], one))
    return conversations


def check_equal(found: Sequence[Conversation], wanted: Sequence[Conversation]) -> None:
    for one, other in zip(found, wanted, strict=True):
        for (_, ours), (_, theirs) in zip(one, other, strict=True):
            assert ours.token_ids == theirs.token_ids
            assert ours.logprobs == theirs.logprobs
            assert ours.entropies == theirs.entropies


@pytest.mark.parametrize("prompts", PROMPTS)
@pytest.mark.parametrize("size", [1, 2, 5])
def test_a_rollout_has_the_same_bits_in_every_batch(
    model: LanguageModel, size: int, prompts: Sequence[int]
) -> None:
    every = list(range(NUM_GROUPS * GROUP))
    parts = [every[start : start + size] for start in range(0, len(every), size)]
    found = [conversation for part in parts for conversation in converse(model, part, prompts)]
    check_equal(found, converse(model, every, prompts))


@pytest.mark.parametrize("prompts", PROMPTS)
def test_the_update_computes_the_bits_of_the_engine(model: LanguageModel, prompts: Sequence[int]) -> None:
    """One packed row of all groups, whose shared prompts are computed once."""
    conversations = converse(model, range(NUM_GROUPS * GROUP), prompts)
    message = Message(role="user", content="")
    paths = []
    for group in range(NUM_GROUPS):
        members = conversations[group * GROUP : (group + 1) * GROUP]
        trace = Trace(task=Task(key=f"{group}", question=""))
        root = trace.append(
            parent=None, origin=Origin.PROMPT, token_ids=tuple(members[0][0][0]), message=message
        )
        for index, conversation in enumerate(members):
            node = root
            for turn, (heard, one) in enumerate(conversation):
                if turn:
                    node = trace.append(
                        parent=node.node_id,
                        origin=Origin.ENVIRONMENT,
                        token_ids=tuple(heard),
                        message=message,
                    )
                node = trace.append(
                    parent=node.node_id,
                    origin=Origin.POLICY,
                    token_ids=one.token_ids,
                    message=message,
                    logprobs=one.logprobs,
                    entropies=one.entropies,
                )
                node.credit = (1.0,) * len(one.token_ids)
            paths.append(RolloutPath(nodes=trace.path(node.node_id), rollout_index=index))
    policy = Policy(model, OptimizerSettings(learning_rate=1e-9))
    num_scored = 0
    for batch in pack_rollouts(paths, max_tokens=10_000):
        with torch.no_grad():
            scored = policy.score(batch).logprobs_T.cpu()
        assert torch.equal(scored, batch.engine_logprobs_T.cpu())
        num_scored += len(scored)
    assert num_scored == NUM_GROUPS * GROUP * 2 * NEW
