"""Time of an update by how turns become samples: one per turn with a window, or one trace per episode.

    python benchmarks/window_update.py [--games 2] [--turns 20] [--thought 100] [--repeats 3]

A scripted searcher plays games of ALFWorld that are made offline (see ``outrider protocol cost``). All sides
have the same commands and thoughts; their prompts differ, so they are not the same training.
"""

import argparse
import os
import statistics
import time
from collections.abc import Sequence

os.environ.setdefault("GOMP_SPINCOUNT", "10000")

import torch
from rich.console import Console
from rich.table import Table

from outrider.algorithms.base import ObjectiveSettings
from outrider.config import validate
from outrider.engines.local.model import load_model, resolve_precision
from outrider.environments.alfworld.environment import AlfworldConfig
from outrider.environments.base import make_task_set, split_tasks
from outrider.planning.token_bill import search_commands, thought_text
from outrider.rollout.experts import play_experts
from outrider.rollout.settings import Limits
from outrider.tokens import ChatRenderer
from outrider.trace import Trace
from outrider.training.policy import Policy
from outrider.training.settings import OptimizerSettings, UpdateSettings
from outrider.training.update import update
from outrider.types import Step, Task

WINDOW = {"actions": "quoted", "hide": ["help"], "parse": "verl-agent-30", "max_prompt_tokens": 4096}
SIDES: dict[str, dict[str, object]] = {
    "window of 2": {"context": "window", "window": {**WINDOW, "steps": 2}},
    "window of 5": {"context": "window", "window": {**WINDOW, "steps": 5}},
    "one trace, lists of commands": {"show_admissible": True},
    "one trace, no lists": {},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--games", type=int, default=2)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--thought", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--trained-layers", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--precision", choices=("auto", "bfloat16", "float32"), default="float32")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    precision = resolve_precision(arguments.precision, "cpu")
    model = load_model(arguments.model, precision=precision)
    policy = Policy(model, OptimizerSettings(learning_rate=1e-9), trained_layers=arguments.trained_layers)
    thought = thought_text(ChatRenderer(model.tokenizer), arguments.thought)
    sides = {
        name: play(model.tokenizer, options, arguments.games, arguments.turns, thought)
        for name, options in SIDES.items()
    }
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for repeat in range(arguments.repeats + 1):
        for name, traces in sides.items():  # alternating: the machine may become slower
            elapsed = step(policy, traces)
            if repeat:  # the first one warms up
                seconds[name].append(elapsed)
    title = (
        f"{arguments.model}, {precision}, {arguments.threads} threads, {arguments.games} episodes of "
        f"{arguments.turns} turns, thoughts of {arguments.thought} tokens, medians of {arguments.repeats}"
    )
    table = Table("samples", "tokens per episode", "CPU seconds", "against one trace with lists", title=title)
    base = statistics.median(seconds["one trace, lists of commands"])
    for name, traces in sides.items():
        num_tokens = sum(len(node.token_ids) for trace in traces for node in trace.nodes)
        median = statistics.median(seconds[name])
        table.add_row(name, f"{num_tokens / arguments.games:,.0f}", f"{median:.2f}", f"{median / base:.2f}")
    Console().print(table)


def play(
    tokenizer: object, options: dict[str, object], num_games: int, num_turns: int, thought: str
) -> list[Trace]:
    """Play the searcher's commands. Half of the rollouts get positive advantages."""
    config = validate(AlfworldConfig, {"num_test": 40, "max_moves": num_turns + 1, **options})
    plain = make_task_set(validate(AlfworldConfig, {"num_test": 40, "max_moves": num_turns + 1}))
    commands: dict[str, Sequence[str]] = {}
    tasks: list[Task] = []
    for task in split_tasks(plain, "test"):
        found = search_commands(plain, task, num_turns=num_turns)
        if found is not None and len(tasks) < num_games:
            commands[task.key] = found
            tasks.append(task)

    def expert(task: Task) -> list[Step]:
        return [
            Step(text=f"{thought}<action>{command}</action>", observation="")
            for command in commands[task.key]
        ]

    task_set = make_task_set(config)
    limits = Limits(max_turns=num_turns, max_turn_tokens=512, max_response_tokens=40_000)
    traces = play_experts(
        tasks=tasks, expert=expert, factory=task_set.make(), tokenizer=tokenizer, limits=limits,
        stop=task_set.stop, run_seed=0, context_length=8192,
    )  # fmt: skip
    for number, trace in enumerate(traces):
        for node in trace.nodes:
            if node.trainable:
                size = len(node.token_ids)
                node.credit = (1.0 if number % 2 else -1.0,) * size
                node.logprobs, node.entropies = (-10.0,) * size, (1.0,) * size
    return traces


def step(policy: Policy, traces: list[Trace]) -> float:
    """Return the processor seconds of an update."""
    began = time.process_time()
    update(
        policy,
        traces,
        objective=ObjectiveSettings(),
        settings=UpdateSettings(max_tokens=1024, max_logprob_gap=1e9),
        reference=None,
    )
    return time.process_time() - began


if __name__ == "__main__":
    main()
