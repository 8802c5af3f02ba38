"""Retrieval where an action changes the state: steps of experts in the text shop, through the real loop and a
real buffer.
"""

from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from outrider.algorithms.exploration import Rapo, RapoSettings
from outrider.algorithms.retrieval import RetrievalHook, RetrievalSettings, retrieved_share
from outrider.algorithms.tips import answered_turns
from outrider.engines.base import Request
from outrider.environments.base import EnvironmentTaskSet, Episode
from outrider.environments.webshop import environment as webshop_text
from outrider.environments.webshop.environment import WebShopConfig, WebShopEnvironment
from outrider.memory.embedders import load_embedder
from outrider.memory.step_buffer import StepTraceBuffer
from outrider.rollout.episode import Sampling
from outrider.rollout.experts import to_trajectory
from outrider.rollout.hooks import EpisodeState, Hook, Splice
from outrider.rollout.scheduler import Scheduler
from outrider.rollout.settings import Limits
from outrider.tokens import ChatRenderer
from outrider.trace import Node, Trace
from outrider.types import Origin, Outcome, Trajectory
from tests.rollout.fakes import TOKENIZER, scripted

FAMILY = EnvironmentTaskSet(WebShopEnvironment, WebShopConfig(num_train=8))
LIMITS = Limits(max_turns=5, max_response_tokens=40000, max_observation_tokens=6000, max_splice_tokens=6000)


@pytest.fixture(scope="module")
def buffer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StepTraceBuffer]:
    path: Path = tmp_path_factory.mktemp("buffer") / "steps.sqlite"
    with StepTraceBuffer(path, load_embedder("hash"), mode="write") as made:
        tasks = FAMILY.tasks("train")
        paths = {task.key: FAMILY.expert(task, 0) for task in tasks}
        made.add_trajectories(
            [
                Trajectory(
                    trajectory_id=key, task_key=key, agent="expert", prompt=(), steps=tuple(steps), reward=1.0
                )
                for key, steps in paths.items()
                if steps
            ],
            questions={task.key: task.question for task in tasks},
        )
        yield made


def play(
    buffer: StepTraceBuffer, said: str, limits: Limits = LIMITS, **chosen: Any
) -> tuple[list[Trace], RetrievalHook]:
    """Hybrid rollouts of a policy that searches once and then says ``said``."""
    settings = RetrievalSettings(mode="execute", probability=1.0, **chosen)
    hook = RetrievalHook(settings, buffer=buffer, num_training_steps=1)
    texts = lambda request, _: said if int(request.request_id[-3:]) else "<action>search[lamp]</action>"  # noqa: E731
    return run(texts, limits, "hybrid", hook), hook


def run(texts: Callable[[Request, str], str], limits: Limits, mode: str, *hooks: Hook) -> list[Trace]:
    """Two rollouts of each of four tasks."""
    scheduler = Scheduler(
        engine=scripted(texts, context_length=60000),
        renderer=ChatRenderer(TOKENIZER),
        factory=FAMILY.make(),
        limits=limits,
        sampling=Sampling(stop=FAMILY.stop),
        run_seed=0,
        hooks=hooks,
    )
    return scheduler.run(FAMILY.tasks("train")[:4], modes=(mode,) * 2, training_step=0).traces


@pytest.mark.parametrize("scope", ["all", "other_tasks"])
def test_a_click_that_the_page_lacks_is_no_retrieved_step_and_gets_no_reward(
    buffer: StepTraceBuffer, scope: str
) -> None:
    """The shop answers it in words, and the policy goes on without having been shown anything."""
    traces, hook = play(buffer, "<action>click[back to search]</action>", scope=scope)
    shown = [node for trace in traces for node in trace.nodes if node.origin is Origin.BUFFER]
    refusals = (webshop_text.NO_SUCH_NAME, webshop_text.NO_SEARCH_BAR)
    assert shown and not any(refusal in node.message.content for node in shown for refusal in refusals)
    assert hook.counts["refused"] > 0 and hook.counts["retrievals"] == hook.counts["refused"] + len(shown)
    credit = [
        Rapo(RapoSettings(group_size=2, num_hybrid=2), buffer=buffer, num_training_steps=1).assign_advantages(
            t
        )
        for t in traces
    ]
    num_paid = sum(len(one.measurements["retrieval/z_mean"]) for one in credit)
    assert 0 < num_paid <= len(shown)


@pytest.mark.parametrize("limits", [LIMITS, LIMITS.model_copy(update={"max_observation_tokens": 60})])
def test_in_the_form_of_a_turn_the_context_is_as_if_the_policy_had_written_the_step(
    buffer: StepTraceBuffer, limits: Limits
) -> None:
    said = "<action>click[back to search]</action>"
    traces, hook = play(buffer, said, limits, scope="same_task", form="turn")
    num_shown = 0
    for trace, task in zip(traces, FAMILY.tasks("train"), strict=False):
        for leaf, path in trace.rollouts():
            actions = [
                node.metadata["action"] if node.origin is Origin.BUFFER else node.message.content
                for node in path
                if node.origin in (Origin.BUFFER, Origin.POLICY)
            ]
            longer = limits.model_copy(update={"max_turns": len(actions)})
            again = run(lambda request, _, said=actions: said[int(request.request_id[-3:])], longer, "plain")
            [other] = [one for one in again if one.task.key == task.key]
            written = other.path(other.leaves[leaf.rollout].node_id)
            shown, own = ([i for node in nodes for i in node.token_ids] for nodes in (path, written))
            assert shown == own
            num_shown += sum(node.origin is Origin.BUFFER for node in path)
    assert num_shown == hook.counts["retrievals"] - hook.counts["refused"] > 0


class Tip(Hook):
    """Shows a tip before every turn."""

    def before_turn(self, state: EpisodeState) -> list[Splice]:
        return [Splice(origin=Origin.MEMORY, text="A tip.")]


def test_a_tip_after_a_retrieved_turn_is_at_the_end_of_its_observation(buffer: StepTraceBuffer) -> None:
    settings = RetrievalSettings(mode="execute", probability=1.0, scope="same_task", form="turn")
    opening, num_checked = ChatRenderer(TOKENIZER).opening, 0
    assert opening
    paths: list[list[list[Node]]] = []
    for others in ((), (Tip(),)):
        hook = RetrievalHook(settings, buffer=buffer, num_training_steps=1)
        traces = run(lambda request, _: "<action>search[lamp]</action>", LIMITS, "hybrid", hook, *others)
        paths.append([list(path) for trace in traces for _, path in trace.rollouts()])
    for plain, tipped in zip(*paths, strict=True):
        untipped = [node for node in tipped if node.origin is not Origin.MEMORY]
        ids = [[i for node in nodes for i in node.token_ids] for nodes in (plain, untipped)]
        assert ids[0] == ids[1] and retrieved_share(plain) == retrieved_share(tipped)
        for step, observation, tip, end in zip(tipped, tipped[1:], tipped[2:], tipped[3:], strict=False):
            if step.origin is Origin.BUFFER and tip.origin is Origin.MEMORY:
                assert observation.message.content == step.metadata["observation"]
                assert end.token_ids == opening
                num_checked += 1
    assert num_checked


def test_a_turn_without_room_for_its_observation_ends_the_rollout(buffer: StepTraceBuffer) -> None:
    """The state has changed, but the policy cannot see how."""
    room = LIMITS.model_copy(update={"max_observation_tokens": 40, "max_response_tokens": 100})
    num_ended = 0
    for size in range(room.max_response_tokens, 300, 4):
        limits = room.model_copy(update={"max_response_tokens": size})
        traces, _ = play(
            buffer, "<action>click[back to search]</action>", limits, scope="same_task", form="turn"
        )
        for trace in traces:
            for leaf, path in trace.rollouts():
                num_tokens = sum(len(node.token_ids) for node in path[1:])
                assert num_tokens <= size
                if path[-1].origin is Origin.BUFFER or "attempted" in path[-1].metadata:
                    num_ended += leaf.outcome is Outcome.TRUNCATED_TOKENS
    assert num_ended


def test_a_retrieved_turn_is_no_turn_of_the_policy(buffer: StepTraceBuffer) -> None:
    """Its observation answers no action of the policy, and counts as retrieved."""
    traces, _ = play(buffer, "<action>click[back to search]</action>", scope="same_task", form="turn")
    for trace in traces:
        for _, path in trace.rollouts():
            answers: dict[bool, list[Node]] = {True: [], False: []}  # whether the policy acted
            for node, after in pairwise(path):
                if after.origin is Origin.ENVIRONMENT:
                    answers[node.trainable].append(after)
            texts = [*(node.message.content for node in answers[True]), "end"]
            found = [answer for _, answer in answered_turns(path, "end")]
            assert found == texts[: len(found)] and len(found) == sum(node.trainable for node in path)
            retrieved = [node for node in path if node.origin is Origin.BUFFER] + answers[False]
            num_retrieved, num_all = (sum(len(n.token_ids) for n in nodes) for nodes in (retrieved, path[1:]))
            assert retrieved_share(path) == num_retrieved / num_all


@pytest.mark.parametrize("form", ["tags", "turn"])
def test_a_rollout_can_be_replayed_from_its_stored_trajectory(buffer: StepTraceBuffer, form: str) -> None:
    """A retrieved step that was done is a step of the episode, or the pages behind it would be in no
    order.
    """
    traces, _ = play(buffer, "<action>click[buy now]</action>", scope="same_task", form=form)
    factory, num_done = FAMILY.make(), 0
    for trace in traces:
        for leaf, path in trace.rollouts():
            kept = to_trajectory(trace, leaf.rollout, agent="self", trajectory_id="x", count_tokens=len)
            assert kept is not None and leaf.episode_return is not None
            environment = factory(trace.task)
            environment.reset(0)
            assert Episode(environment).play([step.text for step in kept.steps]) == kept.steps
            assert environment.result().episode_return == leaf.episode_return
            done = [node.metadata["action"] for node in path if node.origin is Origin.BUFFER]
            own = sum(len(node.token_ids) for node in path if node.origin is Origin.POLICY)
            assert kept.num_tokens == own + sum(map(len, done))
            unknown = to_trajectory(trace, leaf.rollout, agent="self", trajectory_id="x")
            assert unknown is not None and unknown.num_tokens == (0 if done else own)
            num_done += len(done)
    assert num_done > 0
