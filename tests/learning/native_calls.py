"""A tool to call by tag or natively, and a tiny real model that does it half of the time.

Both protocols have the same harness: the same questions and tool, and a model fine-tuned for seconds on the
same mixture of turns. To a question it calls the tool, calls it wrongly, or gives up; after a result it
copies the place. What is left to learn is to call, and to call so that it can be read.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

import outrider
from outrider.runs import Run
from tests.tiny import save_tiny_model

Protocol = Literal["tags", "hermes"]
PLACES: Final = ("hill", "lake", "wood", "port")
THINGS: Final = ("lamp", "ship", "ring", "coin", "bell", "drum")
HEAD: Final = '{"name": "search", "arguments": {"query": "'
PIECES: Final = (
    "<tool_call>", "</tool_call>", HEAD, '"}}', "<search>", "</search>", "<answer>", "</answer>", "<result>",
    "</result>", "\\boxed{",
)  # fmt: skip
# Shows the tools by name alone: a description of every token would be most of what a character model reads.
TEMPLATE: Final = (
    "{% if tools %}{{ '<|im_start|>system\n' }}{% for t in tools %}{{ t['function']['name'] + '\n' }}"
    "{% endfor %}{{ '<|im_end|>\n' }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] }}"
    "{% for c in m['tool_calls'] or [] %}{{ '<tool_call>' + (c['function'] | tojson) + '</tool_call>' }}"
    "{% endfor %}{{ '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
RECIPE: Final = """
seed = {seed}
num_threads = 1
[model]
name = "{root}/model"
precision = "float32"
[environment]
type = "tools"
protocol = "{protocol}"
tools = ["search"]
corpus = "{root}/corpus.jsonl"
prompt = "none"
max_calls = 1
max_invalid = 1
search = {{ top_k = 1 }}
reward = {{ answer = "em", require_think = false, require_boxed = true, format_penalty = 0.0 }}
train = {{ path = "{root}/tasks.jsonl" }}
test = {{ path = "{root}/tasks.jsonl" }}
[algorithm]
type = "grpo"
group_size = 8
[rollout]
max_turns = 3
max_turn_tokens = 24
max_response_tokens = 200
[train]
num_steps = {num_steps}
tasks_per_step = 6
checkpoint_every = 100
[optimizer]
learning_rate = 2e-3
[evaluation]
every = 100
at_start = true
num_tasks = 6
num_samples = 8
temperature = 1.0
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """A context and a turn that the model is to write in it."""

    context: str
    turn: str


def call(protocol: Protocol, thing: str, *, good: bool = True) -> str:
    """A call; a bad one lacks what opens or closes it."""
    if protocol == "tags":
        return f"<search>{thing}</search>" if good else f"{thing}</search>"
    end = '"}}' if good else ""
    return f"<tool_call>{HEAD}{thing}{end}</tool_call>"


def answer(protocol: Protocol, place: str) -> str:
    """An answer in the protocol's form."""
    boxed = f"\\boxed{{{place}}}"
    return f"<answer>{boxed}</answer>" if protocol == "tags" else boxed


def examples(protocol: Protocol) -> list[Example]:
    """The mixture: of four turns to a question one calls, one calls wrongly and two give up."""
    told = "" if protocol == "tags" else "<|im_start|>system\nsearch\n<|im_end|>\n"
    end = "" if protocol == "tags" else "<|im_end|>"
    found: list[Example] = []
    for thing in THINGS:
        asked = f"{told}<|im_start|>user\nWhere is the {thing}?<|im_end|>\n<|im_start|>assistant\n"
        for place in PLACES:
            result = f"{thing}: {place}"
            seen = (
                f"\n<result>\n{result}\n</result>\n"
                if protocol == "tags"
                else f"<|im_end|>\n<|im_start|>tool\n{result}<|im_end|>\n<|im_start|>assistant\n"
            )
            first = [call(protocol, thing), call(protocol, thing, good=False)]
            first += [answer(protocol, "none")] * 2
            found += [Example(context=asked, turn=turn + end) for turn in first]
            after = asked + call(protocol, thing) + seen
            found += [Example(context=after, turn=answer(protocol, place) + end)] * 4
    return found


def write(root: Path, protocol: Protocol, *, num_steps: int, seed: int = 0) -> Path:
    """Model, questions, corpus and recipe below ``root``; returns the recipe."""
    root.mkdir(parents=True, exist_ok=True)
    save_model(root / "model", protocol)
    facts = [(thing, PLACES[number % len(PLACES)]) for number, thing in enumerate(THINGS)]
    lines(root / "tasks.jsonl", [{"question": f"Where is the {t}?", "answer": p} for t, p in facts])
    lines(root / "corpus.jsonl", [{"id": t, "title": t, "text": p} for t, p in facts])
    recipe = root / "recipe.toml"
    recipe.write_text(RECIPE.format(root=root, protocol=protocol, num_steps=num_steps, seed=seed))
    return recipe


def lines(path: Path, rows: Sequence[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def save_model(folder: Path, protocol: Protocol, *, num_steps: int = 300) -> None:
    """The tiny random model, fine-tuned on the mixture."""
    save_tiny_model(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(list(PIECES))
    tokenizer.chat_template = TEMPLATE
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_pretrained(folder)
        model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
        optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
        every = examples(protocol)
        for step in range(num_steps):
            # a few at a time, in an order that mixes things, places and kinds of turns
            chosen = [every[(step * 8 + i) * 37 % len(every)] for i in range(8)]
            optimizer.zero_grad()
            model(**batch(tokenizer, chosen)).loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def batch(tokenizer: PreTrainedTokenizerBase, examples_: Sequence[Example]) -> dict[str, torch.Tensor]:
    """Padded at the end, where a causal model looks at nothing."""
    rows = []
    for one in examples_:
        context, turn = (tokenizer.encode(text, add_special_tokens=False) for text in (one.context, one.turn))
        rows.append((context + turn, [-100] * len(context) + turn))
    length = max(len(ids) for ids, _ in rows)
    return {
        "input_ids": torch.tensor([ids + [0] * (length - len(ids)) for ids, _ in rows]),
        "labels": torch.tensor([labels + [-100] * (length - len(labels)) for _, labels in rows]),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Learned:
    """Success before and after, and tool calls a rollout in the first and the last step."""

    before: float
    after: float
    calls_first: float
    calls_last: float
    invalid_first: float
    invalid_last: float


def learn(root: Path, protocol: Protocol, *, num_steps: int, seed: int = 0) -> Learned:
    """Train with GRPO and read what the run recorded."""
    run = outrider.train(write(root, protocol, num_steps=num_steps, seed=seed), run=root / "run")
    scores = [float(row["score.value"]) for row in run.evaluations().to_pylist()]
    first, last = ends(run)
    return Learned(
        before=scores[0], after=scores[-1],
        calls_first=first["rollout/tool_calls_per_leaf"], calls_last=last["rollout/tool_calls_per_leaf"],
        invalid_first=first["rollout/num_invalid_actions"], invalid_last=last["rollout/num_invalid_actions"],
    )  # fmt: skip


def ends(run: Run) -> tuple[dict[str, float], dict[str, float]]:
    rows = run.metrics("train").to_pylist()
    return rows[0], rows[-1]
