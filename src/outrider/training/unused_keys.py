"""Settings that have no effect because of other settings. A run and ``--dry-run`` report them."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any, Final, NamedTuple

from pydantic import BaseModel

from outrider.plugins.registry import BUILT_IN
from outrider.training.settings import RunSettings


class Need(NamedTuple):
    """``keys`` is a pattern of dotted keys, which have an effect if ``is_met``; otherwise ``reason`` says why
    not.
    """

    keys: str
    is_met: Callable[[RunSettings], Any]
    reason: str


def unused_keys(run: RunSettings) -> list[str]:
    """Return a line per reason, with the keys that have no effect and are neither at their default nor at the
    value of a preset. Sections of plug-ins, which may have keys of the same names, are left out.
    """
    own = {name for name in ("algorithm", "environment") if not _is_built_in(type(getattr(run, name)))}
    unmet = [need for need in NEEDS if need.keys.partition("\\")[0] not in own and not need.is_met(run)]
    keys_by_reason: dict[str, list[str]] = {}
    for key in _changed_keys(run, None) if unmet else ():
        need = next((need for need in unmet if re.fullmatch(need.keys, key)), None)
        if need is not None:
            keys_by_reason.setdefault(need.reason, []).append(key)
    return [f"No effect: {', '.join(keys)}: {reason}" for reason, keys in keys_by_reason.items()]


def _is_built_in(section: type) -> bool:
    return section.__module__.startswith("outrider.")


def _changed_keys(section: Any, like: Any, above: str = "") -> Iterator[str]:
    """Yield the dotted keys of a section whose values differ from ``like``: the section's default or the
    values of a preset above it. None: from the defaults of its fields.
    """
    if not _is_built_in(type(section)):
        return
    defaults: dict[str, Any]
    if is_dataclass(section):
        defaults = {field.name: field.default for field in fields(section)}
        names, preset = list(defaults), {}
    else:
        model = type(section)
        names = list(model.model_fields)
        defaults = {
            name: field.get_default(call_default_factory=True) for name, field in model.model_fields.items()
        }
        preset = getattr(model, "presets", {}).get(getattr(section, "preset", None), {})
    if like is not None:
        defaults |= like if isinstance(like, Mapping) else {name: getattr(like, name) for name in names}
    defaults |= preset
    for name in names:
        value, default = getattr(section, name), defaults.get(name)
        if isinstance(value, BaseModel) or is_dataclass(value):
            is_like = type(default) is type(value) or isinstance(default, Mapping)
            yield from _changed_keys(value, default if is_like else None, f"{above}{name}.")
        elif value != default:
            yield f"{above}{name}"


def _option(run: RunSettings, section: str, name: str, default: Any) -> Any:
    """Return a setting that only some types of the section have."""
    return getattr(getattr(run, section), name, default)


def _parts(run: RunSettings, name: str) -> Any:
    """Return a part of the exploration (retrieval, reward, branch or tips); None without it."""
    return getattr(_option(run, "algorithm", "parts", None), name, None)


def _setting(
    read: Callable[[RunSettings, str], Any], name: str, is_met: Callable[[Any], Any]
) -> Callable[[RunSettings], Any]:
    """Whether the run lacks the setting or part that ``read`` returns, or its value meets the condition."""

    def check(run: RunSettings) -> Any:
        value = read(run, name)
        return value is None or is_met(value)

    return check


_part = partial(_setting, _parts)
_algorithm = partial(_setting, lambda run, name: getattr(run.algorithm, name, None))
_environment = partial(_setting, lambda run, name: getattr(run.environment, name, None))


def _has_tool(*names: str) -> Callable[[RunSettings], bool]:
    """Whether an environment with a list of tools has one of these, or a plug-in, which may read all of its
    settings.
    """

    def check(run: RunSettings) -> bool:
        tools = _option(run, "environment", "tools", None)
        entries = [] if tools is None else [getattr(tool, "type", tool) for tool in tools]
        return tools is None or any(name in names or name not in BUILT_IN["tools"] for name in entries)

    return check


def _has_other_denominator(run: RunSettings) -> bool:
    """Whether rollouts are trained in another context than they were sampled in: without tips or help."""
    tips, distill = _parts(run, "tips"), run.algorithm.distill
    return (tips is not None and tips.memory_probability * tips.off_policy_probability > 0) or (
        distill is not None and distill.plays != "unhelped" and distill.pairs == "none"
    )


def _clips(run: RunSettings) -> bool:
    """Whether a ratio of the policy can differ from 1."""
    update, reward = run.update, _parts(run, "reward")
    several = update.num_epochs > 1 or update.num_mini_batches > 1 or update.mini_batch_samples is not None
    is_shaped = reward is not None and reward.ratio_weight > 0 and run.algorithm.retrieves
    is_late = run.cluster.max_staleness > 0
    return several or is_shaped or is_late or _has_other_denominator(run)


def _replays(run: RunSettings) -> bool:
    """Whether a step has groups that an earlier step sampled. All algorithms but one have no such setting."""
    share, num_groups = _option(run, "algorithm", "fresh_share", None), run.train.tasks_per_step
    if share is None:
        return True
    is_late = run.train.num_steps > _option(run, "algorithm", "num_fresh_steps", 0)
    return is_late and max(1, int(share * num_groups)) < num_groups


def _forks(run: RunSettings) -> bool:
    branch = _parts(run, "branch")
    if branch is None or branch.pre_monitor:
        return True
    return bool(branch.num_first(run.algorithm.group_size) < run.algorithm.group_size)


_BRANCH: Final = r"algorithm\.(branch\.)?"
_RETRIEVAL: Final = r"algorithm\.(retrieval\.)?"
_TIPS: Final = r"algorithm\.(tips\.)?"
_DISTILL: Final = r"algorithm\.distill\."

NEEDS: Final[Sequence[Need]] = (
    # sections
    Need(r"cold_start\..+", lambda run: run.cold_start.num_examples > 0, "cold_start.num_examples is 0"),
    Need(r"buffer\..+", lambda run: "buffer" not in run.unread_sections, "nothing is retrieved"),
    Need(r"buffer\.num_tasks", lambda run: run.buffer.path is None, "buffer.path names the steps"),
    Need(
        r"buffer\.(keep_best|min_reward)",
        lambda run: run.buffer.path is None or run.buffer.evolve,
        "buffer.path names the steps, and buffer.evolve is false",
    ),
    Need(r"tracking\..+", lambda run: run.trackers, "trackers is empty"),
    Need(
        r"cluster\.(ray_address|placement_timeout_s|stall_s|heartbeat_s|max_restarts)",
        lambda run: run.cluster.is_remote or run.has_ranks,
        "the run has one process: num_trainers, num_engines and num_rollout_workers are 1",
    ),
    Need(
        r"evaluation\.num_samples",
        lambda run: run.evaluation.temperature > 0,
        "evaluation.temperature is 0, so all samples of a state are the same text",
    ),
    Need(
        r"rollout\.max_splice_tokens",
        lambda run: run.algorithm.retrieves or run.cold_start.retrieve_share > 0,
        "nothing is retrieved",
    ),
    Need(r"update\.attention", lambda run: run.model.forward != "unpacked", "model.forward is unpacked"),
    # objective
    Need(r"algorithm\.kl_estimator", lambda run: run.algorithm.kl_weight > 0, "algorithm.kl_weight is 0"),
    Need(
        r"algorithm\.loss\.(clip_low|clip_high|dual_clip|keep_clipped_gradient)",
        _clips,
        "with one optimizer step per training step every ratio is 1 (update.num_mini_batches and num_epochs)",
    ),
    Need(r"algorithm\.loss\.clip_(low|high)", _algorithm("clip_own", bool), "algorithm.clip_own is false"),
    Need(
        r"algorithm\.(shaping|statistics|demonstrations)",
        _algorithm("num_demonstrations", bool),
        "algorithm.num_demonstrations is 0",
    ),
    Need(
        r"algorithm\.(estimate_rate|target|temperature)",
        _algorithm("selection", lambda value: value == "difficulty"),
        "algorithm.selection is not difficulty",
    ),
    Need(
        r"algorithm\.(fresh_share|buffer_size|num_fresh_steps|weight_cap|max_age|replayed_rollouts"
        "|replay_baseline|replay_rise_steps)",
        _replays,
        "no step replays a group (fresh_share of train.tasks_per_step, num_fresh_steps of train.num_steps)",
    ),
    Need(
        r"algorithm\.(gamma|similarity|anchor)",
        _algorithm("step_weight", bool),
        "step_weight is 0, so they change metrics only",
    ),
    Need(r"algorithm\.num_expansions", _algorithm("num_rounds", bool), "algorithm.num_rounds is 0"),
    Need(
        r"algorithm\.dynamic_sampling\.metric",
        lambda run: run.algorithm.advantage != "pass_at_k",
        "algorithm.advantage = pass_at_k reads verdicts only",
    ),
    Need(
        r"algorithm\.(old_context|student_mask|min_probability)",
        _has_other_denominator,
        "no group is sampled with tips and trained without (memory_probability, off_policy_probability)",
    ),
    Need(
        r"algorithm\.min_probability",
        _algorithm("student_mask", lambda value: value != "none"),
        "algorithm.student_mask is none",
    ),
    # retrieval
    Need(
        rf"{_RETRIEVAL}(probability|final_probability|schedule|schedule_steps|scope|include_terminal|noise|mode"
        "|level|form|min_similarity|advantage_weight|ratio_weight|quality|timing|sign)",
        lambda run: _parts(run, "retrieval") is None or run.algorithm.retrieves,
        "nothing is retrieved",
    ),
    Need(
        rf"{_RETRIEVAL}(quality|timing|sign)",
        _part("reward", lambda part: part.advantage_weight > 0),
        "advantage_weight is 0, so they change metrics only",
    ),
    Need(
        r"algorithm\.retrieval\.min_similarity",
        lambda run: (
            getattr(_parts(run, "retrieval"), "noise", 0) < 1
            or _option(run, "algorithm", "has_steps_as_help", False)
        ),
        "retrieval.noise is 1, and random steps have no minimum",
    ),
    # branching
    Need(
        rf"{_BRANCH}(num_children|window|base_probability|entropy_weight|decision|threshold|source|reduce"
        "|normalizer|branch_penalty|penalty_scope|attribution)",
        _forks,
        "first_wave is group_size, so no rollout is left to fork",
    ),
    Need(
        rf"{_BRANCH}first_wave",
        _part("branch", lambda part: not part.pre_monitor),
        "pre_monitor decides the number of complete rollouts from the entropies of the first",
    ),
    Need(
        rf"{_BRANCH}threshold",
        _part("branch", lambda part: part.decision == "threshold"),
        "decision is not threshold",
    ),
    Need(
        rf"{_BRANCH}penalty_scope",
        _part("branch", lambda part: part.branch_penalty > 0),
        "branch_penalty is 0",
    ),
    Need(rf"{_BRANCH}source", _part("branch", lambda part: part.entropy_weight > 0), "entropy_weight is 0"),
    Need(
        rf"{_BRANCH}(window|reduce|normalizer)",
        _part("branch", lambda part: part.entropy_weight > 0 or part.pre_monitor),
        "entropy_weight is 0",
    ),
    # tips
    Need(rf"{_TIPS}rnd(\..+)?", _part("tips", lambda part: part.novelty == "rnd"), "novelty is not rnd"),
    Need(
        rf"{_TIPS}novelty_threshold",
        _part("tips", lambda part: part.novelty == "count"),
        "novelty is not count",
    ),
    Need(
        rf"{_TIPS}(novelty|novelty_threshold|rnd(\..+)?|intrinsic_where_tied)",
        _part("tips", lambda part: part.intrinsic_coefficient > 0),
        "intrinsic_coefficient is 0",
    ),
    Need(
        rf"{_TIPS}(memory\.(?!embedder).+|off_policy_probability)",
        lambda run: (
            _part("tips", lambda part: part.memory_probability > 0)(run)
            or _option(run, "algorithm", "has_tips_as_help", False)
            or (run.cold_start.num_examples and run.cold_start.tip_share)
        ),
        "memory_probability is 0, so no rollout is shown a tip",
    ),
    # self-distillation
    Need(rf"{_DISTILL}gate_beta", _algorithm("distill", lambda part: part.gate != "none"), "gate is none"),
    Need(
        rf"{_DISTILL}teacher_rate",
        _algorithm("distill", lambda part: part.teacher == "ema"),
        "teacher is not ema",
    ),
    Need(
        rf"{_DISTILL}exclude_own_group",
        _algorithm("distill", lambda part: "tips" in part.help and part.plays != "helped"),
        "no teacher reads tips that rollouts did not see",
    ),
    Need(
        rf"{_DISTILL}max_help_tokens",
        lambda run: (
            run.algorithm.tip_memory is None
            or _algorithm("distill", lambda part: part.plays != "helped")(run)
        ),
        "rollouts are sampled with tips, whose limits are those of memory",
    ),
    Need(rf"{_DISTILL}tail", _algorithm("distill", lambda part: part.support != "all"), "support is all"),
    Need(
        rf"{_DISTILL}template",
        _algorithm("distill", lambda part: part.help != ("tips",)),
        "tips alone are shown as rollouts see them",
    ),
    # environments
    Need(
        r"environment\.reward\.(format_penalty|multi_tool_bonus|answer)",
        _environment("reward", lambda reward: getattr(reward, "function", None) is None),
        "reward.function replaces it",
    ),
    Need(r"environment\.search\..+", _has_tool("search"), "tools has no search"),
    Need(r"environment\.python\..+", _has_tool("python"), "tools has no python"),
    Need(r"environment\.pages", _has_tool("browser"), "tools has no browser"),
    Need(r"environment\.corpus", _has_tool("search", "browser"), "tools has neither search nor browser"),
    Need(
        r"environment\.(max_calls|max_batch_calls|repeated)",
        _environment("tools", bool),
        "environment.tools is empty",
    ),
    Need(
        r"environment\.prompt",
        _environment("system_prompt", lambda value: False),
        "environment.system_prompt replaces it",
    ),
    Need(
        r"environment\.num_shown_actions",
        lambda run: (
            _option(run, "environment", "needs_commands", False)
            or _option(run, "environment", "show_admissible", False)
            or _option(run, "environment", "show_valid_actions", False)
        ),
        "no list of actions is shown",
    ),
    Need(
        r"environment\.game_seed",
        lambda run: _option(run, "environment", "data", None) is None,
        "environment.data names the games",
    ),
    Need(
        r"environment\.success_at",
        lambda run: _option(run, "environment", "success_key", None) is None,
        "environment.success_key decides",
    ),
    *(
        Need(
            rf"environment\.{split}\.hub_(split|config)",
            _environment(split, lambda data: getattr(data, "path", None) is None),
            f"environment.{split}.path is a file",
        )
        for split in ("train", "valid", "test")
    ),
)
