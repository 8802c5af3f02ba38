"""The methods that benchmarks.learning compares, as data: to add a method, add a line to one of the two
lists.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Final

from outrider.types import Json

BASELINE: Final = "grpo"  # the reference of comparisons
REFERENCE: Final = "rapo"  # its policy tokens are the budget of all methods if no number is given
IMITATION: Final = "sft"  # the cold start alone

TABLE: Final = "its policy is a table, which neither reads nor writes tips"


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """``key`` names files, ``name`` is displayed in tables. ``algorithm`` is ``[algorithm]`` of the recipe
    without the shared settings.

    All methods of a task share its objective (group size, clip, aggregation), so that they differ in their
    own features only. With ``own_objective``, the objective is the feature, and only the group size is
    shared. ``undefined`` maps toys on which the method has no meaning to the reason.
    """

    key: str
    name: str
    algorithm: Mapping[str, Json]
    own_objective: bool = False
    undefined: Mapping[str, str] = field(default_factory=dict)

    def table(self, shared: Mapping[str, Json]) -> dict[str, Json]:
        """Return the complete ``[algorithm]`` table of a task with this shared objective."""
        kept = {"group_size": shared["group_size"]} if self.own_objective else dict(shared)
        table = kept | dict(self.algorithm)
        bounds, own = kept.get("loss"), self.algorithm.get("loss")
        if isinstance(bounds, dict) and isinstance(own, dict):
            table["loss"] = bounds | own  # for example, its own dual clip with the shared bounds
        return table


def methods(group_size: int, max_length: int) -> tuple[Method, ...]:
    """Return the methods for groups of ``group_size`` rollouts of at most ``max_length`` policy tokens, the
    same on every task.

    A quarter of ARPO's rollouts start at the prompt on the toys as in their tests, half on the Factbook as in
    the paper: see :func:`toy_methods` and :func:`factbook_methods`.
    """
    constant: dict[str, Json] = {"aggregation": "constant_length", "max_length": max_length}
    return (
        Method(key=BASELINE, name="GRPO", algorithm={"type": "grpo"}),
        Method(
            key="dr-grpo",
            name="Dr. GRPO",
            algorithm={"type": "grpo", "advantage": "group_centered", **constant},
            own_objective=True,
        ),
        Method(
            key="dapo-loss",
            name="DAPO's loss",
            algorithm={
                "type": "grpo",
                "loss": {"clip_low": 0.2, "clip_high": 0.28},
                "aggregation": "token_mean",
            },
            own_objective=True,
        ),
        Method(key="gigpo", name="GiGPO", algorithm={"type": "gigpo"}),
        Method(key=IMITATION, name="imitation alone", algorithm={"type": "grpo"}),
    )


def toy_methods(group_size: int, max_length: int) -> tuple[Method, ...]:
    """Return every method of the toy suite. Simulators have state, so RAPO executes retrieved steps; three
    quarters of the rollouts are hybrid.
    """
    fork: dict[str, Json] = {"type": "arpo", "first_wave": group_size // 4, "num_children": 3, "window": 1}
    threshold: dict[str, Json] = {"decision": "threshold", "threshold": 0.55}
    memory: dict[str, Json] = {
        "embedder": "hash", "num_shown": 4, "max_tip_tokens": 8, "max_shown_tokens": 240,
        "max_prompt_tokens": 2600
    }  # fmt: skip
    tips: dict[str, Json] = {
        "type": "empo2",
        "memory_probability": 0.75,
        "intrinsic_coefficient": 0.0,
        "memory": memory,
    }
    novelty: dict[str, Json] = {"type": "empo2", "memory_probability": 0.0, "memory": {"embedder": "hash"}}
    return (
        *methods(group_size, max_length),
        Method(key=REFERENCE, name="RAPO", algorithm=_rapo(group_size)),
        Method(key="arpo", name="ARPO", algorithm=fork),
        Method(key="arpo-threshold", name="ARPO, threshold rule", algorithm=fork | threshold),
        Method(key="aepo", name="AEPO", algorithm=fork | {"preset": "aepo"}),
        Method(key="empo2", name="EMPO²", algorithm=tips, undefined={"lock": TABLE, "corridor": TABLE}),
        Method(key="luffy", name="LUFFY", algorithm={"type": "luffy"}, own_objective=True),
        Method(key="novelty", name="EMPO²'s novelty reward alone", algorithm=novelty),
    )


def rapo_ablations(group_size: int, max_length: int) -> tuple[Method, ...]:
    """RAPO's own ablations (arXiv 2603.03078, section 4): each part off, noise rates, and the share of hybrid
    rollouts.
    """
    shares = [Method(key=f"rapo-hybrid-{n}", name=f"RAPO, {n} of {group_size} hybrid",
                     algorithm=_rapo(group_size, num_hybrid=n))
              for n in (group_size // 4, group_size // 2, group_size)]  # fmt: skip
    noises = [Method(key=f"rapo-noise-{100 * rate:.0f}", name=f"RAPO, noise {rate}",
                     algorithm=_rapo(group_size, noise=rate))
              for rate in (0.25, 0.5, 1.0)]  # fmt: skip
    without = {
        "rapo-no-reward": ("RAPO, no retrieval reward (a = 0)", {"advantage_weight": 0.0}),
        "rapo-no-shaping": ("RAPO, no importance shaping (m = 0)", {"ratio_weight": 0.0}),
        "rapo-neither": ("RAPO, neither (a = m = 0)", {"advantage_weight": 0.0, "ratio_weight": 0.0}),
    }
    parts = [
        Method(key=key, name=name, algorithm=_rapo(group_size) | off) for key, (name, off) in without.items()
    ]
    return (*parts, *noises, *shares)


def expedition_methods(group_size: int, max_length: int) -> tuple[Method, ...]:
    """Return GRPO, RAPO and EMPO² alone, and RAPO and EMPO² in one run.

    Half of the turns are retrieved, and only in the state in which they were recorded: in every second
    rewarded rollout, the policy itself opens a lock, and nothing is retrieved where no expert continued.
    """
    every = {method.key: method for method in toy_methods(group_size, max_length)}
    retrieval: dict[str, Json] = {"mode": "execute", "probability": 0.5, "min_similarity": 0.9}
    hybrid = 3 * group_size // 4
    tips = {key: value for key, value in every["empo2"].algorithm.items() if key != "type"}
    both: dict[str, Json] = {
        "type": "combined",
        "retrieval": retrieval | {"num_hybrid": hybrid},
        "tips": tips,
    }
    return (
        every[BASELINE],
        Method(
            key=REFERENCE,
            name="RAPO",
            algorithm={"type": "rapo", "num_hybrid": hybrid, "retrieval": retrieval},
        ),
        every["empo2"],
        Method(key="rapo-empo2", name="RAPO and EMPO²", algorithm=both),
    )


def quest_methods(group_size: int, max_length: int) -> tuple[Method, ...]:
    """Return GRPO, and RAPO, ARPO and EMPO² alone, in pairs and together.

    The first rollouts of a group open the lock themselves, the others may retrieve. Rollouts fork if the
    entropy is above half of its maximum. Without branches, a group of 128 complete rollouts exceeds the
    budget, so the pair without branches also runs with groups of 12.
    """
    sections: dict[str, dict[str, Json]] = {
        "RAPO": {"retrieval": {
            "num_hybrid": group_size - 1, "mode": "execute", "probability": 1.0, "min_similarity": 0.995,
        }},
        "ARPO": {"branch": {
            "first_wave": 2, "num_children": group_size, "window": 1, "base_probability": 0.0,
            "entropy_weight": 1.0, "decision": "threshold", "threshold": 0.5,
        }},
        "EMPO²": {"tips": {
            "memory_probability": 1.0, "intrinsic_coefficient": 0.0,
            "memory": {
                "embedder": "hash", "num_shown": 1, "min_similarity": 0.9, "max_tip_tokens": 8,
                "max_shown_tokens": 100, "max_prompt_tokens": 500,
            },
        }},
    }  # fmt: skip
    made = [Method(key=BASELINE, name="GRPO", algorithm={"type": "grpo"})]
    for size in (1, 2, 3):
        for names in combinations(sections, size):
            table: dict[str, Json] = {"type": "combined", "student_mask": "none"}
            for name in names:
                table |= sections[name]
            key = "-".join(names).lower().replace("²", "2")
            made.append(Method(key=key, name=_listed(names), algorithm=table))
    pair = next(method for method in made if method.key == "rapo-empo2")
    retrieval: dict[str, Json] = {**sections["RAPO"]["retrieval"], "num_hybrid": 11}  # type: ignore[dict-item]
    small = {**pair.algorithm, "group_size": 12, "retrieval": retrieval}
    made.append(Method(key="rapo-empo2-12", name=f"{pair.name}, groups of 12", algorithm=small))
    return tuple(made)


def _listed(names: Sequence[str]) -> str:
    return " and ".join([*([", ".join(names[:-1])] if names[:-1] else []), names[-1]])


@dataclass(frozen=True, slots=True, kw_only=True)
class Suite:
    """The methods of a toy: ``shared`` is the common objective, ``made`` creates methods from the group size
    and the longest rollout in turns.
    """

    shared: Mapping[str, Json]
    made: tuple[Callable[[int, int], tuple[Method, ...]], ...]

    def methods(self, max_length: int) -> tuple[Method, ...]:
        """The toy's methods, then its ablations."""
        size = int(str(self.shared["group_size"]))
        return tuple(method for make in self.made for method in make(size, max_length))


_TWELVE: Final[Mapping[str, Json]] = {
    "group_size": 12, "loss": {"clip_low": 0.28, "clip_high": 0.28, "dual_clip": None},
    "aggregation": "sequence_mean_token_mean",
}  # fmt: skip
_EIGHT: Final[Mapping[str, Json]] = {
    "group_size": 8, "loss": {"clip_low": 0.2, "clip_high": 0.3, "dual_clip": 10.0},
    "aggregation": "token_mean",
}  # fmt: skip
# by the toys' names; here and not beside the toys: names of methods are wanted where torch is not
TOY_SUITES: Final[Mapping[str, Suite]] = {
    "lock": Suite(shared=_TWELVE, made=(toy_methods, rapo_ablations)),
    "corridor": Suite(shared=_TWELVE, made=(toy_methods,)),
    "hidden": Suite(shared=_EIGHT, made=(toy_methods,)),
    "expedition": Suite(shared={**_TWELVE, "aggregation": "token_mean"}, made=(expedition_methods,)),
    "quest": Suite(shared={**_TWELVE, "group_size": 128, "aggregation": "token_mean"}, made=(quest_methods,)),
}


def factbook_methods(
    group_size: int, max_length: int, *, own: Mapping[str, Json] | None = None
) -> tuple[Method, ...]:
    """Return every method of the Factbook task, with the settings of the papers scaled to the group size of
    the recipe.

    ``own`` is ``[algorithm]`` of the recipe without the shared objective. If it is RAPO or EMPO², it defines
    the settings of that method.
    """
    mine: dict[str, Json] = dict(own or {})
    halved: dict[str, Json] = {"type": "rapo", "num_hybrid": group_size // 2}
    rapo = mine if mine.get("type") == "rapo" else halved
    retrieval = dict(rapo.get("retrieval", {}))  # type: ignore[arg-type]
    fork: dict[str, Json] = {"type": "arpo", "first_wave": group_size // 2}
    # Tips of all questions: a run is too short to see a question twice, and its own tips would never be read.
    tips: dict[str, Json] = {"scope": "all", "rank": "similarity"}
    lengths: dict[str, Json] = {
        "num_shown": 4,
        "max_tip_tokens": 24,
        "max_shown_tokens": 128,
        "max_prompt_tokens": 384,
    }
    empo2: dict[str, Json] = {"type": "empo2", "memory_probability": 0.5, "memory": tips | lengths}
    if mine.get("type") == "empo2":
        empo2 = mine
    return (
        *methods(group_size, max_length),
        Method(key=REFERENCE, name="RAPO", algorithm=rapo),
        Method(key="arpo", name="ARPO", algorithm=fork),
        Method(key="arpo-threshold", name="ARPO, threshold rule", algorithm=fork | {"decision": "threshold"}),
        Method(
            key="arpo-released",
            name="ARPO, released rule",
            algorithm=fork | {"preset": "arpo-released", "loss": {"dual_clip": 3.0}},
        ),
        Method(key="aepo", name="AEPO", algorithm=fork | {"preset": "aepo"}),
        Method(key="empo2", name="EMPO²", algorithm=empo2),
        # The z-score makes the novelty reward of a group that otherwise ties as large as a success; here such
        # a group trains nothing.
        Method(
            key="empo2-centered",
            name="EMPO², for small models",
            algorithm=empo2 | {"preset": "empo2-centered"},
        ),
        Method(
            key="dapo", name="DAPO", algorithm={"type": "grpo", "preset": "dapo-paper"}, own_objective=True
        ),
        Method(key="luffy", name="LUFFY", algorithm={"type": "luffy"}, own_objective=True),
        Method(
            key="rapo-others",
            name="RAPO, experts of other tasks",
            algorithm=rapo | {"retrieval": {**retrieval, "scope": "other_tasks"}},
        ),
        Method(
            key="rapo-noise-25",
            name="RAPO, noise 0.25",
            algorithm=rapo | {"retrieval": {**retrieval, "noise": 0.25}},
        ),
        # A run is too short to see a task twice, so its first guided group has a prefix, too.
        Method(key="prefix", name="expert prefixes", algorithm={"type": "grpo", "prefix": {"start": 0.5}}),
    )


def _rapo(group_size: int, *, num_hybrid: int | None = None, noise: float = 0.0) -> dict[str, Json]:
    hybrid = 3 * group_size // 4 if num_hybrid is None else num_hybrid
    return {"type": "rapo", "num_hybrid": hybrid, "retrieval": {"mode": "execute", "noise": noise}}
