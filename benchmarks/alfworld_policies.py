"""ALFWorld's games made offline: lengths of the planner's solutions, and success of random play.

    python -m benchmarks.alfworld_policies [--games 120] [--samples 10] [--max-moves 50]

For the held-out games: commands of the shortest plan, and the success rate of random admissible commands
(``--samples`` plays per game). Prints Markdown; the intervals of the planner are Wilson intervals over games.
No model is needed.
"""

import argparse
from collections.abc import Sequence
from statistics import fmean

from benchmarks.markdown_table import markdown
from outrider.environments.alfworld.environment import AlfworldConfig, AlfworldEnvironment
from outrider.environments.alfworld.made_games import TASK_TYPES
from outrider.environments.text_games import render_action
from outrider.printing import score
from outrider.rollout.evaluate import interval
from outrider.seeding import stream
from outrider.types import Task


def chance(settings: AlfworldConfig, task: Task, sample: int) -> bool:
    """Return whether random admissible commands win the game within ``max_moves``."""
    draw = stream(sample, "alfworld chance", task.key)
    environment = AlfworldEnvironment(settings)
    environment.task = task
    environment.reset(task, 0)
    while environment.game is not None:
        commands = environment.game.commands()
        environment.step(render_action(commands[int(draw.integers(len(commands)))]))
    return environment.result().success


def rows(settings: AlfworldConfig, num_samples: int) -> list[Sequence[str]]:
    """One a task type, and all of them."""
    played: dict[str, list[tuple[int | None, list[bool]]]] = {one: [] for one in (*TASK_TYPES, "all")}
    task_set = AlfworldEnvironment.build(settings)
    for task in task_set.tasks("test"):
        steps = task_set.expert(task, 0)
        won = [chance(settings, task, sample) for sample in range(num_samples)]
        for name in (str(task.metadata["task_type"]), "all"):
            played[name].append((None if steps is None else len(steps), won))
    return [_row(name, found) for name, found in played.items() if found]


def _row(name: str, found: Sequence[tuple[int | None, list[bool]]]) -> Sequence[str]:
    lengths = [length for length, _ in found if length is not None]
    wins = [float(length is not None) for length, _ in found]
    solved = score(fmean(wins), *interval(wins, binary=True))
    draws = [one for _, won in found for one in won]
    drawn = f"{sum(draws)} of {len(draws):,}"
    told = f"{fmean(lengths):.1f} ({min(lengths)} to {max(lengths)})" if lengths else "none"
    return (name, str(len(found)), solved, told, drawn)


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--games", type=int, default=120)
    parser.add_argument("--samples", type=int, default=10)
    parser.add_argument("--max-moves", type=int, default=50)
    arguments = parser.parse_args(given)
    settings = AlfworldConfig(num_test=arguments.games, max_moves=arguments.max_moves)
    header = ("task type", "games", "planner", "its commands", "won by chance")
    print(markdown(header, rows(settings, arguments.samples)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
