"""Settings of self-distillation with privileged context: the policy scores its own tokens in a second
context, with or without help (tips, a sibling's success, feedback, a demonstration), and learns from the
difference. The formulas are in :mod:`outrider.algorithms.distill_losses`.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Literal, Self

from pydantic import Field, model_validator

from outrider.algorithms.presets import with_preset
from outrider.config import Settings

if TYPE_CHECKING:
    from outrider.training.settings import RunSettings

Form = Literal[
    "ratio", "divergence", "reverse_kl", "likelihood", "k3_ratio", "advantage_add", "advantage_scale"
]
HelpSource = Literal["tips", "retrieved", "sibling", "feedback", "demonstration", "file"]
_SAMPLED_ON_POLICY: Final = ("reverse_kl", "k3_ratio", "advantage_add", "advantage_scale")
_WITHOUT_WEIGHT: Final = ("ratio", "advantage_scale")
_WITHOUT_TERM: Final = ("ratio", "advantage_add", "advantage_scale")
_OF_THE_TERM: Final[Mapping[str, tuple[Form, ...]]] = {
    "gate": ("divergence", "reverse_kl", "likelihood", "k3_ratio"),
    "over": ("divergence", "reverse_kl", "likelihood", "k3_ratio"),
    "step_ratio_cap": ("divergence", "reverse_kl", "likelihood"),
    "max_gap": ("reverse_kl", "advantage_add"),
    "discount": ("reverse_kl", "advantage_add"),
}
"""Keys with the forms that read them."""

DISTILL_PRESETS: Mapping[str, Mapping[str, Any]] = {
    "none": {},
    "opsd": {
        "help": ["demonstration"], "alpha": 0.5, "support": "all", "teacher": "frozen", "policy_weight": 0.0,
    },
    "sdft": {
        "help": ["demonstration"], "support": "all", "skip_first": 3, "teacher": "ema", "teacher_rate": 0.02,
        "policy_weight": 0.0,
    },
    "sdpo": {
        "help": ["sibling"], "alpha": 0.5, "support": 100, "teacher": "ema", "step_ratio_cap": 2.0,
        "policy_weight": 0.0, "policy_outside": 0.0, "threshold": 0.5,
    },
    "sdar-released": {
        "help": ["file"], "form": "likelihood", "gate": "gap", "gate_beta": 5.0, "weight": 0.01,
    },
    "rlsd": {"help": ["feedback"], "form": "advantage_scale"},
    "opid": {"help": ["feedback"], "form": "advantage_add", "weight": 0.001},
    "skill-sd": {"help": ["file"], "form": "k3_ratio", "weight": 0.1},
    "ucob": {
        "help": ["file"], "plays": "both", "pairs": "anchor", "support": 32, "tail": False, "gate": "gap",
        "weight": 0.1,
    },
}  # fmt: skip
"""Published methods as settings; what differs from the released code is on docs/algorithms/distill.md."""


class DistillSettings(Settings):
    """A term of the loss that pulls the policy towards itself with help, or the use of the difference in the
    advantages.

    ``preset``: the values of a published method, which other keys override. ``help``: what the helped context
    contains, in this order, as much as fits. ``plays``: the context in which rollouts are sampled; with
    ``both``, a share ``helped_share`` of the groups has help. ``form``: the use of the difference. ``weight``
    is that of the term, ``policy_weight`` that of the policy term of rollouts with help, and
    ``policy_outside`` that of rollouts without help or outside of ``where``. ``alpha`` of the divergence: 0
    is KL(teacher, student), 1 KL(student, teacher), values between are the generalised Jensen-Shannon
    divergence. ``support``: the teacher's most likely tokens, or all; ``tail``: the other tokens are one more
    token, otherwise the support is renormalised. ``gate``: weight sigma(``gate_beta`` gap) per token, or less
    its mean over the mini-batch. ``over``: the mean is over all tokens of rollouts with help (also tokens
    before the help), or over all trained tokens. ``skip_first``: tokens of every turn that have no term.
    ``max_gap`` bounds gaps of sampled tokens, ``step_ratio_cap`` the ratio to the policy at the start of the
    update. ``discount`` sums the later gaps of a rollout. ``scale``, ``scale_band`` and ``scale_steps``, the
    training steps in which ``scale`` falls to 0, belong to ``advantage_scale``. ``teacher``: the policy at
    the start of the step, a moving average with ``teacher_rate``, or the policy at the start of the run.
    ``threshold``: return of a sibling that counts as a success. ``path``: JSON lines with ``text`` and
    ``task`` or ``match``. ``place``: help is at the end of the first user message, or of the message before
    every turn. ``template`` is the text around ``{help}``; tips alone look as in rollouts that see them.
    ``max_help_tokens``: help that is longer loses whole tips, steps or lines, the oldest first.
    ``exclude_own_group``: tips of a group's own episodes are not among its help.
    """

    input_paths: ClassVar[frozenset[str]] = frozenset({"path"})

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = DISTILL_PRESETS

    preset: Literal["none", "opsd", "sdft", "sdpo", "sdar-released", "rlsd", "opid", "skill-sd", "ucob"] = (
        "none"
    )
    help: tuple[HelpSource, ...] = ("tips",)
    plays: Literal["unhelped", "helped", "both"] = "unhelped"
    helped_share: float = Field(0.5, gt=0, lt=1)
    form: Form = "divergence"
    weight: float = Field(1.0, ge=0)
    policy_weight: float = Field(1.0, ge=0)
    policy_outside: float = Field(1.0, ge=0)
    alpha: float = Field(0.0, ge=0, le=1)
    support: Literal["all"] | Annotated[int, Field(ge=1)] = 64
    tail: bool = True
    gate: Literal["none", "gap", "gap_centered"] = "none"
    gate_beta: float = Field(5.0, ge=0)
    where: Literal["all", "failed", "succeeded"] = "all"
    over: Literal["own", "all"] = "own"
    skip_first: int = Field(0, ge=0)
    max_gap: float | None = Field(None, gt=0)
    step_ratio_cap: float | None = Field(None, ge=1)
    discount: float = Field(0.0, ge=0, le=1)
    scale: float = Field(0.5, ge=0, le=1)
    scale_band: float = Field(0.2, gt=0, lt=1)
    scale_steps: int = Field(50, ge=1)
    teacher: Literal["start", "ema", "frozen"] = "start"
    teacher_rate: float = Field(0.05, gt=0, le=1)
    place: Literal["first", "turn"] = "first"
    template: str = "What is known here:\n{help}"
    max_help_tokens: int = Field(256, ge=1)
    exclude_own_group: bool = True
    threshold: float = 1.0
    path: str | None = None
    pairs: Literal["none", "anchor"] = "none"
    """With ``anchor``, the turn with the highest return among those of a group that acted on the same
    observation teaches the context that it was not sampled in (UCOB, arXiv 2606.29502). Part of every group
    is then sampled with help, and the policy term trains all rollouts in the context of their sampling.
    """
    pair_margin: float = Field(0.05, ge=0)
    """Difference of returns to the turns that are compared, up to which a turn teaches nothing."""
    pair_scale: float = Field(0.2, gt=0)
    """Difference of returns that has weight 1."""
    pair_cap: float = Field(2.0, gt=0)
    """Largest weight of a difference."""
    max_pairs: int = Field(2, ge=1)
    """Most differences of an observation, the largest ones; their weights are added."""
    pair_gamma: float = Field(0.95, ge=0, le=1)
    """Discount of the returns per turn."""

    @model_validator(mode="before")
    @classmethod
    def _apply_preset(cls, data: Any) -> Any:
        if isinstance(data, Mapping) and isinstance(data.get("help"), str):
            data = {**data, "help": [data["help"]]}
        settings = with_preset(DISTILL_PRESETS, data, default="none")
        if isinstance(settings, dict) and settings.get("form", "divergence") != "divergence":
            # With another form, what the preset says about its divergence does not apply.
            for key in {"alpha", "support", "tail"} - data.keys():
                settings.pop(key, None)
        return settings

    @model_validator(mode="after")
    def _validate(self) -> Self:
        defaults = {name: field.default for name, field in type(self).model_fields.items()}
        changed = {name for name, default in defaults.items() if getattr(self, name) != default}
        if self.weight == 0.0 and self.form not in _WITHOUT_WEIGHT:
            raise ValueError("distill.weight is 0: remove the section")
        if self.form != "divergence" and (keys := sorted(changed & {"alpha", "support", "tail"})):
            raise ValueError(
                f"distill.{keys[0]} belongs to form = divergence: sampled tokens give KL(student, teacher) "
                "only"
            )
        if self.form != "advantage_scale" and (
            keys := sorted(changed & {"scale", "scale_band", "scale_steps"})
        ):
            raise ValueError(f"distill.{keys[0]} belongs to form = advantage_scale")
        for key, forms in _OF_THE_TERM.items():
            if key in changed and self.form not in forms and self.form != "ratio":
                raise ValueError(f"distill.{key} belongs to form = {', '.join(forms[:-1])} or {forms[-1]}")
        if self.form == "advantage_scale" and "weight" in changed:
            raise ValueError("distill.weight has no effect on form = advantage_scale: set scale")
        if self.form in ("advantage_add", "advantage_scale") and self.policy_weight == 0.0:
            raise ValueError(
                f"distill.policy_weight = 0 with form = {self.form}: the gaps are part of the policy term, "
                "so nothing would be learned from them"
            )
        if self.form in _SAMPLED_ON_POLICY and self.plays != "unhelped":
            raise ValueError(
                f"form = {self.form} samples the context that is trained: rollouts of the other one need "
                "form = divergence (alpha = 1), likelihood or ratio"
            )
        if self.form == "ratio":
            self._validate_ratio(changed)
        if self.plays != "unhelped" and "retrieved" in self.help:
            raise ValueError(
                "distill.help = retrieved is for the teacher of rollouts without help, because rollouts that "
                "retrieve are trained with what they saw: set plays = unhelped"
            )
        if self.plays != "unhelped" and (late := {"sibling", "feedback"} & set(self.help)):
            raise ValueError(
                f"distill.help = {sorted(late)[0]}: what a group ends with cannot be shown before it is "
                "played"
            )
        if self.support == 1 and not self.tail:
            raise ValueError(
                "distill.support = 1 with tail = false: one token, renormalised, has probability 1 in both "
                "contexts, so the term is 0"
            )
        if self.gate != "none" and self.gate_beta == 0.0:
            raise ValueError("distill.gate_beta = 0: the gate is 1/2 for every token and contains no teacher")
        if self.gate == "gap_centered" and self.form == "divergence":
            raise ValueError(
                "distill.gate = gap_centered can be negative, and a divergence would then be pushed up"
            )
        if (
            self.form == "likelihood"
            and self.gate == "none"
            and self.plays != "helped"
            and self.where != "succeeded"
        ):
            raise ValueError(
                "form = likelihood of rollouts without help contains no teacher: set a gate, "
                "where = succeeded, or plays = helped"
            )
        if ("file" in self.help) != (self.path is not None):
            raise ValueError("distill.path belongs to help = file")
        if len(set(self.help)) != len(self.help) or not self.help:
            raise ValueError("distill.help names each source once, and at least one")
        if "{help}" not in self.template:
            raise ValueError("distill.template needs the mark {help}, where the texts are put")
        if "helped_share" in changed and self.plays != "both":
            raise ValueError("distill.helped_share belongs to plays = both")
        if self.pairs == "none" and (
            keys := sorted(key for key in changed if "pair_" in key or key == "max_pairs")
        ):
            raise ValueError(f"distill.{keys[0]} belongs to pairs = anchor")
        if self.pairs != "none":
            self._validate_pairs()
        if "threshold" in changed and "sibling" not in self.help:
            raise ValueError("distill.threshold belongs to help = sibling")
        return self

    def _validate_pairs(self) -> None:
        if self.plays != "both":
            raise ValueError(
                "distill.pairs = anchor compares rollouts with and without help: set plays = both"
            )
        if self.form not in ("divergence", "likelihood") or self.where != "all":
            raise ValueError("distill.pairs = anchor needs form = divergence or likelihood, and where = all")
        if self.policy_weight != 1.0:
            raise ValueError(
                "distill.policy_weight has no effect with pairs = anchor, whose term is that of added turns: "
                "set policy_outside, the weight of the policy term of all rollouts"
            )

    def _validate_ratio(self, changed: set[str]) -> None:
        if self.plays != "helped":
            raise ValueError(
                "rollouts played in the context that is trained have ratio 1: form = ratio needs plays = "
                "helped"
            )
        if self.teacher != "start":
            raise ValueError(
                "the denominator of a ratio is the policy that acted: distill.teacher belongs to the other "
                "forms"
            )
        if self.help != ("tips",) or changed - {"form", "plays"}:
            raise ValueError("form = ratio is EMPO2's update: it takes help = tips and no other key")

    def validate_run(self, run: "RunSettings") -> None:
        """Check the settings of the algorithm and the other sections.

        Raises:
            ValueError: if one is incompatible; the message has its dotted key and what to do.
        """
        algorithm = run.algorithm
        has_tips = algorithm.tip_memory is not None
        if "tips" in self.help and not has_tips:
            raise ValueError(
                "algorithm.distill.help = tips, and nothing writes tips: add [algorithm.tips] (type = "
                "combined) or set algorithm.type = empo2"
            )
        if "retrieved" in self.help and algorithm.executes_retrieved:
            raise ValueError(
                "algorithm.distill.help = retrieved with retrieval.mode = execute: executed steps are part "
                "of the episode; set retrieval.mode = context"
            )
        if "retrieved" in self.help and not algorithm.retrieves:
            raise ValueError(
                "algorithm.distill.help = retrieved, and nothing retrieves: add [algorithm.retrieval] (type "
                "= combined) or set algorithm.type = rapo"
            )
        if has_tips and self.plays != "unhelped" and self.help != ("tips",):
            raise ValueError(
                f"algorithm.distill.plays = {self.plays}: in a run with tips, rollouts are sampled with tips "
                "only: set help = tips, or plays = unhelped"
            )
        if has_tips and self.plays == "helped" and self.place != "first":
            raise ValueError(
                "algorithm.distill.place has no effect with plays = helped in a run with tips, which shows "
                "them before every turn: remove it"
            )
        if has_tips and self.plays == "both" and self.helped_share != 0.5:
            raise ValueError(
                "algorithm.distill.helped_share: in a run with tips, memory_probability and "
                "off_policy_probability are the shares"
            )
        if self.pairs != "none" and (has_tips or algorithm.forks_by_replay):
            raise ValueError(
                "algorithm.distill.pairs = anchor needs an algorithm without tips and forks, for example "
                "algorithm.type = grpo"
            )
        if "sibling" in self.help and algorithm.group_size == 1:
            raise ValueError(
                "algorithm.distill.help = sibling with algorithm.group_size = 1: no rollout has a sibling; "
                "set group_size above 1"
            )
        if "demonstration" in self.help and not run.environment.has_experts:
            raise ValueError(
                "algorithm.distill.help = demonstration needs experts, and the tasks of environment.type = "
                f"{run.environment.type} have none: write the demonstrations to a file (help = file, path)"
            )
        if run.model.history_thinking == "strip":
            raise ValueError(
                "algorithm.distill needs model.history_thinking = keep: conversations that are rendered "
                "again before every turn are not supported yet"
            )
        if self.policy_weight == 0.0 and algorithm.drops_groups:
            raise ValueError(
                "algorithm.distill.policy_weight = 0 with dynamic_sampling: groups are selected for their "
                "advantages, which nothing uses; remove dynamic_sampling"
            )
        if algorithm.loss.type == "reinforce" and self.plays != "unhelped" and self.policy_weight:
            raise ValueError(
                f"algorithm.distill.plays = {self.plays} with loss.type = reinforce: rollouts that are "
                "sampled with help and trained without it need a ratio, or policy_weight = 0"
            )
        if self.teacher == "ema" and run.model.lora is not None:
            raise ValueError(
                "algorithm.distill.teacher = ema with model.lora: the mean of two factors is not the mean of "
                "their product: set teacher = start or frozen"
            )
        if algorithm.loss.type == "gspo" and self.form in ("advantage_add", "advantage_scale"):
            raise ValueError(
                f"algorithm.distill.form = {self.form} with loss.type = gspo: one ratio per rollout has no "
                "advantage per token"
            )

    @property
    def needs_reference(self) -> bool:
        """Whether the teacher is the policy at the start of the run."""
        return self.teacher == "frozen"

    @property
    def has_term(self) -> bool:
        """Whether the loss has a term of its own."""
        return self.form not in _WITHOUT_TERM

    @property
    def needs_gradient_without_advantage(self) -> bool:
        """Whether rollouts with help have a gradient even if their advantages are 0."""
        return self.form not in ("ratio", "advantage_scale")
