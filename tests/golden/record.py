"""Plays the runs of the golden record and hashes them, step by step and part by part."""

import json
import random
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from outrider.config import validate
from outrider.engines.base import Request
from outrider.engines.scripted import ScriptedEngine
from outrider.tokens import Tokenizer
from outrider.training import learner as learner_module
from outrider.training import policy as policy_module
from outrider.training.components import Components
from outrider.training.policy import Policy
from outrider.training.run_dir import RunDirectory
from outrider.training.settings import RunSettings
from outrider.training.setup import build
from outrider.training.trainer import Trainer
from outrider.viewer.progress import make_progress
from outrider.viewer.trackers import make_trackers
from tests.golden import parts
from tests.golden.cases import Player, recipe
from tests.training.tool_run import PLACES, THINGS, write_demonstrations, write_tool_run

Entry = dict[str, Any]


def write_inputs(root: Path) -> None:
    """Model, tasks, corpus, buffer and demonstrations of all runs."""
    write_tool_run(root)
    write_demonstrations(root / "shown.jsonl")
    long = shutil.copytree(root / "model", root / "model-long") / "config.json"
    long.write_text(json.dumps({**json.loads(long.read_text()), "max_position_embeddings": 4096}))


def play(case: str, player: Player, *, root: Path, folder: Path) -> list[Entry]:
    """One run, below ``folder``, which it leaves empty; one entry a step."""
    return play_tree(recipe(case, player, root=root, run=folder / "run"), player, folder=folder)


def play_tree(tree: Mapping[str, Any], player: Player, *, folder: Path) -> list[Entry]:
    """:func:`play` of a recipe's tree."""
    run = folder / "run"
    settings = validate(RunSettings, tree)
    probe = _Probe()
    with ExitStack() as ending:
        directory = RunDirectory.create(run, settings)
        ending.callback(directory.release)
        made = build(
            settings,
            buffer_path=run / "buffer.sqlite",
            resumed=False,
            on_tokens=lambda num: None,
            note=lambda line: None,
        )
        ending.callback(made.factory.close)
        if made.buffer is not None:
            ending.callback(made.buffer.close)
        if player == "scripted":
            made.engine = scripted(made)
        trackers = make_trackers((), run_dir=run, config={})
        training = Trainer(run=directory, parts=made, progress=make_progress("none"), trackers=trackers)
        ending.callback(training.state.close)
        directory.commit()
        directory.retain()
        with probe.watching():
            training.train()
    num_steps = settings.train.num_steps
    found = [
        _entry(run, step, probe.steps[step - 1], is_last=step == num_steps)
        for step in range(1, num_steps + 1)
    ]
    shutil.rmtree(folder)
    return found


def _entry(run: Path, step: int, probed: Entry, *, is_last: bool) -> Entry:
    values = parts.measured(run)[step]
    entry = {
        **probed,
        "rows": parts.written_rows(run, step),
        **parts.checkpointed(run / "checkpoints" / f"step-{step:06d}"),
        "metrics": parts.by_section(values),
        "shown": parts.shown(values),
    }
    if is_last and (run / "buffer.sqlite").exists():
        entry["buffer"] = parts.buffer_rows(run / "buffer.sqlite")
    return entry


class _Probe:
    """Looks at the traces where the update gets them, and at the gradients where the optimiser does."""

    def __init__(self) -> None:
        self.steps: list[Entry] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        update, step = learner_module.update, Policy.step

        def watched_update(policy: Policy, traces: Sequence[Any], **options: Any) -> Any:
            self.steps.append(
                {"traces": parts.traced(traces), "credit": parts.credited(traces), "gradients": []}
            )
            return update(policy, traces, **options)

        def watched_step(policy: Policy, **options: Any) -> float:
            if self.steps:  # a cold start comes before the first of them
                named = ((name, one.grad) for name, one in policy.masters.items() if one.grad is not None)
                self.steps[-1]["gradients"].append(parts.tensors(named))
            return step(policy, **options)

        with (
            mock.patch.object(learner_module, "update", watched_update),
            mock.patch.object(Policy, "step", watched_step),
            _norm_of_0_2_0(),
        ):
            yield


@contextmanager
def _norm_of_0_2_0() -> Iterator[None]:
    """The norm in float32, and torch's clipping by it, as they were when the record was written.

    The norm is float64 since 0.3.0 (tests/training/test_gradient_norm.py), which moves every clipped step;
    the record shows that nothing else has moved.
    """

    def norm(self: Policy, gradients: Sequence[torch.Tensor]) -> float:
        return float(torch.nn.utils.get_total_norm(gradients))

    def clip(gradients: Sequence[torch.Tensor], *, norm: float, max_norm: float) -> None:
        # in a tensor of float32, as `clip_grad_norm_` had it
        scale = torch.clamp(max_norm / (torch.tensor(norm) + 1e-6), max=1.0)
        for gradient in gradients:
            gradient.mul_(scale)

    with mock.patch.object(Policy, "_norm", norm), mock.patch.object(policy_module, "clip", clip):
        yield


def scripted(made: Components) -> ScriptedEngine:
    """An engine whose texts and entropies follow from a request's seed alone."""
    tokenizer: Tokenizer = made.renderer.tokenizer
    is_house = made.settings.environment.type == "house"
    return ScriptedEngine(tokenizer=tokenizer, script=_moves if is_house else _searches, entropy=_entropy)


def _entropy(request: Request, index: int) -> float:
    return ((request.seed >> (index % 24)) % 97) / 32.0


def _searches(request: Request, context: str) -> str:
    drawn = random.Random(request.seed)
    thing, place = drawn.choice(THINGS), drawn.choice(PLACES[:2])
    return drawn.choice(
        [f"<search>{thing}</search>", f"<answer>{place}</answer>", f"<answer>{place}</answer>", "well"]
    )


def _moves(request: Request, context: str) -> str:
    """Searches the house well enough to find a thing now and then; sometimes says what nobody understands."""
    drawn, place = random.Random(request.seed), context.rfind("You are in the")
    told, state = context[:place].rpartition("<|im_start|>")[2], context[place:]
    [goal] = re.findall(r"You look for the ([a-z ]+)\.", state)[:1] or ["lamp"]
    doors = (re.findall(r"Doors: ([a-z, ]+)\.", state) or ["hall"])[0].split(", ")
    furniture = re.findall(r"You see: ([a-z ]+)\.", state)
    if f"is the {goal}." in told:
        command = f"take {goal}"
    elif furniture and f"In the {furniture[0]}" not in told and drawn.random() < 0.8:
        command = f"open {furniture[0]}"
    else:
        command = f"go {drawn.choice(doors)}" if drawn.random() < 0.9 else "sing loudly"
    return f"<action>{command}</action>"
