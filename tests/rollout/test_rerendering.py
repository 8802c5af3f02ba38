"""Conversations rendered again before every turn: contexts as a server makes them, several samples a rollout,
and the same bits where nothing is stripped.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from outrider.algorithms.grpo import Grpo, GrpoSettings, OverlongSettings
from outrider.algorithms.rollout_replay import StoredGroup, restore_groups, snapshot_groups, stored_copy
from outrider.config import validate
from outrider.distributed.fsdp import Shape
from outrider.engines.base import Request
from outrider.engines.scripted import ScriptedEngine
from outrider.environments.base import StepResult
from outrider.errors import ConfigError, ModelError
from outrider.evaluation.tasks import EvalTasksSettings
from outrider.rollout.episode import Sampling, require_no_rerendering
from outrider.rollout.experts import join_demonstration
from outrider.rollout.scheduler import Scheduler
from outrider.rollout.settings import Limits
from outrider.tokens import ChatRenderer
from outrider.tokens.renderer import HistoryThinking
from outrider.tokens.template_check import check_template
from outrider.trace import Trace, split_contexts
from outrider.training.async_rollouts import group_to_dict, read_group
from outrider.training.packing import pack
from outrider.training.settings import RunSettings
from outrider.training.step_metrics import rollout_metrics
from outrider.training.update import rollout_paths
from outrider.types import Message, Outcome
from tests.rollout.fakes import Factory, Fake, say, tasks
from tests.tokens.family_templates import FAMILIES, byte_tokenizer

TURNS = tuple(
    f"<think>\n{thought}\n</think>\n\n{said}"
    for thought, said in (("first", "look"), ("second", "take"), ("last", "end"))
)


def play(
    name: str,
    *,
    history: HistoryThinking = "strip",
    turns: Sequence[str] = TURNS,
    on_step: Callable[[int, str], StepResult] | None = None,
    limits: Limits | None = None,
    context_length: int = 8192,
    group: int = 2,
) -> tuple[Trace, ChatRenderer, list[tuple[str, ...]]]:
    family = FAMILIES[name]
    renderer = ChatRenderer(
        byte_tokenizer(family), template_kwargs=family.variables, history_thinking=history
    )
    seen: list[tuple[str, ...]] = []

    def script(request: Request, text: str) -> str:
        turn = int(request.request_id.rsplit("/", 1)[1])
        seen.append((request.request_id, text))
        return turns[turn]

    def step(number: int, text: str) -> StepResult:
        return StepResult(done=True) if number == len(turns) - 1 else say(f"seen {number}", "user")

    scheduler = Scheduler(
        engine=ScriptedEngine(tokenizer=renderer.tokenizer, script=script, context_length=context_length),
        renderer=renderer,
        factory=Factory(lambda task, number: Fake(on_step=on_step or step, episode_return=float(number % 2))),
        limits=limits or Limits(step_timeout_s=60, max_turn_tokens=500, max_response_tokens=4000),
        sampling=Sampling(),
        run_seed=0,
    )
    [trace] = scheduler.run(tasks(1), modes=("m",) * group, training_step=0).traces
    return trace, renderer, sorted(seen)


def test_every_context_is_what_a_server_renders() -> None:
    trace, renderer, seen = play("qwen3")
    messages = [Message(role="user", content="q")]
    for turn, text in enumerate(TURNS):
        assert seen[turn][1] == renderer.whole_text(messages)
        read = renderer.parse_message(text, ())
        messages += [read, Message(role="user", content=f"seen {turn}")]
    assert "first" not in seen[1][1] and "look" in seen[1][1]
    [leaf, _] = trace.leaves.values()
    assert leaf.outcome is Outcome.FINISHED and leaf.node_id is not None
    path = trace.path(leaf.node_id)
    parts = split_contexts(path)
    assert [[node.trainable for node in part] for part in parts] == [[False, True]] * 3
    assert [node.message.content for node in path if not node.trainable] == ["q", "seen 0", "seen 1"]
    assert all(node.restarts == (node in (parts[1][0], parts[2][0])) for node in path)


def test_kept_thinking_is_one_context() -> None:
    trace, _, seen = play("qwen3", history="keep")
    assert "first" in seen[2][1] and "second" in seen[2][1]
    assert not any(node.restarts for node in trace.nodes)
    assert "rollout/num_restarts" not in rollout_metrics([trace])


@pytest.mark.parametrize("name", ["qwen2.5", "llama3", "gemma", "smollm2"])
def test_without_thinking_the_ids_equal_those_of_appending(name: str) -> None:
    plain = ("look", "take", "end")
    kept, _, _ = play(name, history="keep", turns=plain)
    again, _, _ = play(name, history="strip", turns=plain)
    assert [(n.token_ids, n.parent, n.restarts) for n in kept.nodes] == [
        (n.token_ids, n.parent, n.restarts) for n in again.nodes
    ]


def test_a_template_without_thinking_strips_it() -> None:
    _, _, seen = play("smollm2")
    assert "first" not in seen[1][1] and "look" in seen[1][1]


def test_samples_share_the_advantage_and_the_rollout_counts_once() -> None:
    trace, _, _ = play("qwen3")
    method = Grpo(validate(GrpoSettings, {"group_size": 2}))
    method.assign_advantages(trace)
    for leaf, path in trace.rollouts():
        credits_ = {value for node in path if node.trainable for value in node.credit or ()}
        assert credits_ == {leaf.advantage} and leaf.advantage
    [batch] = pack(rollout_paths([trace]), max_tokens=10**6)
    written = [sum(len(n.token_ids) for n in path if n.trainable) for _, path in trace.rollouts()]
    assert [batch.rollout_index_T.tolist().count(number) for number in (0, 1)] == written
    metrics = rollout_metrics([trace])
    assert metrics["rollout/num"] == 2 and metrics["rollout/num_restarts"] == 4


def test_budgets_are_not_exceeded() -> None:
    """The response counts what was written and observed; the context, what is rendered."""
    trace, _, _ = play("qwen3", limits=Limits(step_timeout_s=60, max_turn_tokens=60, max_response_tokens=70))
    assert {leaf.outcome for leaf in trace.leaves.values()} == {Outcome.TRUNCATED_TOKENS}
    long = [f"{text} {'x' * 200}" for text in TURNS]
    trace, _, _ = play("qwen3", turns=long, context_length=450)
    assert {leaf.outcome for leaf in trace.leaves.values()} == {Outcome.TRUNCATED_TOKENS}
    for leaf, _ in trace.rollouts():
        assert leaf.node_id is not None and len(trace.token_ids(leaf.node_id)) <= 450


def test_a_long_observation_is_truncated_in_the_history() -> None:
    def step(number: int, text: str) -> StepResult:
        return StepResult(done=True) if number == 2 else say("long " * 100, "user")

    limits = Limits(step_timeout_s=60, max_turn_tokens=500, max_response_tokens=4000,
                    max_observation_tokens=120)  # fmt: skip
    trace, _, seen = play("qwen3", on_step=step, limits=limits)
    assert seen[2][1].count("[...]") == 2 and len(seen[2][1]) < 500
    cut = [node.metadata["num_tokens_cut"] for node in trace.nodes if "num_tokens_cut" in node.metadata]
    assert len(cut) == 4 and min(cut) > 300


def test_hooks_that_insert_text_between_messages_are_refused() -> None:
    renderer = ChatRenderer(byte_tokenizer(FAMILIES["qwen3"]), history_thinking="strip")
    with pytest.raises(ConfigError, match="text that a hook inserts between messages: use keep"):
        require_no_rerendering(renderer)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"algorithm": {"type": "rapo"}}, "algorithm.type = rapo"),
        ({"algorithm": {"type": "empo2"}}, "algorithm.type = empo2"),
        ({"cold_start": {"num_examples": 4, "retrieve_share": 0.5}}, "cold_start.retrieve_share"),
        ({"evaluation": {"num_trials": 3, "memory": "reflexion"}}, "evaluation.memory"),
    ],
)
def test_settings_that_insert_text_between_messages_are_refused(given: dict[str, Any], told: str) -> None:
    base = {"environment": {"type": "textworld"}, "algorithm": {"type": "grpo"}}
    with pytest.raises(ConfigError, match=f"history_thinking = strip leaves out .*{told}"):
        validate(RunSettings, base | {"model": {"history_thinking": "strip"}} | given)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"model": {"history_thinking": "strip"}}, "strip"),
        ({"model": {"template_kwargs": {"enable_thinking": False}}}, "model.template_kwargs"),
        ({"environment": {"type": "tools", "tools": ["python"], "protocol": "hermes"}}, "native tool calls"),
    ],
)
def test_an_engine_that_parses_contexts_refuses_other_renderings(given: dict[str, Any], told: str) -> None:
    base = {
        "environment": {"type": "textworld"}, "algorithm": {"type": "grpo"}, "train": {"num_steps": 0},
        "engine": {"type": "retrospex", "critic": "critic.safetensors"},
    }  # fmt: skip
    validate(RunSettings, base)
    with pytest.raises(ConfigError, match=f"engine.type = retrospex reads .* does not support .*{told}"):
        validate(RunSettings, base | given)


def test_an_evaluation_in_the_inline_protocol_is_refused() -> None:
    told = {"tasks": "factbook", "model": {"history_thinking": "strip"}}
    with pytest.raises(ConfigError, match="needs turns that are messages of their own"):
        validate(EvalTasksSettings, told)


@pytest.mark.parametrize("name", ["llama3", "gpt-oss"])
def test_a_template_that_cannot_render_again_is_refused(name: str) -> None:
    family = FAMILIES[name]
    renderer = ChatRenderer(
        byte_tokenizer(family), template_kwargs=family.variables, call_format=family.call_format,
        observations=("tool",), history_thinking="strip",
    )  # fmt: skip
    with pytest.raises(ModelError, match=r"refuses several calls, .*_thinking = strip .*: use keep"):
        check_template(renderer, ("tool",))


def test_half_of_a_surrogate_pair_in_an_observation_ends_no_run() -> None:
    def step(number: int, text: str) -> StepResult:
        return StepResult(done=True) if number == 2 else say("a\ud800b", "user")

    for history in ("keep", "strip"):
        trace, _, seen = play("qwen3", on_step=step, history=history)  # type: ignore[arg-type]
        assert {leaf.outcome for leaf in trace.leaves.values()} == {Outcome.FINISHED}
        assert "a?b" in seen[2][1]


def test_a_demonstration_keeps_its_contexts() -> None:
    trace, _, _ = play("qwen3", turns=TURNS[1:])
    played, _, _ = play("qwen3", group=1)
    join_demonstration(trace, played)
    of_demonstration, of_itself = list(trace.rollouts())[-1][1], next(played.rollouts())[1]
    assert len(split_contexts(of_itself)) == 3
    assert [node.restarts for node in of_demonstration] == [node.restarts for node in of_itself]
    assert rollout_paths([trace])[-1].nodes == of_demonstration


def test_a_group_in_a_checkpoint_keeps_its_contexts() -> None:
    trace, _, _ = play("qwen3")
    assert read_group(json.loads(json.dumps(group_to_dict(trace)))).nodes == trace.nodes


def test_the_cost_of_a_rollout_is_the_sum_of_its_contexts() -> None:
    trace, _, _ = play("qwen3", group=1)
    [path] = rollout_paths([trace])
    shape = Shape(num_parameters=1000, num_layers=2, attention_width=8)
    parts = [replace(path, nodes=nodes) for nodes in split_contexts(path.nodes)]
    assert len(parts) == 3 and shape.cost([path]) == sum(shape.cost([part]) for part in parts)


def test_the_response_has_the_tokens_that_a_context_rendered_anew_repeats_once() -> None:
    lengths = []
    for history in ("keep", "strip"):
        trace, _, _ = play("qwen3", history=history, group=1)
        [(_, path)] = trace.rollouts()
        lengths.append(sum(node.num_response_tokens for node in path))
        reward = OverlongSettings(max_tokens=lengths[0] + 1, buffer=1, counted="all")
        Grpo(validate(GrpoSettings, {"overlong": reward.model_dump()})).assign_advantages(trace)
        assert [leaf.intrinsic for leaf in trace.leaves.values()] == [0.0]
    assert lengths[0] == lengths[1] and any(node.restarts for node in path)


def test_a_stored_group_keeps_its_contexts() -> None:
    trace, _, _ = play("qwen3")
    stored = StoredGroup(trace=stored_copy(trace), step=0)
    [again] = restore_groups(*snapshot_groups([stored]))
    assert again.trace.nodes == stored.trace.nodes and again.trace.leaves == stored.trace.leaves
    assert [n.restarts for n in again.trace.nodes] == [n.restarts for n in trace.nodes]
