"""GRPO in one screen: rollouts, group-relative advantages, the clipped token loss, one optimiser step.

python examples/grpo_one_screen.py [MODEL]     # an id, a folder, or the packaged smollm2-135m-instruct

This example uses the parts below the public names of ``outrider``, which may change between versions.
"""

import sys

from outrider.algorithms.advantages import group_normalized_advantages_per_rollout
from outrider.algorithms.base import write_advantages
from outrider.algorithms.losses import clipped_surrogate_per_token
from outrider.engines.local.engine import LocalEngine
from outrider.engines.local.model import load_model
from outrider.environments.base import EpisodeResult, StepResult
from outrider.rollout.episode import Sampling
from outrider.rollout.scheduler import Scheduler
from outrider.rollout.settings import Limits
from outrider.tokens import ChatRenderer
from outrider.training.packing import pack
from outrider.training.policy import Policy
from outrider.training.settings import OptimizerSettings
from outrider.training.update import rollout_paths
from outrider.types import Message, Task


class Digits:
    """One episode of one turn. The return is the share of digits in what the policy writes."""

    def __init__(self, task):
        self.task, self.share = task, 0.0

    def reset(self, seed):
        return (Message(role="user", content=self.task.question),)

    def step(self, message):
        self.share = sum(one in "0123456789" for one in message.content) / max(1, len(message.content))
        return StepResult(message=None, reward=self.share, done=True)

    def result(self):
        return EpisodeResult(episode_return=self.share, success=self.share == 1.0)

    def close(self):
        """Nothing is held."""


def train(language_model, *, num_steps=8, group_size=8, learning_rate=1e-5, max_tokens=24):
    """Train in place; the mean return of each step."""
    tasks = [Task(key=f"digits/{i}", question=f"Count on from {i}.") for i in (1, 10, 100, 1000)]
    engine = LocalEngine(language_model)
    policy = Policy(language_model, OptimizerSettings(learning_rate=learning_rate))
    loop = Scheduler(
        engine=engine, renderer=ChatRenderer(engine.tokenizer), factory=Digits,
        sampling=Sampling(), run_seed=0,
        limits=Limits(max_turns=1, max_turn_tokens=max_tokens, max_response_tokens=max_tokens),
    )  # fmt: skip
    rewards = []
    for step in range(num_steps):
        # 1. Rollouts: a group of them for every task, with the log-probs of the moment of sampling.
        groups = loop.run(tasks, modes=["on_policy"] * group_size, training_step=step).traces
        returns = [[leaf.episode_return for leaf, _ in group.rollouts()] for group in groups]
        # 2. Advantages: how much better than the other rollouts of the same task, on every token.
        for group, of_group in zip(groups, returns, strict=True):
            write_advantages(group, group_normalized_advantages_per_rollout(returns=of_group))
        # 3. The token loss: max(-A r, -A clip(r, 0.8, 1.2)), with r the ratio of now to the sampling policy.
        [batch] = pack(rollout_paths(groups), max_tokens=1_000_000)
        logprobs = policy.score(batch).logprobs_T
        batch = batch.like(logprobs)
        surrogate = clipped_surrogate_per_token(
            logprobs=logprobs, old_logprobs=batch.engine_logprobs_T, advantages=batch.advantages_T
        )
        surrogate.losses.mean().backward()
        # 4. One optimiser step. The engine samples with the new weights from here on.
        policy.step()
        engine.load(engine.weight_version + 1)
        every = [one for of_group in returns for one in of_group if one is not None]  # None: a fault
        rewards.append(sum(every) / len(every))
        print(f"step {step + 1}  reward {rewards[-1]:.3f}  loss {surrogate.losses.mean().item():+.4f}")
    return rewards


if __name__ == "__main__":
    train(load_model((sys.argv[1:] or ["smollm2-135m-instruct"])[0], precision="auto"))
