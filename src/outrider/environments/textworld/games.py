"""Making TextWorld games (Côté et al. 2018, arXiv 1806.11532), and the folder of made games.

A child process (``python -m`` of this module) makes the games with a fixed hash seed, because TextWorld's
iteration over sets reaches the bytes of some games, and because its generator keeps state for the whole
process. A game is kept only if its own walkthrough wins it.
"""

import copy
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import Field, model_validator

from outrider.config import Settings
from outrider.environments.base import Split
from outrider.environments.text_games import Reply
from outrider.errors import ConfigError, EnvironmentFault
from outrider.seeding import stream

MAX_ROOMS: Final = 100
PACKAGE_VERSION: Final = "1.7.0"
MAX_ATTEMPTS: Final = 20
"""Number of draws after which a game is considered impossible with its settings."""
_FORMAT: Final = 1  # raise it when our way of making games changes: old ones are then made again
_IMPOSSIBLE: Final = 3  # exit status of the child
_LEAD_S: Final = 60.0  # starting Python and loading the package, on a busy machine
# Variables that would change games without changing their key.
_SWITCHES: Final = ("INFORM_HOME", "TEXTWORLD_DEBUG", "TEXTWORLD_I6_DEBUG")
_SERIAL: Final = slice(0x12, 0x18)  # of a Z-machine story: the day of compilation; outside of the checksum
# The rollouts of a group need the same game at once: one thread makes it, the others wait.
_MAKING: Final = threading.Lock()


class QuestGame(Settings):
    """A random house with a random quest: TextWorld's own generator."""

    type: Literal["quest"] = "quest"
    num_rooms: Annotated[int, Field(ge=1, le=MAX_ROOMS)] = 2
    """Number of rooms."""
    num_objects: Annotated[int, Field(ge=1)] = 4
    """Number of things in the house; more if the quest needs them."""
    quest_length: Annotated[int, Field(ge=1)] = 3
    """Number of commands that the quest is made from; with several goals the shortest way can be shorter."""
    quest_breadth: Annotated[int, Field(ge=1)] = 1
    """Number of goals, each worth a point."""
    goal_only: bool = False
    """Describe only the last command of the quest, neither the way there nor other goals."""

    @model_validator(mode="after")
    def _validate(self) -> "QuestGame":
        if self.quest_breadth > self.quest_length:
            raise ValueError(
                "quest_breadth cannot be more than quest_length: a goal takes at least one command"
            )
        return self


class CoinCollector(Settings):
    """A chain of rooms with a coin at its end. Levels 1 to 100 are its length; 101 to 150 are the same with
    as many dead ends, 201 to 233 with twice as many.
    """

    type: Literal["coin_collector"] = "coin_collector"
    level: Annotated[int, Field(ge=1, le=300)] = 5
    """Length of the chain and number of dead ends."""
    goal_only: bool = True
    """Describe only the goal and not the way there."""

    @model_validator(mode="after")
    def _validate(self) -> "CoinCollector":
        shape, length = divmod(self.level - 1, 100)
        if (shape + 1) * (length + 1) > MAX_ROOMS:
            raise ValueError(
                f"level {self.level} has {(shape + 1) * (length + 1)} rooms, more than a game's {MAX_ROOMS}"
            )
        return self


class TreasureHunter(Settings):
    """A maze with one thing to take and one that loses the game. From level 11 doors are closed, from level
    21 locked.
    """

    type: Literal["treasure_hunter"] = "treasure_hunter"
    level: Annotated[int, Field(ge=1, le=30)] = 5
    """Difficulty of the maze."""
    goal_only: bool = True
    """Describe only the thing to take and not the way there."""


class Cooking(Settings):
    """Find a recipe, fetch and prepare its ingredients, and eat (the First TextWorld Problems). A wrong
    preparation loses the game. The splits differ in foods and preparations, as in the competition.
    """

    type: Literal["cooking"] = "cooking"
    num_ingredients: Annotated[int, Field(ge=1, le=5)] = 1
    """Number of ingredients of the recipe."""
    num_to_find: Annotated[int, Field(ge=0, le=5)] = 1
    """Number of ingredients that are not in the inventory at the start."""
    num_rooms: Literal[1, 6, 9, 12] = 1
    """Number of rooms."""
    open: bool = False
    """Whether doors and containers start closed."""
    cook: bool = False
    """Whether ingredients must be cooked."""
    cut: bool = False
    """Whether ingredients must be cut."""
    drop: bool = False
    """Whether the inventory is limited."""

    @model_validator(mode="after")
    def _validate(self) -> "Cooking":
        if self.num_to_find > self.num_ingredients:
            raise ValueError("num_to_find cannot be more than num_ingredients")
        return self


GameSettings = Annotated[QuestGame | CoinCollector | TreasureHunter | Cooking, Field(discriminator="type")]


@dataclass(frozen=True, slots=True, kw_only=True)
class GameShelf:
    """The made games of one kind and seed, each in a folder of its own.

    Folders appear atomically, and processes may share a shelf: if two make the same game, that of the first
    to finish is kept. A kill leaves at most a hidden folder of unfinished work.
    """

    root: Path
    game: GameSettings
    game_seed: int
    num_makers: int = 2
    make_limit_s: float = 120.0

    @property
    def name(self) -> str:
        """Kind, and a hash of everything that determines the games."""
        key = {
            "format": _FORMAT,
            "game": self.game.model_dump(mode="json"),
            "seed": self.game_seed,
            "textworld": PACKAGE_VERSION,
        }
        digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
        return f"{self.game.type}-{digest[:12]}"

    def story(self, split: Split, index: int) -> Path:
        """Path of a game's story file, whether it exists or not; its description is next to it."""
        return self.root / self.name / f"{split}-{index}" / "game.z8"

    def ensure(self, keys: Sequence[tuple[Split, int]]) -> None:
        """Make the missing games (2 to 5 s per game) with up to ``num_makers`` processes.

        Raises ConfigError if no game is possible with the settings, and EnvironmentFault if making fails.
        """
        if all(self.story(*key).exists() for key in keys):
            return
        with _MAKING:
            missing = [key for key in keys if not self.story(*key).exists()]
            shares = [
                missing[first :: self.num_makers] for first in range(min(self.num_makers, len(missing)))
            ]
            with ThreadPoolExecutor(max_workers=self.num_makers) as pool:
                list(pool.map(self._make, shares))

    def _make(self, keys: Sequence[tuple[Split, int]]) -> None:
        folder = self.root / self.name
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=folder, prefix=".work-", ignore_cleanup_errors=True) as work:
                order = _Order(shelf=self, keys=tuple(keys), work=Path(work).absolute())
                finished = _run_child(order, limit_s=_LEAD_S + self.make_limit_s * len(keys))
        except OSError as error:
            raise EnvironmentFault(f"cannot make TextWorld games in {folder}: {error}") from error
        last_words = (finished.stderr.strip().splitlines() or ["no message"])[-1]
        if finished.returncode == _IMPOSSIBLE:
            raise ConfigError(last_words)
        if finished.returncode != 0:
            raise EnvironmentFault(f"TextWorld made no game (status {finished.returncode}): {last_words}")


class _Order(Settings):
    """The child's standard input."""

    shelf: GameShelf
    keys: tuple[tuple[Split, int], ...]
    work: Path


def _run_child(order: _Order, *, limit_s: float) -> "subprocess.CompletedProcess[str]":
    environment = {key: value for key, value in os.environ.items() if key not in _SWITCHES}
    environment |= {"PYTHONHASHSEED": "0", "PYTHONUTF8": "1"}
    command = [sys.executable, "-P", "-m", "outrider.environments.textworld.games"]
    try:
        return subprocess.run(
            command, input=order.model_dump_json(), env=environment, capture_output=True, encoding="utf-8",
            timeout=limit_s, start_new_session=True,  # Ctrl-C is for the trainer
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise EnvironmentFault(f"TextWorld made no game within {limit_s:g} s") from error


def main() -> int:
    """Main function of the child. Each game is moved to its final location when it is complete."""
    parent = os.getppid()
    order = _Order.model_validate_json(sys.stdin.read())
    shelf = order.shelf
    for split, index in order.keys:
        if os.getppid() != parent:  # the parent was killed
            return 1
        target = shelf.story(split, index).parent
        folder = order.work / target.name
        try:
            _make_game(shelf, split, index, folder)
        except ConfigError as error:
            print(error, file=sys.stderr)
            return _IMPOSSIBLE
        with suppress(OSError):  # another process finished first: its game is the same
            folder.rename(target)
        if not shelf.story(split, index).exists():
            print(f"cannot write {target}", file=sys.stderr)
            return 1
    return 0


def _make_game(shelf: GameShelf, split: Split, index: int, folder: Path) -> None:
    """Draw games until the walkthrough of one wins it. The draws depend on the seeds only."""
    from textworld.generator import compile_inform7_game, generate_inform7_source

    problem = ""
    for attempt in range(MAX_ATTEMPTS):
        try:
            game = _draw(shelf.game, split, draw_seeds(shelf.game_seed, split, index, attempt))
            source = generate_inform7_source(game)
        except OSError:
            raise
        except Exception as error:  # for example, no quest of this length; the next draw may succeed
            problem = f"{type(error).__name__}: {' '.join(str(error).split())}"
            continue
        folder.mkdir(exist_ok=True)
        story = folder / "game.z8"
        game.save(str(story.with_suffix(".json")))
        compile_inform7_game(source, str(story))
        story.with_suffix(".ni").unlink()
        data = bytearray(story.read_bytes())
        data[_SERIAL] = b"000000"
        story.write_bytes(data)
        with closing(StoryGame.start(story, with_commands=False)) as started:
            replies = [started.act(command) for command in walkthrough(story)]
        if any(reply.won and reply.score == started.max_score for reply in replies):
            return
        problem = "its walkthrough does not win it"
    raise ConfigError(f"no TextWorld game with {shelf.game!r} in {MAX_ATTEMPTS} draws; the last: {problem}")


def draw_seeds(game_seed: int, split: Split, index: int, attempt: int) -> dict[str, int]:
    """The seeds of the package's four generators for one draw of a game."""
    draws = stream(game_seed, "textworld game", split, index, attempt).integers(2**31, size=4)
    return dict(zip(("map", "objects", "quest", "grammar"), map(int, draws), strict=True))


def _draw(settings: GameSettings, split: Split, seeds: dict[str, int]) -> Any:
    from textworld import GameOptions
    from textworld.challenges import CHALLENGES
    from textworld.generator import make_game

    options = GameOptions()
    options.seeds = seeds
    if isinstance(settings, Cooking):
        skills = settings.model_dump(include={"open", "cook", "cut", "drop"})
        sizes = {"recipe": settings.num_ingredients, "take": settings.num_to_find, "go": settings.num_rooms}
        return CHALLENGES["tw-cooking"][1]({**skills, **sizes, "recipe_seed": 0, "split": split}, options)
    options.grammar.only_last_action = settings.goal_only
    if isinstance(settings, QuestGame):
        options.nb_rooms, options.nb_objects = settings.num_rooms, settings.num_objects
        options.quest_length, options.quest_breadth = settings.quest_length, settings.quest_breadth
        return make_game(options)
    return CHALLENGES[f"tw-{settings.type}"][1]({"level": settings.level}, options)


if __name__ == "__main__":
    sys.exit(main())


# A TextWorld game in play.


# Games with the same rules share one object of the package. Its parser is not re-entrant, and its rules
# remember what they were applied to: a game that lists commands adds to that whenever it starts, moves or is
# copied, and copying any game iterates over it ("dictionary changed size during iteration"). Hence one lock
# for all of it.
_RULES: Final = threading.Lock()
# Reports of a traced game between the lines that a player reads. Those with a parenthesis are parts of
# others.
_TRACED: Final = re.compile(r"\[[^]]+\]\n?")
_DONE: Final = re.compile(r"\[[^]()]+ - succeeded\]")


INSTRUCTIONS: Final = (
    "You play a text adventure and reach its goal by typing commands, one a turn.\n"
    "You may think first. Then write exactly one command between <action> and </action>, for example "
    "<action>look</action>. The next message tells what happened.\n"
    "Commands, where OBJ stands for a thing that you can see or carry (for example: open fridge):\n"
    "{templates}"
)


def render_opening(command_templates: Iterable[str], text: str) -> str:
    """The first message: instructions, goal and first room. Gaps of a template are written as OBJ."""
    templates = sorted({re.sub(r"\{.*?\}", "OBJ", template) for template in command_templates})
    return f"{INSTRUCTIONS.format(templates=', '.join(templates))}\n\n{text}"


class StoryGame:
    """A story file in the package's interpreter, which loads a library per game (0.02 to 0.5 s)."""

    def __init__(self, environment: Any, state: Any, *, with_commands: bool) -> None:
        """``environment`` is a started environment of the package; see :meth:`start`."""
        self._environment = environment
        self._state = state
        self._with_commands = with_commands
        self.opening = render_opening(state["command_templates"], clean(state["feedback"]))
        self.max_score = int(state["max_score"])

    @classmethod
    def start(cls, story: Path, *, with_commands: bool) -> "StoryGame":
        """Start a game. ``with_commands``: track the possible commands, which halves the speed.

        Raises EnvironmentFault.
        """
        with _faults(f"cannot start the game {story} (delete its folder to make it again)"):
            import textworld

            infos = textworld.EnvInfos(admissible_commands=with_commands)
            with _RULES:
                environment = textworld.start(str(story), infos)
                state = environment.reset()
                # The package does the same when it tracks the game's logic.
                environment.unwrapped._send("tw-trace-actions")
                return cls(environment, state, with_commands=with_commands)

    def act(self, command: str) -> Reply:
        with _faults("the game broke"), _RULES if self._with_commands else nullcontext():
            self._state, _, _ = self._environment.step(command)
            state = self._state
            won, lost = bool(state["won"]), bool(state["lost"])
            return Reply(
                text=clean(_TRACED.sub("", state["feedback"])),
                score=int(state["score"]),
                won=won,
                lost=lost,
                refused=not (won or lost or _DONE.search(state["raw"])),
            )

    def commands(self) -> tuple[str, ...]:
        """The possible commands; only for a game that was started ``with_commands``."""
        return tuple(self._state["admissible_commands"])

    def copy(self) -> "StoryGame":
        with _faults("the game cannot be copied"), _RULES:
            twin = copy.copy(self)
            twin._environment = self._environment.copy()
            return twin

    def close(self) -> None:
        self._environment.close()


def walkthrough(story: Path) -> tuple[str, ...]:
    """The commands that win a game. Raises EnvironmentFault if its description cannot be read."""
    with _faults(f"cannot read the description of {story}"):
        description = json.loads(story.with_suffix(".json").read_text(encoding="utf-8"))
        return tuple(str(command) for command in description["metadata"]["walkthrough"])


def clean(text: str) -> str:
    """A game's text without banner, status line, prompt, the question after the end, and repeated blank
    lines.
    """
    text = re.sub(r"(?m)^[ _|\\/$<>]*[_|$][ _|\\/$<>]*$", "", text)
    text = re.sub(r"\n>[^\n]*\Z", "", text.rstrip())
    text = re.sub(r"\n\s*Would you like to RESTART, RESTORE a saved game.*\Z", "", text, flags=re.DOTALL)
    lines = [line.strip() if "***" in line else line.rstrip() for line in text.splitlines()]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()


@contextmanager
def _faults(operation: str) -> Iterator[None]:
    try:
        yield
    # The package raises all kinds of exceptions; the run must survive each of them.
    except Exception as error:
        raise EnvironmentFault(f"TextWorld: {operation}: {type(error).__name__}: {error}") from error
