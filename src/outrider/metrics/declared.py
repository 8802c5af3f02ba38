"""Name, unit, meaning, healthy range and what to look at when a value leaves it (RAPO: arXiv 2603.03078;
entropies in nats).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from outrider.errors import ConfigError, OutriderError
from outrider.types import Outcome


class UndeclaredMetric(OutriderError, KeyError):
    """A metric was logged under a name that no declaration has."""

    def __str__(self) -> str:
        return str(self.args[0])  # KeyError would print the repr


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One declared metric.

    ``name`` is ``group/rest``; its last part may be a placeholder in braces that stands for any name without
    a slash. ``unit`` is ``1`` for a pure number or a share; ``healthy`` is words, not a bound that code
    tests.
    """

    name: str
    unit: str
    meaning: str
    healthy: str
    look_at: str

    @property
    def group(self) -> str:
        """The part of the name before the first slash."""
        return self.name.split("/", 1)[0]


def _group(prefix: str, *rows: tuple[str, str, str, str, str]) -> tuple[Metric, ...]:
    return tuple(
        Metric(name=f"{prefix}/{name}", unit=unit, meaning=meaning, healthy=healthy, look_at=look_at)
        for name, unit, meaning, healthy, look_at in rows
    )


def _outcome_row(outcome: Outcome) -> tuple[str, str, str, str, str]:
    healthy = "most rollouts" if outcome is Outcome.FINISHED else "0 or rare"
    look_at = (
        "the tool, simulator or engine: faults never count as reward"
        if outcome.is_fault
        else "the sample rollouts in the report"
    )
    return (
        f"num_{outcome.value}",
        "rollouts",
        f"rollouts of this step that ended as `{outcome.value}`",
        healthy,
        look_at,
    )


# all that the policy wrote in a step
WRITTEN_TOKENS: Final = ("tokens/policy", "tokens/remarks", "tokens/discarded")

# fmt: off
DECLARED: tuple[Metric, ...] = (
    *_group(
        "reward",
        ("mean", "reward", "mean episode return over the rollouts of the step, faults left out",
         "rises slowly, noisy", "group/fraction_without_signal, then the evaluation curve"),
        ("std", "reward", "standard deviation of the episode return over rollouts", "above 0",
         "0 means that nothing can be learned"),
        ("min", "reward", "lowest episode return", "within the range of the environment",
         "the reward function"),
        ("max", "reward", "highest episode return", "within the range of the environment",
         "the reward function"),
        ("success_rate", "1", "share of rollouts that the environment calls solved", "rises",
         "sample rollouts in the report"),
        ("overlong_mean", "reward",
         "mean punishment of long rollouts, which credit counts and the return does not", "near 0",
         "rollout/length_tokens_mean; algorithm.overlong"),
        ("kl_mean", "nats",
         ("mean over rollouts of log policy - log reference, "
          "summed over the policy's tokens, where the reward counts it"),
         "grows slowly", "algorithm.reward_kl_weight"),
    ),
    *_group(
        "rollout",
        ("num", "rollouts", "rollouts owed and delivered in this step", "constant",
         "a change means that groups were dropped"),
        *(_outcome_row(outcome) for outcome in Outcome),
        ("num_retries", "rollouts", "rollouts that were started again after a fault", "0 or rare",
         "tool and simulator logs"),
        ("num_close_faults", "environments",
         "environments that broke while they were closed, which changes no outcome", "0",
         "the notes of the step; leaking simulators"),
        ("num_masked", "rollouts", "rollouts left out of the update because of a fault", "0 or rare",
         "the fault counts above"),
        ("length_tokens_mean", "tokens", "mean length of a response: all tokens after the prompt",
         "stable or slowly moving",
         "growth with flat reward: rambling; collapse: the policy gave up on turns"),
        ("length_tokens_max", "tokens", "longest response", "below the context limit",
         "rollout/truncated_fraction"),
        ("policy_tokens_mean", "tokens", "mean number of tokens that the policy wrote in a rollout", "stable",
         "length_tokens_mean"),
        ("turns_mean", "turns", "mean number of policy turns in a rollout", "stable or falling",
         "num_truncated_turns"),
        ("turns_max", "turns", "most policy turns in a rollout", "below the turn limit",
         "num_truncated_turns"),
        ("num_tool_calls", "calls", "tool calls really executed in this step", "stable",
         "0 means that the agent stopped using tools"),
        ("tool_calls_per_leaf", "calls",
         "mean number of executed calls on a rollout's path; a shared one counts for every rollout", "stable",
         "num_tool_calls"),
        ("num_tool_calls_shared", "calls",
         "calls that branching saved: those of the paths beyond those executed",
         "above 0 with branching, else 0", "branch/num_forks"),
        ("num_tool_calls_refused", "calls", "calls that found no budget left, summed over rollouts", "few",
         "max_calls, max_batch_calls"),
        ("num_tool_calls_saved", "calls",
         "tool calls not executed because a retrieved step brought its stored observation",
         "above 0 with retrieval, else 0", "retrieval/rate"),
        ("num_invalid_actions", "actions", "policy turns that the environment could not read as an action",
         "falls towards 0", "the prompt, stop strings and the cold start"),
        ("num_observations_cut", "observations",
         "observations that were longer than their limit and lost their middle", "rare",
         "rollout.max_observation_tokens"),
        ("truncated_fraction", "1", "share of rollouts cut by the token or the turn limit", "below 0.1",
         "raise the limits or shorten retrieved text"),
        ("diversity", "1",
         "mean over groups of one minus the mean pairwise cosine similarity of the rollouts' bags of words",
         "falls slowly, never to 0", "entropy collapse; a larger share of hybrid rollouts"),
    ),
    *_group(
        "branch",
        ("num_decisions", "turns", "turns after a tool result at which the branching rule was asked",
         "above 0 with branching", "rollout/num_tool_calls"),
        ("num_forks", "rollouts", "rollouts that left another one in mid-episode",
         "below the group size times the groups", "entropy_change_mean and the rule's settings"),
        ("num_refused", "rollouts", "forks that the rule wanted and the group had no place for", "any",
         "the share of the first wave"),
        ("num_replayed", "rollouts",
         "forks whose environment is brought there by replaying: it has no copy, or the copy failed",
         "0 with environments that can be copied", "the environment's copy()"),
        ("entropy_change_mean", "1",
         "mean of dH: normalised entropy after the result minus that of the lineage's first turn",
         "moves with training", "entropy/token_mean"),
    ),
    *_group(
        "retrieval",
        ("rate", "1",
         "share of the turns of hybrid rollouts, after the first, before which a step was found to insert",
         "near the scheduled probability",
         "num_no_candidate and num_refused"),
        ("num_inserted", "steps", "retrieved steps that were inserted", "above 0 in RAPO runs",
         "the schedule and the buffer"),
        ("num_no_candidate", "steps",
         "retrievals for which scope, terminal and repetition rules left no step", "rare",
         "the size and scope of the buffer"),
        ("num_refused", "steps", "retrieved actions that the live environment refused (mode `execute`)",
         "rare", "similarity_mean and the scope"),
        ("num_cut", "steps", "retrieved steps cut at the token limit", "rare",
         "the limit against the buffer's step lengths"),
        ("num_dropped", "steps", "retrieved steps left out because they would have left the policy no room",
         "rare", "the token limits of a rollout and of a retrieved step"),
        ("num_unscored", "steps", "retrievals without a policy turn after them, left out of Z", "rare",
         "rollout/truncated_fraction"),
        ("num_floored", "steps",
         "scored retrievals whose entropy before was under the floor that Eq. 5 divides by", "rare",
         "entropy_before_mean: the policy is certain of nearly every token"),
        ("share_hybrid_retrieved", "1", "share of hybrid rollouts that retrieved at least once", "above 0.5",
         "short episodes or a low probability"),
        ("z_mean", "nats",
         "mean retrieval reward Z = g times the entropy before (Eq. 7), over rollouts that retrieved",
         "above 0", "g_mean, similarity_mean"),
        ("g_mean", "1", "mean quality g = tanh(2 delta) of a retrieval (Eq. 5 and 6)", "above 0, below 1",
         "noise in the buffer; another off-policy agent"),
        ("entropy_before_mean", "nats", "mean entropy of the policy turn before a retrieval", "above 0",
         "near 0: the policy has collapsed and Z is noise"),
        ("entropy_after_mean", "nats", "mean entropy of the policy turn after a retrieval",
         "below entropy_before_mean", "whether retrieved text confuses the policy"),
        ("share_g_positive", "1", "share of scored retrievals with g above 0", "above 0.5",
         "similarity_mean"),
        ("reward_on_policy", "reward", "mean episode return of pure on-policy rollouts", "rises",
         "reward_hybrid"),
        ("reward_hybrid", "reward", "mean episode return of rollouts that retrieved",
         "at or above reward_on_policy", "quality of the buffer; num_cut"),
        ("length_on_policy", "tokens", "mean response length of pure on-policy rollouts", "stable",
         "length_hybrid"),
        ("length_hybrid", "tokens", "mean response length of rollouts that retrieved",
         "at or below length_on_policy", "num_cut, retrieved token limit"),
        ("token_share", "1",
         ("mean share of retrieved tokens in the response of a "
          "rollout that retrieved (F in Eq. 8)"), "below 0.5",
         "the token limit of a retrieved step"),
        ("share_factor_negative", "1",
         ("share of rollouts whose combined factor 1 + a A_ret (Eq. 10) "
          "is negative and turns the credit around"),
         "0", "the weight a; spread of Z in the group"),
        ("similarity_mean", "1", "mean cosine similarity of query and retrieved key", "above 0.5",
         "embedder, buffer coverage"),
        ("num_hits/{source}", "steps", "inserted steps that came from this off-policy source",
         "spread over the sources", "one source crowds the others out"),
    ),
    *_group(
        "group",
        ("num", "groups", "groups (tasks) of this step", "constant", "task sampling"),
        ("num_without_signal_singleton", "groups", "groups of one rollout: credit zero", "0",
         "group size; faults"),
        ("num_without_signal_no_spread", "groups",
         "groups whose rollouts all have the same return: credit zero", "few",
         "all solved or none solved: change the difficulty of the tasks"),
        ("num_without_signal_unscorable", "groups", "groups in which no rollout has a return: credit zero",
         "0", "the fault counts"),
        ("num_without_signal_rejected", "groups", "groups of which rejection sampling kept no rollout", "few",
         "algorithm.threshold against reward/max"),
        ("num_dropped", "groups",
         "groups that dynamic sampling left out because all rollouts have the same metric", "below group/num",
         "the difficulty of the tasks"),
        ("num_extra_batches", "batches", "further rounds of rollouts that dynamic sampling needed", "few",
         "group/num_dropped"),
        ("num_missing", "groups", "groups below train.tasks_per_step that the step was trained on", "0",
         "algorithm.dynamic_sampling.max_extra_batches; the difficulty of the tasks"),
        ("fraction_without_signal", "1",
         "share of the groups trained on that give no gradient, whatever the reason", "below 0.7",
         "difficulty, group size"),
    ),
    *_group(
        "loss",
        ("policy", "1", "the policy term, mean over the optimiser steps", "near 0", "ratio/*"),
        ("kl", "nats", "mean KL to the reference policy, before its weight", "small",
         "learning rate, KL weight"),
        ("positive_nll", "nats",
         ("mean negative log-likelihood over the tokens of successful rollouts, "
          "before its weight; 0 without any"),
         "falls slowly", "algorithm.positive_nll; entropy/token_mean"),
    ),
    *_group(
        "ratio",
        ("mean", "1", "mean importance ratio of trained tokens, after shaping", "near 1",
         "learning rate; gap/*"),
        ("min", "1", "smallest importance ratio", "above 0.1", "gap/logprob_max"),
        ("max", "1", "largest importance ratio", "below 10", "gap/logprob_max"),
        ("clip_fraction_low", "1", "share of trained tokens whose gradient the lower clip removed",
         "below 0.1", "learning rate, updates per batch"),
        ("clip_fraction_high", "1", "share of trained tokens whose gradient the upper clip removed",
         "below 0.1", "learning rate, updates per batch"),
        ("clip_fraction_dual", "1", "share of trained tokens whose gradient the dual clip removed",
         "below 0.02", "ratio/max; stale rollouts"),
        ("importance_mean", "1", "mean weight that corrects engine log-probs to trainer log-probs", "near 1",
         "gap/*"),
        ("importance_max", "1", "largest correction weight before truncation", "below 10", "gap/logprob_max"),
        ("importance_ess_share", "1",
         "effective sample size of the correction weights as a share of the tokens", "above 0.9", "gap/*"),
        ("num_truncated", "tokens", "correction weights that were cut at the cap", "0 or rare", "gap/*"),
        ("num_rejected", "tokens", "trained tokens left out because engine and trainer disagree on them",
         "0 or rare", "gap/*"),
        ("shaping_mean", "1", "mean factor 1 + m F of retrieval importance shaping (Eq. 8)", "1 to 1 + m",
         "retrieval/token_share"),
    ),
    *_group(
        "entropy",
        ("token_mean", "nats", "mean entropy of the policy per generated token, at sampling time",
         "falls slowly", "a fast fall is collapse: lower the learning rate"),
        ("trainer_mean", "nats",
         "mean entropy of the trained tokens under the weights that the update starts from",
         "near token_mean", "gap/*"),
        ("turn_mean", "nats", "mean over turns of the mean token entropy of the turn", "falls slowly",
         "token_mean"),
    ),
    *_group(
        "gap",
        ("logprob_mean", "nats", "mean absolute difference of trainer and engine log-prob per trained token",
         "below 0.01 (float32)",
         "stale weights, template drift, another precision"),
        ("logprob_max", "nats", "largest absolute difference of trainer and engine log-prob",
         "below 0.1 (float32)", "one wrong token: masks and positions"),
    ),
    *_group(
        "grad",
        ("norm", "1", "norm of the gradient before clipping", "stable",
         "spikes: learning rate; 0: no group has signal"),
        ("clipped_fraction", "1", "share of optimiser steps of this step that were clipped", "below 0.5",
         "the clip norm"),
        ("num_skipped", "updates", "optimiser steps skipped because the gradient was not finite", "0",
         "gap/*, precision"),
        ("learning_rate", "1", "learning rate of the last optimiser step", "follows the schedule",
         "the config"),
    ),
    *_group(
        "time",
        ("rollout", "s", "wall-clock seconds of the rollout phase", "stable",
         "rollout/length_tokens_mean, tools"),
        ("update", "s", "wall-clock seconds of the update phase", "stable", "tokens/policy"),
        ("step", "s", "wall-clock seconds of rollout, credit and update; without checkpoints and evaluations",
         "stable", "time/rollout, time/update"),
        ("evaluation", "s", "wall-clock seconds of this evaluation", "stable",
         "evaluation.num_tasks, evaluation.num_samples"),
        ("checkpoint", "s", "mean wall-clock seconds of the last checkpoints before this step", "stable",
         "the disk"),
    ),
    *_group(
        "speed",
        ("rollout_tokens", "tokens/s", "policy tokens sampled per second of the rollout phase", "stable",
         "batching, tools that block"),
        ("update_tokens", "tokens/s",
         "unique tokens of packed rows, prompts and observations too, per second of the update phase",
         "stable", "packing, thread counts"),
    ),
    *_group(
        "tokens",
        ("policy", "tokens", "tokens that the policy wrote in this step", "stable",
         "rollout/policy_tokens_mean"),
        ("policy_total", "tokens",
         "tokens that the policy wrote since step 0, remarks and discarded ones included", "grows",
         "the fair x axis between algorithms"),
        ("discarded", "tokens",
         ("tokens that the policy wrote in tries that a fault broke, in no rollout with a return; "
          "in tokens/policy_total and not in tokens/policy"), "0 or few",
         "rollout/num_retries, rollout/num_masked"),
        ("retrieved", "tokens", "tokens of retrieved steps in this step", "below tokens/policy",
         "retrieval/token_share"),
        ("observation", "tokens", "tokens that environment and tools wrote in this step", "stable",
         "observation limits"),
        ("memory", "tokens", "tokens of tips in this step", "below tokens/policy", "tip limits"),
        ("remarks", "tokens",
         "tokens of the tips that the policy wrote after its episodes; in tokens/policy_total", "stable",
         "algorithm.memory.max_tip_tokens"),
    ),
    *_group(
        "tips",
        ("num_groups_plain", "groups", "groups that acted without tips", "the configured share",
         "algorithm.memory_probability"),
        ("num_groups_tips_on", "groups", "groups that acted and were trained with tips",
         "the configured share", "algorithm.off_policy_probability"),
        ("num_groups_tips_off", "groups", "groups that acted with tips and were trained without",
         "the configured share", "algorithm.off_policy_probability"),
        ("return_plain", "reward", "mean return of the groups without tips", "rises", "tips/return_tips_on"),
        ("return_tips_on", "reward", "mean return of the groups that acted and were trained with tips",
         "above return_plain early", "what the tips say"),
        ("return_tips_off", "reward",
         "mean return of the groups that acted with tips and were trained without",
         "above return_plain early", "what the tips say"),
        ("num_shown", "tips", "tips shown in turns", "grows with the memory",
         "tips/similarity_mean, tips/num_dropped"),
        ("num_distinct_shown", "tips", "different tips among them", "more than a few",
         "the ranking: score alone shows the same ten"),
        ("num_turns_without", "turns", "turns of groups with tips that found none", "falls",
         "tips/memory_size, min_similarity"),
        ("num_dropped", "tips", "tips found and left out because of the token budgets", "few",
         "max_shown_tokens"),
        ("num_no_room", "turns", "turns whose tips would have shortened the episode and were not shown", "0",
         "model.context_length against rollout.max_response_tokens"),
        ("tokens_a_turn", "tokens", "mean tokens of tips where a turn has some", "below max_shown_tokens",
         "max_tip_tokens"),
        ("similarity_mean", "1", "mean cosine between a state and the states of the tips shown",
         "varies between turns", "always 1: the key does not depend on the state"),
        ("similarity_min", "1", "lowest such cosine", "above min_similarity", "min_similarity"),
        ("num_written", "tips", "episodes that wrote a tip", "all episodes", "tips/num_empty"),
        ("num_empty", "tips", "episodes without a tip: empty, no room, or an engine fault", "0",
         "sample rollouts; model.context_length"),
        ("num_stored", "tips", "records added, one for each different action of an episode", "above 0",
         "tips/num_duplicates"),
        ("num_duplicates", "tips", "records whose text was there already, or that the eviction rule refused",
         "any", "the tips"),
        ("memory_size", "tips", "records in the memory, all buffers", "up to the capacity of each",
         "capacity"),
        ("intrinsic_mean", "reward", "mean intrinsic return of an episode", "falls as states become known",
         "novelty_threshold: 0 spread means no new states"),
        ("fraction_tied", "1",
         "share of groups whose returns are all equal: there the intrinsic part alone makes the advantage",
         "falls", ("normalised, it is as strong as a return: intrinsic_coefficient = 0 "
                   "once most groups solve the task")),
        ("state_visits", "visits", "mean visits of a state of this step, this step's included",
         "grows slowly", "novelty_threshold"),
        ("ratio_mean", "1", "mean importance ratio of the tokens trained without their tips",
         "below 1 with the acting denominator", "tips/kl_acting_student"),
        ("kl_acting_student", "nats",
         "mean log-prob with tips minus without, on such tokens: KL(acting || student)",
         "falls: tips become unnecessary", "off_policy_probability"),
        ("masked_fraction", "1", "share of such tokens that the student's mask leaves out", "below 0.2",
         "min_probability"),
        ("num_off_tokens", "tokens", "tokens trained without their tips", "the configured share",
         "tips/num_groups_tips_off"),
    ),
    *_group(
        "gigpo",
        ("anchor_group_size", "turns", "mean number of turns in an anchor group", "above 1", "share_alone"),
        ("share_alone", "1",
         "share of turns whose anchor no other turn has, so that their step advantage is 0", "below 0.8",
         "observations that never repeat; algorithm.similarity"),
        ("episode_advantage_abs", "1", "mean absolute episode advantage of a turn (Eq. 3)", "above 0",
         "group/fraction_without_signal"),
        ("step_advantage_abs", "1", "mean absolute step advantage of a turn, before its weight (Eq. 7)",
         "above 0, of the size of episode_advantage_abs", "share_alone; gamma"),
        ("reward_without_step_abs", "reward",
         "mean absolute return that no step reward explains, put on the last turn",
         "0 where the environment pays step by step", "the environment's step rewards"),
    ),
    *_group(
        "rejection",
        ("passed_fraction", "1", "share of rollouts whose return reaches the threshold", "rises",
         "algorithm.threshold"),
        ("kept_fraction", "1", "share of rollouts that are imitated", "above 0",
         "rejection/passed_fraction; max_kept, deduplicate"),
        ("task_fraction", "1", "share of tasks with a rollout that is imitated", "rises",
         "the difficulty of the tasks"),
    ),
    *_group(
        "luffy",
        ("return_demonstration", "reward", "mean return that the environment gave the demonstrations",
         "the best return", "demonstrations that do not solve their task; luffy/num_faults"),
        ("fraction_solved", "1", "share of demonstrations that the environment calls solved", "1",
         "the source of the demonstrations"),
        ("advantage_demonstration", "1", "mean advantage of a demonstration",
         "falls towards 0 as the policy catches up", "reward/mean against luffy/return_demonstration"),
        ("probability_mean", "1",
         "mean probability that the policy gives the trained tokens of demonstrations", "rises",
         "algorithm.shaping; whether the demonstrator writes as the policy is prompted to"),
        ("num_tokens", "tokens", "trained tokens of demonstrations; in no ratio, gap or entropy", "above 0",
         "luffy/num_groups_without; luffy/advantage_demonstration"),
        ("num_groups_without", "groups",
         "groups whose task has no demonstration: they are the policy's rollouts alone", "0",
         "algorithm.demonstrations; the environment's experts"),
        ("num_faults", "rollouts", "demonstrations that infrastructure broke", "0 or rare",
         "tool and simulator logs"),
    ),
    *_group(
        "replay",
        ("num_groups", "groups", "stored groups that were trained on again", "(1 - fresh_share) of a step",
         "replay/num_eligible"),
        ("num_eligible", "groups",
         "stored groups that may be: the newest of its task, neither all solved nor all failed",
         "above replay/num_groups", "difficulty of the tasks; algorithm.reward"),
        ("num_stored", "groups", "groups in the buffer after this step", "up to algorithm.buffer_size",
         "algorithm.buffer_size"),
        ("age_mean", "steps", "mean age of the replayed groups", "stable", "algorithm.buffer_size"),
        ("age_max", "steps", "age of the oldest replayed group", "stable", "algorithm.buffer_size"),
        ("weight_mean", "1",
         ("mean of policy at the start of the step over the policy "
          "that wrote a replayed token, before the cap"),
         "near 1", "replay/age_mean; learning rate"),
        ("weight_max", "1", "largest such weight, before the cap", "below 10",
         "replay/age_max; algorithm.weight_cap"),
        ("num_capped", "tokens", "replayed tokens whose weight was cut at the cap", "few",
         "algorithm.weight_cap; learning rate"),
        ("num_tokens", "tokens", "trained tokens of replayed groups; in no ratio, gap or entropy", "stable",
         "replay/num_groups"),
        ("estimate_mean", "1", "mean over the tasks played so far of the estimate that chooses tasks",
         "near algorithm.target", "tasks that are too easy or too hard"),
    ),
    *_group(
        "tree",
        ("turns_shared", "turns", "mean number of turns that a leaf shares with an earlier one of its tree",
         "above 0", "rollout/turns_mean: chains of one turn can be left at the root only"),
        ("share_at_root", "1", "share of expansions that begin at the prompt", "below 1",
         "rollout/turns_mean"),
        ("tokens_shared", "1", "share of the policy tokens on the leaves' paths that were not written again",
         "above 0", "tree/turns_shared"),
        ("fraction_without_spread", "1", "share of trees whose leaves all have the same return", "below 0.7",
         "difficulty; more expansions"),
    ),
    *_group(
        "buffer",
        ("num_steps", "steps", "records in the step-trace buffer", "constant, or grows when it evolves",
         "the import report"),
        ("num_added", "trajectories", "trajectories added in this step", "0 unless the buffer evolves",
         "the reward filter"),
        ("num_removed", "trajectories", "trajectories that better ones of their task displaced in this step",
         "any", "keep_best"),
        ("num_rejected", "trajectories", "trajectories refused by the reward filter in this step", "any",
         "the minimum reward"),
    ),
    *_group(
        "memory",
        ("peak_rss", "MiB", "largest resident memory of the process so far", "levels off",
         "steady growth is a leak"),
    ),
    *_group(
        "eval",
        ("score", "1", "mean score on the frozen panel; no retrieval", "rises",
         "sample rollouts; reward/mean"),
        ("ci_low", "1", "lower end of the 95 % interval of the score", "rises", "number of tasks"),
        ("ci_high", "1", "upper end of the 95 % interval of the score", "rises", "number of tasks"),
        ("num_tasks", "tasks", "tasks that were scored", "the size of the panel", "num_faults"),
        ("num_faults", "rollouts", "rollouts left out of the score because of a fault", "0",
         "tools and simulators"),
    ),
    *_group(
        "sft",
        ("loss", "nats", "mean negative log-prob of the trained tokens in the cold start", "falls, then flat",
         "learning rate, data"),
        ("num_tokens", "tokens", "trained tokens of this step", "stable", "packing"),
        ("num_examples", "trajectories", "trajectories of this step", "constant", "data"),
    ),
    *_group(
        "record",
        ("num_non_finite", "values",
         "values of this record that were NaN or infinite and are written as null", "0",
         "the first null of the record: it names the metric that broke"),
    ),
)
# fmt: on

_BY_NAME = {metric.name: metric for metric in DECLARED}
_OPEN = {metric.name.rpartition("/")[0]: metric for metric in DECLARED if metric.name.endswith("}")}


def declare(metrics: Iterable[Metric]) -> None:
    """Declare what a plug-in measures beside what is declared here. Raises ConfigError for a name that means
    something else.
    """
    for metric in metrics:
        if (known := _BY_NAME.get(metric.name, metric)) != metric:
            raise ConfigError(f"metric {metric.name!r} is declared already, as: {known.meaning}")
        if "/" not in metric.name:
            raise ConfigError(f"metric {metric.name!r} has no group: GROUP/NAME")
        _BY_NAME[metric.name] = metric
        if metric.name.endswith("}"):
            _OPEN[metric.name.rpartition("/")[0]] = metric


def declared_metric(name: str) -> Metric:
    """The declaration of a name; a placeholder in braces matches any one part.

    Raises :class:`UndeclaredMetric`, a ``KeyError``, when there is none.
    """
    parent, _, last = name.rpartition("/")
    metric = _BY_NAME.get(name) or _OPEN.get(parent)
    if metric is not None and last and "{" not in name:
        return metric
    raise UndeclaredMetric(f"metric {name!r} is not declared in outrider.metrics")
