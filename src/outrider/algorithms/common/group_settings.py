"""Settings that the group family adds to returns and groups: DAPO's punishment of length, KL in the reward,
dynamic sampling.

Sources: docs/algorithms/objectives.md. All of it acts on credit: the recorded return of an episode stays the
environment's.
"""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, model_validator

from outrider.algorithms.base import ObjectiveSettings
from outrider.algorithms.common.batch_advantages import groups_with_spread, overlong_penalty
from outrider.config import Settings
from outrider.trace import Node, Trace
from outrider.types import Origin

if TYPE_CHECKING:
    from outrider.train.settings import RunSettings

_BUFFER_SHARE = 5  # of the released script: 4096 of 20480 tokens


class OverlongSettings(Settings):
    """DAPO's soft punishment (arXiv 2503.14476, Eq. 13): 0 to -``factor`` over the last ``buffer`` tokens
    before ``max_tokens``.

    ``max_tokens`` None is the run's ``rollout.max_response_tokens``, ``buffer`` None a fifth of it, as in the
    released script. ``counted``: the tokens that the policy wrote, or all after the prompt (released code).
    """

    max_tokens: int | None = Field(None, ge=1)
    buffer: int | None = Field(None, ge=1)
    factor: float = Field(1.0, gt=0)
    counted: Literal["policy", "all"] = "policy"

    @model_validator(mode="after")
    def _validate(self) -> "OverlongSettings":
        if self.buffer is not None and self.max_tokens is not None and self.buffer > self.max_tokens:
            raise ValueError(f"overlong.buffer {self.buffer} exceeds overlong.max_tokens {self.max_tokens}")
        return self

    def bounds(self, max_response_tokens: int) -> tuple[int, int]:
        """Longest length and buffer. Raises ValueError for a punishment that no rollout of that length could
        reach.
        """
        longest = self.max_tokens or max_response_tokens
        buffer = self.buffer or max(1, longest // _BUFFER_SHARE)
        if buffer > longest or longest - buffer >= max_response_tokens:
            raise ValueError(
                f"the overlong punishment begins after {longest - buffer} tokens, "
                f"and a response has at most {max_response_tokens}: "
                "set overlong.max_tokens and overlong.buffer"
            )
        return longest, buffer


class DynamicSamplingSettings(Settings):
    """DAPO's dynamic sampling: groups whose ``metric`` is constant are left out, and as many further tasks
    are played instead.

    ``metric`` is unshaped: the environment's return, or its verdict ``success``. After ``max_extra_batches``
    further rounds (the released script stops after ten in all) the step trains on the groups that it has, and
    says so.
    """

    metric: Literal["return", "success"] = "return"
    max_extra_batches: int = Field(9, ge=0)


class GroupSettings(ObjectiveSettings):
    """``overlong`` and ``dynamic_sampling`` are DAPO's. ``reward_kl_weight`` takes that much of k1 = log
    pi_old - log reference from the reward, without gradient: summed over a rollout, or token by token in
    REINFORCE++.
    """

    overlong: OverlongSettings | None = None
    dynamic_sampling: DynamicSamplingSettings | None = None
    reward_kl_weight: float = Field(0.0, ge=0)

    @property
    def needs_reference(self) -> bool:
        """The KL of the reward needs one as well."""
        return self.kl_weight > 0 or self.reward_kl_weight > 0

    @property
    def drops_groups(self) -> bool:
        """With ``dynamic_sampling``."""
        return self.dynamic_sampling is not None

    def validate_run(self, run: "RunSettings") -> None:
        """A punishment of length that some response could reach."""
        if self.overlong is not None:
            self.overlong.bounds(run.rollout.max_response_tokens)

    @property
    def rewards_kl(self) -> bool:
        """With a ``reward_kl_weight``."""
        return self.reward_kl_weight > 0


def with_preset(presets: Mapping[str, Mapping[str, Any]], data: Any, *, default: str) -> Any:
    """``data`` settings with what their preset says about the rest; a table in both is merged."""
    if not isinstance(data, Mapping):
        return data
    chosen = presets.get(str(data.get("preset", default)), {})
    merged = {**chosen, **data}
    for name, table in chosen.items():
        own = data.get(name)
        if isinstance(table, Mapping) and isinstance(own, Mapping):
            # Of another kind (loss.type) the preset's keys mean nothing.
            merged[name] = (
                {**table, **own} if own.get("type", table.get("type")) == table.get("type") else own
            )
    return merged


def shape_returns(
    trace: Trace, settings: GroupSettings, *, max_response_tokens: int, sum_kl: bool = True
) -> dict[str, list[float]]:
    """Put the punishment of length, and with ``sum_kl`` the rollout's KL, into ``leaf.intrinsic``; what was
    measured.

    Raises ValueError where the reward needs a KL that nobody measured.
    """
    measured: dict[str, list[float]] = {"reward/overlong_mean": [], "reward/kl_mean": []}
    for leaf, path in trace.scored_rollouts():
        shaping = 0.0
        if settings.overlong is not None:
            longest, buffer = settings.overlong.bounds(max_response_tokens)
            length = _length(path, settings.overlong)
            shaping += overlong_penalty(
                length=length, max_length=longest, buffer=buffer, factor=settings.overlong.factor
            )
            measured["reward/overlong_mean"].append(shaping)
        if settings.reward_kl_weight > 0:
            kl = math.fsum(value for node in path if node.trainable for value in measured_kl(node))
            measured["reward/kl_mean"].append(kl)
            shaping -= settings.reward_kl_weight * kl if sum_kl else 0.0
        leaf.intrinsic = shaping
    return measured


def measured_kl(node: Node) -> tuple[float, ...]:
    """The KL of a policy node's tokens. Raises ValueError where there is none."""
    if len(node.kl) != len(node.token_ids):
        raise ValueError(f"reward_kl_weight: no KL was measured on node {node.node_id}")
    return node.kl


def groups_worth_training(traces: Sequence[Trace], rule: DynamicSamplingSettings) -> list[Trace]:
    """The groups whose metric is not constant, in order; faults do not count."""
    metric: list[float | None] = []
    groups: list[int] = []
    for number, trace in enumerate(traces):
        for leaf, _ in trace.rollouts():
            value = leaf.episode_return if rule.metric == "return" else float(leaf.success)
            metric.append(None if leaf.episode_return is None else value)
            groups.append(number)
    informative = groups_with_spread(metric, groups=groups)
    return [trace for number, trace in enumerate(traces) if number in informative]


def _length(path: Sequence[Node], overlong: OverlongSettings) -> int:
    counted = [
        n for n in path if (n.trainable if overlong.counted == "policy" else n.origin is not Origin.PROMPT)
    ]
    return sum(len(node.token_ids) for node in counted)
