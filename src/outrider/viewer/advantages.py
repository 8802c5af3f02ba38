"""How the recorded advantages of a group follow from its returns, as equations for the page of the group."""

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from types import SimpleNamespace
from typing import Any, Final, cast

import numpy as np

from outrider.algorithms.advantages import group_normalized_advantages_per_rollout, has_spread
from outrider.algorithms.retrieval import RetrievalAdvantageSettings, retrieval_reward
from outrider.types import Origin

Row = Mapping[str, Any]
_FORMULAS: Final = {
    "group_normalized": "(R − mean) / std",
    "group_centered": "(R − mean)",
    "leave_one_out": "(R − mean of the others)",
    "mean_normalized": "(R − mean) / mean",
}
_UNEXPLAINED: Final = {
    "reinforce++": "advantages of tokens are normalized over the step",
    "tree_grpo": "z-scores within the trees are added or replace those within the group",
    "lamer": "every turn has an advantage of its own, and the value is their mean",
    "rejection": "selected rollouts have the advantage 1, all others 0",
}


def explain_advantages(settings: Row, rollouts: Sequence[Row], nodes: Sequence[Row]) -> dict[str, Any] | None:
    """Explain the advantages of a group from the ``[algorithm]`` settings of its run and its recorded
    rollouts and nodes; None if it has no advantages.

    Returns ``mean`` and ``std`` of the returns, ``notes``, ``formula`` and, by rollout, ``equation`` (both
    empty unless the equations give all recorded advantages), ``parts``, and ``clipped``: the numbers of
    clipped and of trained tokens, or None.
    """
    has_both = [row for row in rollouts if None not in (row["advantage"], row["episode_return"])]
    rows = [row for row in has_both if math.isfinite(row["advantage"] + row["episode_return"])]
    if not rows:
        return None
    by_id = {node["node_id"]: node for node in nodes}
    paths = [path_to(by_id, row["node_id"]) for row in rows]
    kind = str(settings.get("advantage", "group_normalized"))
    totals = [row["episode_return"] + row["intrinsic"] for row in rows]
    mean, num = fmean(totals), len(totals)
    std = float(np.std(totals, ddof=min(num - 1, settings.get("advantage_std") != "population")))
    scale = {"group_normalized": std + 1e-6, "mean_normalized": mean}.get(kind, 1.0)
    baselines = [mean] * num
    if kind == "leave_one_out" and num > 1:
        baselines = [(num * mean - total) / (num - 1) for total in totals]
    factors, rewards, weight = _retrieval_factors(settings, paths)
    terms = list(zip(totals, baselines, factors, strict=True))
    is_tied = not has_spread(np.array(totals))
    values = [0.0 if is_tied else (score - baseline) / scale * factor for score, baseline, factor in terms]
    follows = np.allclose(values, [row["advantage"] for row in rows], rtol=1e-6, atol=1e-9)
    is_explained = follows and (kind in _FORMULAS or is_tied)
    notes = _notes(settings, rows, weight)
    if not is_explained:
        why = _UNEXPLAINED.get(str(settings.get("type")), f"{kind} uses more than the returns of the group")
        if settings.get("invalid_penalty") or settings.get("statistics") == "samples":
            why = "turns have scores of their own (invalid_penalty, statistics)"
        notes.insert(0, f"The advantages do not follow from these returns alone: {why}.")
    elif is_tied:
        notes.insert(0, "All returns are equal, so every advantage is 0.")
    has_equations = is_explained and not is_tied
    explained = {}
    for row, path, reward, value, own in zip(rows, paths, rewards, values, terms, strict=True):
        parts = [f"R = {row['episode_return']:.4g} {row['intrinsic']:+.4g}"] if row["intrinsic"] else []
        parts += [f"factor {own[2]:.4g} (retrieval reward {reward:.4g})"] if weight else []
        explained[row["rollout"]] = {
            "equation": _equation(*own, scale, value) if has_equations else "",
            "parts": " · ".join(parts).replace("-", "−"),
            "clipped": _clipped(settings.get("loss"), [n for n in path if n["rollout"] == row["rollout"]]),
        }
    formula = f"A = {_FORMULAS[kind]}{' × factor' if weight else ''}" if has_equations else ""
    return {"formula": formula, "mean": mean, "std": std, "notes": notes, "rollouts": explained}


def path_to(nodes: Mapping[int, Row], node_id: int) -> list[Row]:
    """The recorded nodes from the root to ``node_id``; empty for -1."""
    path: list[Row] = []
    while node_id in nodes and len(path) < len(nodes):  # a damaged file may have a cycle
        path.insert(0, nodes[node_id])
        node_id = nodes[node_id]["parent_id"]
    return path


def _notes(settings: Row, rows: Sequence[Row], weight: float) -> list[str]:
    branch = settings.get("branch")
    branching = {**settings, **(branch if isinstance(branch, Mapping) else {})}
    is_shared = "attribution" in branching and any(row["forked_from"] != row["rollout"] for row in rows)
    is_hard = branching.get("attribution") == "hard"
    how = "once, with the mean of their advantages" if is_hard else "once for each, with its advantage"
    notes = [
        (weight, f"factor = 1 + {weight:g} × the z-score of the retrieval reward in the group (RAPO)."),
        (is_shared, f"A turn that rollouts share is trained {how}."),
        (branching.get("entropy_advantage"), "Not explained: each token's factor by its entropy (AEPO)."),
        (settings.get("type") == "gigpo", "Not explained: the advantage of its step, added for each turn."),
    ]
    return [text for applies, text in notes if applies]


def _retrieval_factors(
    settings: Row, paths: Sequence[Sequence[Row]]
) -> tuple[list[float], list[float], float]:
    """RAPO's factors, the retrieval rewards, and the weight, which is 0 if the run has none."""
    section = settings if "num_hybrid" in settings else settings.get("retrieval")
    if not isinstance(section, Mapping) or not section.get("num_hybrid"):
        return [1.0] * len(paths), [0.0] * len(paths), 0.0
    names = RetrievalAdvantageSettings.model_fields.keys() & section.keys()
    chosen = RetrievalAdvantageSettings(**{name: section[name] for name in names})
    rewards = [retrieval_reward(cast(Any, [_step(node) for node in path]), chosen).value for path in paths]
    z = group_normalized_advantages_per_rollout(returns=rewards).values.tolist()
    return [1.0 + chosen.advantage_weight * value for value in z], rewards, chosen.advantage_weight


def _step(node: Row) -> SimpleNamespace:
    origin = Origin(node["origin"])
    return SimpleNamespace(origin=origin, trainable=origin is Origin.POLICY, entropies=node["entropies"])


def _equation(score: float, baseline: float, factor: float, scale: float, value: float) -> str:
    """The equation with as few digits as its two sides need to agree."""
    for digits in (4, 6, 9, 17):
        a, b, c, d = (f"{number:.{digits}g}" for number in (score, baseline, scale, factor))
        difference = (float(a) - float(b)) / float(c) * float(d) - value
        if abs(difference) <= 5e-4 * abs(value) + 1e-9:
            break
    text = f"({a} − {f'({b})' if baseline < 0 else b})"
    text += (f" / {c}" if scale != 1.0 else "") + (f" × {d}" if factor != 1.0 else "")
    return f"{text} = {value if abs(value) > 1e-9 else 0.0:+.4g}".replace("-", "−")


def _clipped(loss: Any, nodes: Sequence[Row]) -> list[int] | None:
    """Tokens that the clip loss bounded in the last pass, and tokens with a recorded ratio."""
    if not isinstance(loss, Mapping) or loss.get("type") != "clip":
        return None
    bounds = (loss.get(name) for name in ("clip_low", "clip_high", "dual_clip"))
    low, high, dual = (float(one) if isinstance(one, int | float) else math.inf for one in bounds)
    pairs = [pair for node in nodes for pair in zip(node["ratios"], node["advantages"], strict=False)]
    trained = [(ratio, a) for ratio, a in pairs if not math.isnan(ratio)]
    num = sum((a > 0 and r > 1 + high) or (a < 0 and (r < 1 - low or r > dual)) for r, a in trained)
    return [num, len(trained)] if trained else None
