"""Log-prob mismatch of mixture-of-experts models between engine and update.

    python -m benchmarks.experts [--record records/experts.json]

Tiny random models; each rollout is generated and scored alone. A router may choose other experts when the
update scores the sampled tokens: the table has the mismatch in nats per token, the share of different choices
(token and layer), and the mismatch that remains if the choices of the engine are replayed.
"""

import argparse
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import product
from pathlib import Path
from types import MethodType
from typing import Any, Final
from unittest import mock

import torch
from docsite.models import ARCHITECTURES, Architecture
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from benchmarks.markdown_table import markdown
from benchmarks.paths import PATHS, paths_of, record, written_by
from outrider.engines.local.model import Forward, LanguageModel, Precision, load_model
from outrider.errors import ModelError
from outrider.training.packing import RolloutPath, pack
from outrider.training.policy import Policy, set_threads
from outrider.training.settings import OptimizerSettings

_NUM_EXPERTS, _NUM_CHOSEN = 16, 4
_SIZES: Final[Mapping[str, Any]] = {
    "hidden_size": 64, "num_hidden_layers": 4, "max_position_embeddings": 512,
}  # fmt: skip
_MANY: Final[Mapping[str, Any]] = {"num_experts": _NUM_EXPERTS, "num_experts_per_tok": _NUM_CHOSEN}
_LOCAL: Final[Mapping[str, Any]] = {"num_local_experts": _NUM_EXPERTS, "num_experts_per_tok": _NUM_CHOSEN}
_ROUTED: Final[Mapping[str, Any]] = {"n_routed_experts": _NUM_EXPERTS, "num_experts_per_tok": _NUM_CHOSEN}
MODELS: Final[Mapping[str, Mapping[str, Any]]] = {
    "Qwen3": {}, "Qwen3 MoE": _MANY, "GLM-4.5 (MoE)": _ROUTED, "DeepSeek-V3, R1": _ROUTED,
    "gpt-oss": _LOCAL, "Qwen3-Next": _MANY,
}  # fmt: skip
"""Titles of ``docsite.models``, the first one dense, and how many experts they have."""
PRECISIONS: Final[tuple[Precision, ...]] = ("float32", "bfloat16")
COLUMNS: Final = (
    "model", "path", "precision", "mean gap, nats", "largest gap", "other experts",
    "mean gap, choices replayed", "largest gap, choices replayed",
)  # fmt: skip


def model_of(title: str, precision: Precision, forward: Forward) -> LanguageModel:
    """Return a model with more layers and experts than in the table of architectures. Raises ModelError if it
    cannot run on this path.
    """
    [small] = [one for one in ARCHITECTURES if one.title == title]
    layers = small.settings.get("layer_types")
    more = {**_SIZES, **MODELS[title], **({"layer_types": [*layers] * 2} if layers else {})}
    with tempfile.TemporaryDirectory() as name:
        Architecture(
            title=title, model_type=small.model_type, without=small.without, settings=small.settings | more
        ).save(Path(name))
        return load_model(name, precision=precision, forward=forward)


def routers(model: nn.Module) -> list[nn.Module]:
    """The modules that choose experts; their last output is the choice [N, k]."""
    return [module for module in model.modules() if type(module).__name__.lower().endswith("topkrouter")]


@contextmanager
def listening(model: nn.Module) -> Iterator[dict[nn.Module, list[Tensor]]]:
    """The choices of every router while it lasts, a tensor a forward pass."""
    heard: dict[nn.Module, list[Tensor]] = {router: [] for router in routers(model)}

    def hear(module: nn.Module, given: Any, output: Any) -> None:
        heard[module].append(output[-1].detach().clone())

    with ExitStack() as hooks:
        for router in heard:
            hooks.callback(router.register_forward_hook(hear).remove)
        yield heard


@contextmanager
def replaying(choices: Mapping[nn.Module, Tensor]) -> Iterator[None]:
    """Make routers choose these experts [N, k]; their weights are computed as usual."""
    with ExitStack() as patches:
        for router, choice in choices.items():

            def forward(self: Any, *given: Any, _choice: Tensor = choice, **named: Any) -> Any:
                with _Chosen(_choice):
                    return type(self).forward(self, *given, **named)

            patches.enter_context(mock.patch.object(router, "forward", MethodType(forward, router)))
        yield


class _Chosen(TorchFunctionMode):
    """``topk`` over all experts returns the given ones; over groups of experts it is unchanged."""

    def __init__(self, choice_Nk: Tensor) -> None:
        super().__init__()
        self._choice = choice_Nk

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_topk = func in (torch.topk, Tensor.topk)
        if is_topk and args[0].dim() == self._choice.dim() and args[0].shape[-1] == _NUM_EXPERTS:
            return torch.return_types.topk((args[0].gather(-1, self._choice), self._choice))
        return func(*args, **(kwargs or {}))


def measured(model: LanguageModel, *, num: int) -> tuple[Tensor, Tensor, float]:
    """|engine - update| of every token, the same with choices replayed, and the share of other experts."""
    policy = Policy(model, OptimizerSettings())
    gaps, replayed, others = [], [], []
    for seed in range(num):
        with listening(model.model) as engine:
            asked, written = written_by(model, num=1, prompt=64, new=64, seed=seed)
        paths = paths_of(asked, written)
        with listening(model.model) as update:
            gaps.append(_gap(policy, paths))
        choices = {}
        for router, heard in engine.items():
            theirs, ours = torch.cat(heard), torch.cat(update[router])
            num_heard = len(theirs)  # a packed row has the last token too, which predicts nothing
            choices[router] = torch.cat([theirs, ours[num_heard:]])
            differs = theirs.sort(dim=-1).values != ours[:num_heard].sort(dim=-1).values
            others.append(differs.any(dim=-1).double())
        with replaying(choices):
            replayed.append(_gap(policy, paths))
    share = float(torch.cat(others).mean()) if others else 0.0
    return torch.cat(gaps), torch.cat(replayed), share


@torch.no_grad()
def _gap(policy: Policy, paths: Sequence[RolloutPath]) -> Tensor:
    [batch] = pack(paths, max_tokens=10_000)
    found: Tensor = (policy.score(batch).logprobs_T.double() - batch.engine_logprobs_T).abs()
    return found


def rows(*, num: int) -> Iterator[tuple[str, ...]]:
    """A row a model, path and precision, of ``num`` rollouts."""
    for title, forward, precision in product(MODELS, PATHS, PRECISIONS):
        try:
            model = model_of(title, precision, forward)
        except ModelError:
            continue
        gaps, replayed, others = measured(model, num=num)
        told = [f"{one:.1e}" for one in (gaps.mean(), gaps.max())]
        left = [f"{100 * others:.2f} %", *(f"{one:.1e}" for one in (replayed.mean(), replayed.max()))]
        name = title if MODELS[title] else f"{title} (dense)"
        yield name, forward, precision, *told, *(left if MODELS[title] else [""] * 3)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=16)
    parser.add_argument("--record", type=Path, help="write the table there too")
    given = parser.parse_args()
    set_threads(1)
    found = list(rows(num=given.rollouts))
    print(markdown(COLUMNS, found))
    if given.record:
        record(given.record, COLUMNS, found, command="python -m benchmarks.experts")


if __name__ == "__main__":
    main()
