"""In bfloat16 on a CPU, a sampled token has the same bits alone, in a batch, over turns and in the update."""

import copy
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
from outrider.trace import Trace
from outrider.training.packing import RolloutPath
from outrider.training.packing import pack as pack_rollouts
from outrider.training.policy import Policy
from outrider.training.settings import LoraSettings, OptimizerSettings
from outrider.types import Message, Origin, Task
from tests.tiny import tiny_tokenizer

pytestmark = pytest.mark.skipif(
    not prefers_products(torch.device("cpu"), torch.bfloat16), reason="measured on Zen 5 only"
)
NUM_GROUPS, GROUP, NEW, OBSERVED = 3, 4, 9, 15
PROMPTS = [(40, 41, 42), (700, 1018, 1100)]  # tokens of the groups' prompts; products are split at 1,024 keys
Conversation = list[tuple[Sequence[int], Generation]]
"""The context and the generation of every turn."""


@pytest.fixture(
    scope="module", params=[(LlamaConfig, 4, 4, 64), (Qwen2Config, 14, 2, 64), (Qwen3Config, 4, 2, 128)]
)
def model(request: pytest.FixtureRequest) -> LanguageModel:
    """Large enough that torch gives every product to oneDNN."""
    kind, num_heads, num_key_heads, size = request.param
    torch.manual_seed(0)
    register()
    tokenizer = tiny_tokenizer()
    config = kind(
        vocab_size=len(tokenizer), hidden_size=num_heads * size, intermediate_size=1100, num_hidden_layers=3,
        num_attention_heads=num_heads, num_key_value_heads=num_key_heads, head_dim=size,
        max_position_embeddings=2048, attn_implementation=IMPLEMENTATION,
    )  # fmt: skip
    network = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    for parameter in network.parameters():
        # far from uniform, and with biases
        parameter.data += torch.randn_like(parameter) * (1.0 if parameter.dim() == 1 else 0.04)
    fuse(network)
    return LanguageModel(model=network, tokenizer=tokenizer, context_length=2048, eos_token_ids=frozenset())


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("num_terms", [896, 4864, 8192])
def test_every_form_of_a_linear_layer_has_the_same_bits_for_every_number_of_rows(
    num_terms: int, bias: bool
) -> None:
    generator = torch.Generator().manual_seed(0)
    rows, weight = (torch.randn(num, num_terms, generator=generator).bfloat16() for num in (1500, 96))
    offset = torch.randn(96, generator=generator).bfloat16() if bias else None
    whole, packed = linear(rows, weight, offset), pack(weight)
    memory = torch.empty(1500, 96, dtype=torch.bfloat16)
    for num in (1, 2, 7, 48):
        parts = rows[:96].split(num)
        assert torch.equal(whole[:96], torch.cat([linear(part, weight, offset) for part in parts]))
        assert torch.equal(whole[:96], torch.cat([packed_linear(part, packed, offset) for part in parts]))
    if not bias:  # the vocabulary projection, whose bias is added to a rounded product
        assert torch.equal(linear_into(memory, rows, weight), whole)
    ones = [linear_into(memory[:1], row, weight, offset).clone() for row in rows[:96].split(1)]
    assert torch.equal(torch.cat(ones), linear_into(memory[:96], rows[:96], weight, offset))
    leading = linear(rows[:1].view(1, 1, 1, num_terms), weight, offset)
    assert leading.shape == (1, 1, 1, 96) and torch.equal(leading[0, 0], whole[:1])


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
@pytest.mark.parametrize("lora", [None, LoraSettings(rank=16)])
def test_the_update_computes_the_bits_of_the_engine(
    model: LanguageModel, prompts: Sequence[int], lora: LoraSettings | None
) -> None:
    """One packed row of all groups, whose shared prompts are computed once, on two threads. The engine had
    one.
    """
    model = copy.deepcopy(model)
    policy = Policy(model, OptimizerSettings(learning_rate=1e-9), lora=lora)
    for name, parameter in model.model.named_parameters():
        if "lora_B" in name:  # zeros before the first step
            torch.nn.init.normal_(parameter, std=0.1)
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
    num_scored, num_threads = 0, torch.get_num_threads()
    for batch in pack_rollouts(paths, max_tokens=10_000):
        for has_gradient in (False, True):
            torch.set_num_threads(2)
            with torch.set_grad_enabled(has_gradient):
                scored = policy.score(batch).logprobs_T
            torch.set_num_threads(num_threads)
            assert scored.requires_grad == has_gradient
            assert torch.equal(scored.detach().cpu(), batch.engine_logprobs_T.cpu())
        num_scored += len(scored)
    assert num_scored == NUM_GROUPS * GROUP * 2 * NEW
