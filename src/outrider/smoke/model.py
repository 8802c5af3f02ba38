"""The model of ``--smoke``: random weights, one token a character, and whole actions as tokens of their own,
so that random turns call tools, act and answer.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

TEMPLATE: Final = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CHARACTERS: Final = (*(chr(code) for code in range(32, 127)), "\n")
ACTIONS: Final = (
    "<think>two and two</think><search>two</search>",
    "<think>two and two</think><python>print(2 + 2)</python>",
    "<think>two and two</think><answer>\\boxed{4}</answer>",
    "<think>two and two</think><answer>\\boxed{5}</answer>",
    "look around", "inventory", "search[red shirt]", "click[Buy Now]",
)  # fmt: skip
_NUM_COPIES: Final = 3  # of the actions, with blanks before them: a random token is one of them half the time
_CONTEXT: Final = 32_768


def character_tokenizer(actions: Sequence[str] = ()) -> PreTrainedTokenizerFast:
    """One token a character, the chat markers, and ``actions`` as they are."""
    special = ["<|im_start|>", "<|im_end|>", "<unk>"]
    vocabulary = {token: i for i, token in enumerate([*special, *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", unk_token="<unk>")
    fast.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    fast.add_tokens(list(actions))
    fast.chat_template = TEMPLATE
    return fast


def tiny_config(
    *, num_layers: int = 2, hidden_size: int = 32, context: int = 512, num_actions: int = 0
) -> LlamaConfig:
    """Grouped-query attention and tied embeddings, as SmolLM2 has them."""
    return LlamaConfig(
        vocab_size=3 + len(CHARACTERS) + num_actions, hidden_size=hidden_size,
        intermediate_size=2 * hidden_size, num_hidden_layers=num_layers, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=context, tie_word_embeddings=True, eos_token_id=1,
        bos_token_id=None,
    )  # fmt: skip


def save_model(folder: Path) -> None:
    """The model as a folder that ``model.name`` takes; the same weights every time."""
    actions = [" " * copy + action for copy in range(_NUM_COPIES) for action in ACTIONS]
    config = tiny_config(context=_CONTEXT, num_actions=len(actions))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
    assert model.generation_config is not None
    model.generation_config.eos_token_id = 1
    model.save_pretrained(folder)
    character_tokenizer(actions).save_pretrained(folder)
