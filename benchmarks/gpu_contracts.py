"""Contracts of the engines on a device, their mismatch with the trainer, and which results are reproduced bit
for bit with the same seed.
"""

import importlib.util
import subprocess
import sys
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path

import torch
from safetensors.torch import load_file
from tests.distributed.groups import groups

from benchmarks.gpu_models import Made, make_model
from benchmarks.gpu_rows import RowFile
from benchmarks.speed_update import rollout_batch
from outrider.algorithms.base import ObjectiveSettings
from outrider.engines.base import Generation, Request, VllmSettings
from outrider.engines.local.engine import LocalEngine
from outrider.engines.local.model import load_model
from outrider.engines.vllm.engine import VllmEngine
from outrider.smoke import save_model
from outrider.testing import check_engine
from outrider.training.policy import MASTERS, Policy
from outrider.training.settings import OptimizerSettings, UpdateSettings
from outrider.training.update import update

_RECIPE = """
seed = 0
[model]
name = "{model}"
device = "{device}"
[environment]
type = "house"
num_train = 8
num_test = 4
[algorithm]
type = "grpo"
group_size = 2
[rollout]
max_turns = 8
max_turn_tokens = 64
max_response_tokens = 4096
max_observation_tokens = 512
[cold_start]
num_examples = 4
batch_size = 4
[train]
num_steps = {steps}
tasks_per_step = 2
checkpoint_every = 1
[evaluation]
num_tasks = 2
at_start = false
"""


def contracts(shape: str, device: str, folder: Path, rows: RowFile) -> None:
    """The checks of ``outrider.testing`` for every engine that is installed, in both precisions."""
    for dtype in (torch.float32, torch.bfloat16):
        made = make_model(shape, device=device, dtype=dtype)
        name = str(dtype).removeprefix("torch.")
        rows.add(f"contract, local engine, {name}", _checked(LocalEngine(made.language_model)))
        rows.add(f"log-prob gap engine - trainer, {name}", _gap(made), "mean, largest; nats")
    if importlib.util.find_spec("vllm") is None:
        rows.add("contract, vLLM engine", "skipped: vllm is not installed in this Python")
        return
    save_model(folder / "model")
    plain = load_model(str(folder / "model"), precision="float32", device=device)
    engine = VllmEngine(
        folder=folder / "vllm", export=Policy(plain, OptimizerSettings()).export, tokenizer=plain.tokenizer,
        eos_token_ids=plain.eos_token_ids, eos_texts=plain.eos_texts, context_length=512, precision="float32",
        device=device, settings=VllmSettings(),
    )  # fmt: skip
    rows.add("contract, vLLM engine, float32", _checked(engine))


def _checked(engine: LocalEngine | VllmEngine) -> str:
    try:
        check_engine(engine)
    except AssertionError as error:
        return f"broken: {error}"
    return "holds"


def _gap(made: Made) -> str:
    """Of tokens that the engine has just sampled."""
    requests = _requests(8, made, new=32)
    is_gpu = made.language_model.device.type == "cuda"
    policy = Policy(made.language_model, OptimizerSettings(), uses_flex=is_gpu)
    gaps = []
    for request, one in zip(requests, LocalEngine(made.language_model).generate(requests), strict=True):
        batch = rollout_batch(request.token_ids, one.token_ids, one.logprobs)
        with torch.no_grad():
            gaps.append((policy.score(batch).logprobs_T.cpu() - batch.engine_logprobs_T).abs())
    every = torch.cat(gaps)
    return f"{float(every.mean()):.1e}, {float(every.max()):.1e}"


def determinism(shape: str, device: str, folder: Path, rows: RowFile) -> None:
    """The same seed twice, in another batch, an update twice, and a run that is resumed."""
    made = make_model(shape, device=device, dtype=torch.bfloat16)
    requests = _requests(32, made, new=48)
    first = LocalEngine(made.language_model).generate(requests)
    again = LocalEngine(made.language_model).generate(requests)
    rows.add("sampling, same seed twice", compared(first, again))
    alone = [LocalEngine(made.language_model).generate([one])[0] for one in requests[:8]]
    rows.add("sampling, alone and in a batch of 32", compared(first[:8], alone))
    del made
    updates = [_updated(shape, device) for _ in range(2)]
    rows.add("update twice, master weights", _distance(*updates))
    rows.add("run resumed after 1 of 2 steps, master weights", _resumed(device, folder))


def _requests(num: int, made: Made, *, new: int) -> list[Request]:
    generator = torch.Generator().manual_seed(0)
    shape = (num, 128)
    prompts = torch.randint(3, made.shape.vocabulary, shape, generator=generator).tolist()
    return [
        Request(request_id=str(i), token_ids=tuple(ids), max_tokens=new, seed=i)
        for i, ids in enumerate(prompts)
    ]


def compared(ours: Sequence[Generation], theirs: Sequence[Generation]) -> str:
    """Sequences that differ, and the largest difference of a log-prob before the first other token."""
    num_different, largest = 0, 0.0
    for one, other in zip(ours, theirs, strict=True):
        pairs = zip(one.token_ids, other.token_ids, strict=True)
        num = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
        num_different += num < len(one.token_ids)
        apart = (abs(a - b) for a, b in zip(one.logprobs[:num], other.logprobs[:num], strict=True))
        largest = max(largest, *apart, 0.0)
    if not num_different and not largest:
        return "same bits"
    return f"{num_different} of {len(ours)} sequences differ; log-probs by up to {largest:.1e} nats"


def _updated(shape: str, device: str) -> dict[str, torch.Tensor]:
    made = make_model(shape, device=device, dtype=torch.bfloat16)
    is_gpu = made.language_model.device.type == "cuda"
    policy = Policy(made.language_model, OptimizerSettings(learning_rate=1e-5), uses_flex=is_gpu)
    settings = UpdateSettings(max_tokens=1024, max_logprob_gap=1e9)
    update(policy, groups(4), objective=ObjectiveSettings(), settings=settings, reference=None)
    return {name: one.cpu() for name, one in policy.masters.items()}


def _distance(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> str:
    """Norm of the difference over the norm."""
    if all(one.equal(theirs[name]) for name, one in ours.items()):
        return "same bits"
    apart = sum(float((one - theirs[name]).double().square().sum()) for name, one in ours.items())
    size = sum(float(one.double().square().sum()) for one in ours.values())
    return f"{(apart / size) ** 0.5:.1e} of their norm apart"


def _resumed(device: str, folder: Path) -> str:
    model = folder / "resumed-model"
    save_model(model)
    weights = []
    for name, parts in (("unbroken", (2,)), ("broken", (1, 2))):
        run = folder / name
        recipe = folder / f"{name}.toml"
        recipe.write_text(_RECIPE.format(model=model, device=device, steps=parts[0]), encoding="utf-8")
        command = [sys.executable, "-m", "outrider", "train", "--progress", "none"]
        _trained([*command, str(recipe), "--run", str(run)])
        for steps in parts[1:]:
            _trained([*command, "--resume", str(run), f"train.num_steps={steps}"])
        weights.append(load_file(run / "checkpoints" / "step-000002" / MASTERS))
    return _distance(*weights)


def _trained(command: Sequence[str]) -> None:
    """Raise SystemExit with the end of what the run printed."""
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        print(done.stderr, file=sys.stderr)
        errors = [line for line in done.stderr.splitlines() if "Error" in line or line.startswith("outrider")]
        raise SystemExit((errors or ["outrider printed no error"])[-1])
