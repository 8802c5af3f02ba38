"""What an episode was worth, or why it has no reward."""

from typing import Any

POLICY_ERRORS = ("HarnessError",)  # of the agent's program, which did what the policy told it


def episode_outcome(episode: Any, variable: str) -> dict[str, Any]:
    """What an episode was worth: the mean reward of its traces that are trained, as verifiers reports it. Or
    why it has no reward: an ``error`` of the agent, or a ``fault`` of everything else.
    """
    if not episode.ok:
        failed = [trace.errors[-1] for trace in episode.traces if not trace.ok and trace.errors]
        error = (failed or episode.errors or [None])[-1]
        if error is None:
            return {"fault": "verifiers calls the episode failed and does not say why"}
        kind = "error" if error.type in POLICY_ERRORS and not episode.errors else "fault"
        return {kind: format_problem(error.type, error.message)}
    for trace in episode.traces:
        if not trace.agent.trainable and trace.agent.config.client.api_key_var == variable:
            name = trace.agent.name
            return {
                "fault": f"the agent {name} is not to be trained, but asks the policy: name another "
                f"endpoint in environment.options.{name}.client"
            }
    trained = [trace for trace in episode.traces if trace.agent.trainable]
    scores: dict[str, list[float]] = {}
    for trace in trained:
        for name, value in trace.metrics.items():
            if value is not None:
                scores.setdefault(name, []).append(float(value))
        for name, reward in trace.rewards.items():
            if reward is not None:
                scores.setdefault(f"reward_{name}", []).append(float(reward.value))
    if not any(name.startswith("reward_") for name in scores):
        return {"fault": "the environment gave no reward"}
    value = sum(float(trace.reward) for trace in trained) / len(trained)
    means = {name: sum(values) / len(values) for name, values in scores.items()}
    if not all(abs(number) < float("inf") for number in (value, *means.values())):
        return {"fault": f"the environment gave the reward {value} and {means}, which are no finite numbers"}
    return {"value": {"reward": value, "metrics": means}}


def format_problem(kind: str, message: str) -> str:
    """An error in one line."""
    return f"{kind}: {' '.join(message.split())}"[:300]
