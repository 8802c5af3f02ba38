"""Small trajectories for the memory tests."""

from outrider.types import Message, Step, Trajectory


def make_trajectory(
    name: str,
    *,
    task: str = "t",
    reward: float = 1.0,
    num_steps: int = 3,
    num_tokens: int = 0,
    agent: str = "expert",
) -> Trajectory:
    """Steps have texts of their own; the last one is terminal."""
    steps = tuple(
        Step(text=f"{name} acts {i}", observation=f"{name} sees {i}", is_terminal=i == num_steps - 1)
        for i in range(num_steps)
    )
    prompt = (Message(role="system", content="rules"), Message(role="user", content=f"question of {task}"))
    return Trajectory(
        trajectory_id=name,
        task_key=task,
        agent=agent,
        prompt=prompt,
        steps=steps,
        reward=reward,
        num_tokens=num_tokens,
    )
