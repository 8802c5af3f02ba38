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
    "reinforce++": "the advantage of every token is normalized over all tokens of the step",
    "tree_grpo": "they combine z-scores within the group and within its trees",
    "lamer": "every turn has an advantage of its own, and the value is their mean",
    "rejection": "selected rollouts have the advantage 1, all others 0",
}


def explain_advantages(
    algorithm: Row, rollouts: Sequence[Row], nodes: Sequence[Row]
) -> dict[str, Any] | None:
    """Explain the advantages of a group from the table ``[algorithm]`` of its run, its recorded rollouts and
    its recorded nodes; None if it has no advantages.

    Returns ``formula`` and, by rollout, ``equation`` (both empty unless the equations give all recorded
    advantages); its ``parts``; ``clipped``, the numbers of clipped and of trained tokens, None if unknown;
    and for the group ``mean`` and ``std`` of its returns and ``notes``.
    """
    rows = [row for row in rollouts if None not in (row["advantage"], row["episode_return"])]
    if not rows:
        return None
    by_id = {node["node_id"]: node for node in nodes}
    paths = [path_to(by_id, row["node_id"]) for row in rows]
    kind, penalty = str(algorithm.get("advantage", "group_normalized")), algorithm.get("invalid_penalty", 0.0)
    formula, notes = _FORMULAS.get(kind, ""), _notes(algorithm, rows)
    totals = [row["episode_return"] + row["intrinsic"] for row in rows]
    scores, counted = totals, [[total] for total in totals]  # of each rollout: what mean and std count
    if penalty or algorithm.get("statistics") == "samples":
        turns = [
            [total - penalty * ('"invalid": true' in node["metadata"]) for node in path if _is_policy(node)]
            for total, path in zip(totals, paths, strict=True)
        ]
        scores = [fmean(own or [total]) for own, total in zip(turns, totals, strict=True)]
        counted = turns if algorithm.get("statistics") == "samples" else [[score] for score in scores]
        notes.append("R is the mean score of the turns, and every turn has the advantage of its own score.")
    population = [value for own in counted for value in own]
    mean = fmean(population)
    num, ddof = len(population), algorithm.get("advantage_std") != "population"
    std = math.sqrt(fmean((value - mean) ** 2 for value in population) * num / max(1, num - ddof))
    scale = {"group_normalized": std + 1e-6, "mean_normalized": mean}.get(kind, 1.0)
    baselines = [mean] * len(rows)
    if kind == "leave_one_out" and len(rows) > 1:
        baselines = [(num * mean - sum(own)) / (num - len(own)) for own in counted]
    factors, rewards, weight = _retrieval_factors(algorithm, paths)
    if weight:
        notes.append(f"factor = 1 + {weight:g} × the z-score of the retrieval reward in the group (RAPO).")
    terms = list(zip(scores, baselines, factors, strict=True))
    is_tied = not has_spread(np.array(population))
    values = [0.0 if is_tied else (score - baseline) / scale * factor for score, baseline, factor in terms]
    is_explained = all(
        math.isclose(value, row["advantage"], rel_tol=1e-6, abs_tol=1e-9)
        for value, row in zip(values, rows, strict=True)
    )
    if not is_explained or (not formula and not is_tied):
        why = _UNEXPLAINED.get(
            str(algorithm.get("type")), f"advantage = {kind} uses more than the group's returns"
        )
        formula, notes = "", [f"The advantages do not follow from these returns alone: {why}.", *notes]
    elif is_tied:
        notes.insert(0, "All returns are equal, so every advantage is 0.")
    explained = {}
    for row, path, reward, value, own in zip(rows, paths, rewards, values, terms, strict=True):
        extra = row["intrinsic"]
        parts = [f"R = {row['episode_return']:.4g} {extra:+.4g}"] if extra else []
        parts += [f"factor {own[2]:.4g} (retrieval reward {reward:.4g})"] if weight else []
        explained[row["rollout"]] = {
            "equation": _equation(*own, scale, value) if formula and not is_tied else "",
            "parts": " · ".join(parts).replace("-", "−"),
            "clipped": _clipped(algorithm.get("loss"), [n for n in path if n["rollout"] == row["rollout"]]),
        }
    formula = f"A = {formula}{' × factor' if weight else ''}" if formula else ""
    return {"formula": formula, "mean": mean, "std": std, "notes": notes, "rollouts": explained}


def path_to(nodes: Mapping[int, Row], node_id: int) -> list[Row]:
    """The recorded nodes from the root to ``node_id``; empty for -1."""
    path: list[Row] = []
    while node_id in nodes and len(path) < len(nodes):  # a damaged file may have a cycle
        path.insert(0, nodes[node_id])
        node_id = nodes[node_id]["parent_id"]
    return path


def _is_policy(node: Row) -> bool:
    return bool(node["origin"] == Origin.POLICY)


def _notes(algorithm: Row, rows: Sequence[Row]) -> list[str]:
    """What tokens get beyond the advantage of their rollout."""
    branch = algorithm.get("branch")
    branching = {**algorithm, **(branch if isinstance(branch, Mapping) else {})}
    notes = []
    if any(row["forked_from"] != row["rollout"] for row in rows) and "attribution" in branching:
        text = {"hard": "once, with the mean of their advantages"}
        how = text.get(branching["attribution"], "once for each of them, with its advantage")
        notes.append(f"A turn that rollouts share is trained {how}.")
    if weight := branching.get("entropy_advantage"):
        notes.append(f"Not explained: the factor 1 + {weight:g} × the z-score of its entropy of every token.")
    if algorithm.get("type") == "gigpo":
        notes.append("Not explained: the advantage of its step, which every turn has in addition.")
    return notes


def _retrieval_factors(
    algorithm: Row, paths: Sequence[Sequence[Row]]
) -> tuple[list[float], list[float], float]:
    """RAPO's factors, the retrieval rewards, and the weight, which is 0 if the run has none."""
    section = algorithm if "num_hybrid" in algorithm else algorithm.get("retrieval")
    table = section if isinstance(section, Mapping) and "num_hybrid" in section else {"num_hybrid": 0}
    names = RetrievalAdvantageSettings.model_fields.keys() & table.keys()
    settings = RetrievalAdvantageSettings(**{name: table[name] for name in names})
    if not settings.num_hybrid:
        return [1.0] * len(paths), [0.0] * len(paths), 0.0
    rewards = []
    for path in paths:
        own = [
            SimpleNamespace(origin=Origin(n["origin"]), trainable=_is_policy(n), entropies=n["entropies"])
            for n in path
        ]
        rewards.append(retrieval_reward(cast(Any, own), settings).value)
    z = group_normalized_advantages_per_rollout(returns=rewards).values.tolist()
    return [1.0 + settings.advantage_weight * value for value in z], rewards, settings.advantage_weight


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
