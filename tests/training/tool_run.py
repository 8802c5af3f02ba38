"""A tools run in miniature, on disk: a tiny model that knows the tags, questions, a corpus, a buffer and a
recipe.

The model is the tiny random one, fine-tuned for a second so that it searches and answers: with random weights
no turn would ever close a tag, and nothing of what these tests are about would happen.
"""

import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from outrider.memory.embedders import load_embedder
from outrider.memory.step_buffer import StepTraceBuffer
from outrider.types import Message, Step, Trajectory
from tests.tiny import save_tiny_model

PLACES = ("hill", "lake", "wood", "port")
THINGS = ("lamp", "ship", "ring", "coin", "bell", "drum")
TAGS = ("<search>", "</search>", "<answer>", "</answer>", "<result>", "</result>")
PYTHON_TAGS = ("<python>", "</python>")
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}

RECIPE = """
seed = 3
num_threads = 1

[model]
name = "{root}/model"
precision = "float32"

[environment]
type = "tools"
tools = ["search"]
corpus = "{root}/corpus.jsonl"
prompt = "none"
max_invalid = 4
search = {{ top_k = 1 }}
reward = {{ require_think = false, require_boxed = false }}
train = {{ path = "{root}/tasks.jsonl" }}
test = {{ path = "{root}/tasks.jsonl", limit = 3 }}

[algorithm]
type = "rapo"
group_size = 4
num_hybrid = 2

[buffer]
embedder = "hash"
path = "{root}/buffer.sqlite"

[rollout]
max_turns = 4
max_turn_tokens = 16
max_response_tokens = 300

[train]
num_steps = 10
tasks_per_step = 2
checkpoint_every = 1
max_concurrent = 8

[optimizer]
learning_rate = 3e-4

[evaluation]
every = 4
temperature = 1.0
"""


def write_tool_run(root: Path) -> Path:
    """Everything that a run needs, below ``root``; returns the recipe."""
    root.mkdir(parents=True, exist_ok=True)
    shutil.copytree(_model_folder(TAGS).name, root / "model")
    facts = [(thing, PLACES[number % len(PLACES)]) for number, thing in enumerate(THINGS)]
    _write_lines(
        root / "tasks.jsonl",
        [{"question": f"Where is the {thing}?", "answer": place} for thing, place in facts],
    )
    _write_lines(
        root / "corpus.jsonl",
        [{"id": thing, "title": thing, "text": f"{thing}: {place}"} for thing, place in facts],
    )
    with StepTraceBuffer(root / "buffer.sqlite", load_embedder("hash"), mode="write") as buffer:
        buffer.add_trajectories(
            [_trajectory(number, thing, place) for number, (thing, place) in enumerate(facts)]
        )
    recipe = root / "recipe.toml"
    recipe.write_text(RECIPE.format(root=root))
    return recipe


def write_python_model(folder: Path) -> None:
    """The model's twin that calls the Python tool too."""
    shutil.copytree(_model_folder(TAGS + PYTHON_TAGS).name, folder)


def write_house_model(folder: Path) -> None:
    """A model of random weights whose turns of one token are commands of a house about half the time."""
    save_tiny_model(folder, context=4096)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    commands = [f"<action>{one}</action>" for one in ("go hall", "go kitchen", "open drawer", "take lamp")]
    tokenizer.add_tokens([" " * copy + command for copy in range(20) for command in commands])
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_pretrained(folder)
        model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def write_demonstrations(path: Path, *, prefix: str = "tasks") -> None:
    """A file of chats in which every question is searched for twice and answered rightly."""
    records = []
    for number, thing in enumerate(THINGS):
        place = PLACES[number % len(PLACES)]
        seen = f"\n<result>\n{thing}: {place}\n</result>\n"
        said = [f"<search>{thing}</search>", f"<search>the {thing}</search>", f"<answer>{place}</answer>"]
        turns = [{"role": "assistant", "content": text} for text in said]
        observed = {"role": "tool", "content": seen}
        question = f"Where is the {thing}?"
        messages = [{"role": "user", "content": question}, turns[0], observed, turns[1], observed, turns[2]]
        records.append(
            {"task_key": f"{prefix}-{number}", "question": question, "reward": 1.0, "messages": messages}
        )
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def outrider(
    *arguments: str | Path, timeout: float = 120.0, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """The command line in a process of its own, to its end."""
    process = start_outrider(*arguments, environment=environment)
    stdout, stderr = process.communicate(timeout=timeout)
    return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)


def start_outrider(
    *arguments: str | Path, environment: dict[str, str] | None = None
) -> "subprocess.Popen[str]":
    """The command line in a process of its own, running."""
    return subprocess.Popen(
        [sys.executable, "-m", "outrider", *map(str, arguments)], text=True, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, env={**os.environ, **ENVIRONMENT, **(environment or {})},
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class _Example:
    prompt: str
    reply: str


@functools.cache
def _model_folder(tags: tuple[str, ...]) -> "tempfile.TemporaryDirectory[str]":
    """Made once in a test process: the fine-tuning takes longer than most of what is tested with its
    result.
    """
    kept = tempfile.TemporaryDirectory()
    save_model(Path(kept.name), tags)
    return kept


def save_model(folder: Path, tags: tuple[str, ...], **sizes: int) -> None:
    """The tiny model that knows the tags."""
    save_tiny_model(folder, **sizes)
    teach(folder, tags)


def teach(folder: Path, tags: tuple[str, ...] = TAGS) -> None:
    """Fine-tune the model of a folder, whatever its architecture, so that it searches and answers."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(list(tags))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_pretrained(folder)
        model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
        _fine_tune(model, [_ids(tokenizer, example) for example in _examples(python=PYTHON_TAGS[0] in tags)])
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _examples(*, python: bool) -> Sequence[_Example]:
    """Search or answer at once; after a result answer or search again. The right place is random."""
    replies = ["<search>{thing}</search>", "<answer>{place}</answer>"]
    contexts = ["", "<search>{thing}</search>\n<result>\n{thing}: {place}\n</result>\n"]
    if python:
        replies.append("<python>print(7)</python>")
        contexts.append("<python>print(7)</python>\n<result>\n7\n</result>\n")
    return [
        _Example(
            prompt=f"<|im_start|>user\nWhere is the {thing}?<|im_end|>\n<|im_start|>assistant\n"
            + context.format(thing=thing, place=place),
            reply=reply.format(thing=thing, place=place),
        )
        for context in contexts for reply in replies for thing in THINGS for place in PLACES
    ]  # fmt: skip


def _ids(tokenizer: object, example: _Example) -> tuple[torch.Tensor, torch.Tensor]:
    prompt, reply = (
        tokenizer.encode(text, add_special_tokens=False) for text in (example.prompt, example.reply)
    )  # type: ignore[attr-defined]
    return torch.tensor([prompt + reply]), torch.tensor([[-100] * len(prompt) + reply])


def _fine_tune(
    model: torch.nn.Module, examples: Sequence[tuple[torch.Tensor, torch.Tensor]], *, num_steps: int = 240
) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for index in range(num_steps):
        ids, labels = examples[(index * 37) % len(examples)]
        optimizer.zero_grad()
        model(input_ids=ids, labels=labels).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def _trajectory(number: int, thing: str, place: str) -> Trajectory:
    search = Step(text=f"<search>{thing}</search>", observation=f"\n<result>\n{thing}: {place}\n</result>\n")
    again = Step(
        text=f"<search>the {thing}</search>", observation=f"\n<result>\n{thing}: {place}\n</result>\n"
    )
    answer = Step(text=f"<answer>{place}</answer>", observation="", is_terminal=True)
    return Trajectory(
        trajectory_id=f"given/{thing}", task_key=f"tasks-{number}", agent="given", reward=1.0,
        prompt=(Message(role="user", content=f"Where is the {thing}?"),), steps=(search, again, answer),
    )  # fmt: skip


def _write_lines(path: Path, records: Sequence[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
