"""One GRPO step, end to end: 8 completions of 64 tokens to one prompt, advantages, update. Outrider and TRL
in one process.

    python benchmarks/grpo_step.py [--repeats 5] [--precision auto]      # needs: pip install trl datasets

Both generate all 64 tokens, reward at random, and train on all completions with AdamW and without a KL term.
The last line is the time of the matrix products that a step without repeated tokens needs, at the rates of
this machine.
"""

import argparse
import os
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from tempfile import TemporaryDirectory

os.environ.setdefault("GOMP_SPINCOUNT", "10000")

import torch
from rich.console import Console
from rich.table import Table

from outrider.algorithms.grpo import Grpo, GrpoSettings
from outrider.engines.base import Request
from outrider.engines.local.engine import LocalEngine
from outrider.engines.local.model import (
    copy_rate,
    load_model,
    product_rate,
    resolve_model,
    resolve_precision,
)
from outrider.planning.memory import weight_bytes
from outrider.planning.shape import find_shape
from outrider.trace import Leaf, Trace
from outrider.training.policy import Policy
from outrider.training.settings import OptimizerSettings, UpdateSettings
from outrider.training.update import update
from outrider.types import Message, Origin, Outcome, Task

PROMPT, NEW, GROUP = 207, 64, 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--precision", choices=("auto", "bfloat16", "float32"), default="auto")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    precision = resolve_precision(arguments.precision, "cpu")
    theirs = trl_seconds(resolve_model(arguments.model), precision, arguments.repeats)
    step = ours(arguments.model, precision)
    seconds = []
    for _ in range(arguments.repeats + 1):
        began = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - began)
    mine = statistics.median(seconds[1:])
    table = Table(
        "", "s/step", "ratio", title=f"{arguments.model}, {precision}, medians of {arguments.repeats}"
    )
    table.add_row("TRL GRPOTrainer", f"{theirs:.1f}", "1")
    table.add_row("Outrider", f"{mine:.1f}", f"{theirs / mine:.2f}")
    Console().print(table, f"products alone: {products_seconds(arguments.model, precision):.1f} s/step")


def products_seconds(model: str, precision: str) -> float:
    """Seconds of the products of the layers: the prompt once, each new token, and their update."""
    shape, dtype = find_shape(resolve_model(model)), getattr(torch, precision)
    many, few = (1e12 * product_rate(rows, dtype) for rows in (2048, GROUP))
    layers = 2 * shape.num_layers * shape.layer_parameters
    head = 2 * shape.embedding_parameters
    read = weight_bytes(shape, tensor_parallel=1, value_bytes=dtype.itemsize) / (1e9 * copy_rate())
    decoding = NEW * max(GROUP * (layers + head) / few, read)
    update = 3 * ((PROMPT + GROUP * NEW) * layers + GROUP * NEW * head) / many
    return PROMPT * layers / many + decoding + update


def trl_seconds(folder: str, precision: str, repeats: int) -> float:
    """Return the median time between the ends of two steps, without the first."""
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    ends: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *_: object, **__: object) -> None:
            ends.append(time.perf_counter())

    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = tokenizer.decode(tokenizer.encode("The quick brown fox jumps over the lazy dog. " * 40)[:PROMPT])
    with TemporaryDirectory() as output:
        settings = GRPOConfig(
            output_dir=output, per_device_train_batch_size=GROUP, num_generations=GROUP,
            max_completion_length=NEW, max_steps=repeats + 2, use_cpu=True, bf16=precision == "bfloat16",
            report_to=[], save_strategy="no", beta=0.0, learning_rate=1e-6, gradient_checkpointing=False,
            disable_tqdm=True, generation_kwargs={"min_new_tokens": NEW},
        )  # fmt: skip
        trainer = GRPOTrainer(
            model=folder, reward_funcs=lambda completions, **_: [random.random() for _ in completions],
            args=settings, train_dataset=Dataset.from_list([{"prompt": text}] * 64), callbacks=[Clock()],
        )  # fmt: skip
        trainer.train()
    return statistics.median(after - before for before, after in pairwise(ends[1:]))


def ours(name: str, precision: str) -> Callable[[], None]:
    language_model = load_model(name, precision=precision)
    policy = Policy(language_model, OptimizerSettings(learning_rate=1e-6))
    engine = LocalEngine(replace(language_model, eos_token_ids=frozenset(), eos_texts=()))
    algorithm = Grpo(GrpoSettings(group_size=GROUP))
    ids = tuple(
        language_model.tokenizer.encode("The quick brown fox jumps over the lazy dog. " * 40)[:PROMPT]
    )
    message = Message(role="user", content="")

    def step() -> None:
        requests = [
            Request(
                request_id=str(i),
                token_ids=ids,
                max_tokens=NEW,
                seed=random.getrandbits(32),
                cache_key=str(i),
            )
            for i in range(GROUP)
        ]
        trace = Trace(task=Task(key="benchmark", question=""))
        root = trace.append(parent=None, origin=Origin.PROMPT, token_ids=ids, message=message)
        for rollout, one in enumerate(engine.generate(requests)):
            node = trace.append(
                parent=root.node_id, origin=Origin.POLICY, token_ids=one.token_ids, message=message,
                logprobs=one.logprobs, entropies=one.entropies,
            )  # fmt: skip
            value = random.random()
            trace.finish(
                Leaf(node_id=node.node_id, rollout=rollout, outcome=Outcome.FINISHED, episode_return=value)
            )
        engine.free_cache()
        algorithm.assign_advantages(trace)
        update(
            policy,
            [trace],
            objective=algorithm.objective,
            settings=UpdateSettings(),
            reference=None,
        )
        engine.load(engine.weight_version + 1)

    return step


if __name__ == "__main__":
    main()
