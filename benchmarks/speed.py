"""Rollout and update speed of the default path beside plain transformers, same model, prompts and machine, in one run.

    python benchmarks/speed.py [--model NAME] [--batch 32] [--prompt 256] [--new 64] [--repeats 5]

Prints medians of tokens per second and their ratios. Machines are noisy: read the ratios.
"""

import argparse
import os
import resource
import statistics
import time
from collections.abc import Callable

os.environ.setdefault("GOMP_SPINCOUNT", "10000")

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM

from outrider.engines.base import Request
from outrider.engines.local import LocalEngine
from outrider.engines.model import load_model, resolve_model
from outrider.trace import Trace
from outrider.train.pack import PackedBatch, RolloutPath, pack
from outrider.train.policy import OptimizerSettings, Policy
from outrider.types import Message, Origin, Task


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    language_model = load_model(arguments.model, precision="bfloat16", device=arguments.device)
    plain = AutoModelForCausalLM.from_pretrained(resolve_model(arguments.model), dtype=torch.bfloat16).to(arguments.device)
    random = torch.Generator().manual_seed(0)
    prompts = torch.randint(100, 10_000, (arguments.batch, arguments.prompt), generator=random)
    table = Table(
        "what", "plain transformers", "outrider", "ratio", title=f"{arguments.model}, medians of {arguments.repeats}, tokens/s"
    )
    with torch.no_grad():
        _compare(
            table, "generate, different prompts", *_generation(language_model, plain, prompts, arguments.new), arguments.repeats
        )
        shared = prompts[:4].repeat_interleave(arguments.batch // 4, dim=0)
        _compare(
            table, "generate, 4 prompts shared", *_generation(language_model, plain, shared, arguments.new), arguments.repeats
        )
    policy = Policy(language_model, OptimizerSettings(learning_rate=1e-9))
    for name, shared_tokens in (("update, no sharing", 1), ("update, common prompt", arguments.prompt)):
        _compare(table, name, *_updates(policy, plain, arguments.prompt, arguments.new, shared_tokens, random), arguments.repeats)
    Console().print(table)
    gap = _gap(language_model, policy, prompts[:8])
    print(f"log-prob gap engine - trainer: mean {gap.mean():.4f}, max {gap.max():.4f} nats")
    print(f"peak memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.1f} GiB (two models loaded)")


def _compare(table: Table, name: str, plain: Callable[[], int], ours: Callable[[], int], repeats: int) -> None:
    """Alternate the two, so that a slow minute of the machine hits both."""
    rates: tuple[list[float], list[float]] = ([], [])
    for _ in range(repeats + 1):
        for side, run in enumerate((plain, ours)):
            start = time.perf_counter()
            tokens = run()
            rates[side].append(tokens / (time.perf_counter() - start))
    one, other = (statistics.median(side[1:]) for side in rates)  # the first round warms up
    table.add_row(name, f"{one:.0f}", f"{other:.0f}", f"{other / one:.2f}")


def _generation(language_model, plain, prompts: torch.Tensor, new: int) -> tuple[Callable[[], int], Callable[[], int]]:  # type: ignore[no-untyped-def]
    engine = LocalEngine(language_model)
    never = dict.fromkeys(("eos_token_id", "pad_token_id"), 0)

    def generate() -> int:
        ids = prompts.to(plain.device)
        out = plain.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=True, min_new_tokens=new, max_new_tokens=new, **never
        )
        return int(out[:, prompts.shape[1] :].numel())

    def ours() -> int:
        engine.weights_changed()
        requests = [
            Request(request_id=f"{i:04d}", token_ids=tuple(row), max_tokens=new, seed=i, cache_key=str(i))
            for i, row in enumerate(prompts.tolist())
        ]
        return sum(len(generation.token_ids) for generation in engine.generate(requests))

    return generate, ours


def _tree(random: torch.Generator, num: int, shared: int, own: int, new: int) -> list[RolloutPath]:
    def ids(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(100, 10_000, (count,), generator=random).tolist())

    trace = Trace(task=Task(key="benchmark", question=""))
    message = Message(role="user", content="")
    root = trace.append(parent=None, origin=Origin.PROMPT, token_ids=ids(shared), message=message)
    paths = []
    for index in range(num):
        before = trace.append(parent=root.node_id, origin=Origin.ENVIRONMENT, token_ids=ids(own), message=message)
        zeros = (0.0,) * new
        node = trace.append(
            parent=before.node_id, origin=Origin.POLICY, token_ids=ids(new), message=message, logprobs=zeros, entropies=zeros
        )
        node.credit = (1.0,) * new
        paths.append(RolloutPath(nodes=trace.path(node.node_id), rollout_index=index))
    return paths


def _updates(  # type: ignore[no-untyped-def]
    policy: Policy, plain, prompt: int, new: int, shared: int, random: torch.Generator
) -> tuple[Callable[[], int], Callable[[], int]]:
    """Forward and backward of 8 rollouts; both sides are credited with the padded tokens, so the ratio is one of time."""
    paths = _tree(random, 8, shared, max(1, prompt - shared), new)
    total = 8 * (prompt + new)
    padded = torch.tensor([[token for node in path.nodes for token in node.token_ids][: prompt + new] for path in paths])

    def reference() -> int:
        logits = plain(padded.to(plain.device)).logits[:, -new - 1 : -1].float()
        targets = padded[:, -new:].to(plain.device)
        (-torch.log_softmax(logits, -1).gather(2, targets[..., None]).mean()).backward()
        plain.zero_grad(set_to_none=True)
        return total

    def ours() -> int:
        for batch in pack(paths, max_tokens=4096):
            (-policy.score(batch).logprobs_T.mean()).backward()
        for master in policy.masters.values():
            master.grad = None
        return total

    return reference, ours


def _gap(language_model, policy: Policy, prompts: torch.Tensor) -> torch.Tensor:  # type: ignore[no-untyped-def]
    engine = LocalEngine(language_model)
    requests = [Request(request_id=str(i), token_ids=tuple(row), max_tokens=48, seed=i) for i, row in enumerate(prompts.tolist())]
    gaps = []
    for request, generation in zip(requests, engine.generate(requests), strict=True):
        trace = Trace(task=Task(key="gap", question=""))
        message = Message(role="user", content="")
        root = trace.append(parent=None, origin=Origin.PROMPT, token_ids=request.token_ids, message=message)
        node = trace.append(
            parent=root.node_id,
            origin=Origin.POLICY,
            token_ids=generation.token_ids,
            message=message,
            logprobs=generation.logprobs,
            entropies=generation.entropies,
        )
        node.credit = (1.0,) * len(node.token_ids)
        batch: PackedBatch = next(iter(pack([RolloutPath(nodes=trace.path(node.node_id), rollout_index=0)], max_tokens=10_000)))
        with torch.no_grad():
            gaps.append((policy.score(batch).logprobs_T - batch.engine_logprobs_T).abs())
    return torch.cat(gaps)


if __name__ == "__main__":
    main()
