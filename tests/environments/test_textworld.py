"""TextWorld: episodes of scripted games, and one real game if the package is installed."""

import copy
import importlib
import importlib.metadata
import importlib.util
import io
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from outrider.environments.base import (
    CopyableEnvironment,
    Env,
    EnvironmentEpisode,
    EnvironmentFactory,
    Split,
    StepResult,
    TaskSet,
)
from outrider.environments.text_games import Reply
from outrider.environments.textworld import games as textworld_games
from outrider.environments.textworld.environment import (
    TextWorldConfig,
    TextWorldEnvironment,
    identity,
    refusal,
)
from outrider.environments.textworld.games import (
    Cooking,
    GameShelf,
    StoryGame,
    clean,
    render_opening,
    walkthrough,
)
from outrider.errors import ConfigError, EnvironmentFault, ToolUnavailable
from outrider.types import Message

# the interpreter says it of all made games
pytestmark = pytest.mark.filterwarnings("ignore:Game .* is not fully supported")
_OPENING = render_opening(("look", "open {o}"), "Find the coin.")


@dataclass(slots=True, kw_only=True)
class ScriptedGame:
    """Answers with the given replies in order; breaks if there are no more."""

    replies: list[Reply] = field(default_factory=list)
    opening: str = _OPENING
    max_score: int = 4
    acted: list[str] = field(default_factory=list)
    num_closed: int = 0

    def act(self, command: str) -> Reply:
        self.acted.append(command)
        if not self.replies:
            raise EnvironmentFault("the scripted game broke")
        return self.replies.pop(0)

    def commands(self) -> tuple[str, ...]:
        return ("go east", "look", "open door")

    def copy(self) -> "ScriptedGame":
        return ScriptedGame(replies=list(self.replies), acted=list(self.acted))

    def close(self) -> None:
        self.num_closed += 1


def reply(score: int, *, won: bool = False, lost: bool = False, text: str = "Done.") -> Reply:
    return Reply(text=text, score=score, won=won, lost=lost)


class Scripted(TextWorldEnvironment):
    """Plays the game in ``shared``."""

    def open_game(self) -> Any:
        identity(self.task, self.settings)
        return self.shared


def unstarted(game: ScriptedGame, **changes: object) -> EnvironmentEpisode:
    config = TextWorldConfig.model_validate(changes)
    return EnvironmentEpisode(Scripted(config, game), Scripted.tasks(config, "train")[0])


def play(game: ScriptedGame, **changes: object) -> EnvironmentEpisode:
    environment = unstarted(game, **changes)
    environment.reset(0)
    return environment


def act(environment: Env, command: str = "look") -> StepResult:
    return environment.step(Message(role="assistant", content=f"I think. <action>{command}</action>"))


def text_of(result: StepResult) -> str:
    [message] = result.observations
    assert message.role == "user"
    return message.content


# --- the record ---


@given(scores=st.lists(st.integers(0, 4), min_size=1, max_size=8), lost=st.booleans())
def test_rewards_always_add_up_to_the_return(scores: list[int], lost: bool) -> None:
    replies = [*map(reply, scores[:-1]), reply(scores[-1], lost=lost)]
    environment = play(ScriptedGame(replies=replies))
    results = [act(environment) for _ in scores]
    record = environment.result()
    assert sum(result.reward for result in results) == pytest.approx(record.episode_return) == scores[-1] / 4
    assert (record.metrics["score"], record.metrics["num_moves"]) == (scores[-1], len(scores))
    assert [result.done for result in results] == [False] * (len(scores) - 1) + [lost]
    assert not record.success and record.metrics["lost"] == lost


def test_a_won_game_ends_and_is_a_success_and_frees_its_interpreter() -> None:
    game = ScriptedGame(replies=[reply(1), reply(4, won=True)])
    environment = play(game, max_moves=2)  # the last move that there is
    assert not act(environment).done and game.num_closed == 0
    last = act(environment)
    assert last.done and not last.truncated and last.reward == pytest.approx(0.75)
    assert (
        environment.result().success and environment.result().episode_return == 1.0 and game.num_closed == 1
    )
    with pytest.raises(RuntimeError, match="has ended"):
        act(environment)


def test_max_moves_counts_commands_and_no_other_text() -> None:
    environment = play(ScriptedGame(replies=[reply(1), reply(1)]), max_moves=2)
    assert not environment.step(Message(role="assistant", content="hm")).done
    assert not act(environment, "save").done
    assert not act(environment).done
    last = act(environment)
    assert last.done and last.truncated
    metrics = environment.result().metrics
    assert (metrics["cut_by_moves"], metrics["num_moves"], metrics["num_turns"], metrics["num_invalid"]) == (
        1,
        2,
        4,
        2,
    )


# --- what the policy writes ---


OUTSIDE = (
    "save|SCRIPT|transcript on|transcripX|restart|quit|q|oops quit|again|tw-trace-actions|tw-print x|"
    "open door. save|yourself, quit|look then save|look; save|\\w|éteindre|<score>|*** The End ***|look\x00|"
    "look \u2028 save?"
)


@pytest.mark.parametrize("command", [*OUTSIDE.split("|"), "x" * 101])
def test_only_single_commands_of_the_game_reach_it(command: str) -> None:
    game = ScriptedGame()
    result = act(play(game), command)
    assert game.acted == [] and result.invalid and not result.done and result.reward == 0
    assert "nothing was done" in text_of(result)


@given(text=st.text() | st.text().map(lambda inner: f"<action>{inner}</action>"))
def test_any_text_gets_an_answer(text: str) -> None:
    game = ScriptedGame(replies=[reply(0)])
    result = play(game).step(Message(role="assistant", content=text))
    assert text_of(result) and result.invalid == (game.acted == [])
    assert all(command.isascii() and command.isprintable() and not refusal(command) for command in game.acted)


def test_a_command_that_the_game_cannot_parse_is_invalid() -> None:
    unknown, absent = "That's not a verb I recognise.", "You can't see any such thing."
    environment = play(ScriptedGame(replies=[reply(0, text=unknown), reply(0, text=absent)]))
    assert act(environment, "sing").invalid
    assert not act(environment, "take moon").invalid


def test_a_command_that_the_game_did_not_execute_is_refused() -> None:
    environment = play(
        ScriptedGame(replies=[reply(0), Reply(text="You can't go that way.", score=0, refused=True)])
    )
    assert act(environment).carried_out
    closed = act(environment, "go north")
    assert closed.refused and not closed.carried_out and not closed.invalid and not closed.done


def test_the_prompt_contains_rules_commands_and_opening() -> None:
    (message,) = unstarted(ScriptedGame(), show_admissible=True, num_shown_actions=2).reset(3)
    for part in (
        "<action>look</action>",
        "look, open OBJ",
        "Find the coin.",
        "go east\nlook\n... and 1 more",
    ):
        assert part in message.content


def test_commands_are_listed_on_demand() -> None:
    assert text_of(act(play(ScriptedGame(replies=[reply(0)])))) == "Done."
    assert text_of(act(play(ScriptedGame(replies=[reply(0, text="")])))) == "Nothing happens."
    assert text_of(act(play(ScriptedGame(replies=[reply(0)]), show_admissible=True))).endswith(
        "go east\nlook\nopen door"
    )


def test_banner_status_line_and_final_question_are_removed() -> None:
    banner = "\n\n   ________  __    __ \n  |        \\|  \\  |  \\\n   \\$$$$$$$$| $$  | $$\n    \\$$ >$$ \n"
    scene = "Find it. It costs $5.\n\n\n\n-= Attic =-\nDark."
    shown = clean(f"{banner}\n{scene}\n\n>      -= Attic =-0/1")
    assert shown == "Find it. It costs $5.\n\n-= Attic =-\nDark."
    end = (
        "\nTaken.\n\n\n      *** The End ***\n\nYou scored 1.\n\n\n"
        "Would you like to RESTART, RESTORE a saved game, QUIT?\n>  -= A =-1/3"
    )
    assert clean(end) == "Taken.\n\n*** The End ***\n\nYou scored 1."


# --- closing ---


def test_closing_during_a_call_does_not_wait_and_the_caller_ends_the_game() -> None:
    inside, leave = threading.Event(), threading.Event()
    closed_at_work: list[int] = []

    class Slow(ScriptedGame):
        def act(self, command: str) -> Reply:
            inside.set()
            leave.wait(30)
            closed_at_work.append(self.num_closed)  # ending an interpreter that works would crash the process
            return reply(1)

    game = Slow()
    environment = play(game)
    thread = threading.Thread(target=act, args=(environment,))
    thread.start()
    assert inside.wait(30)
    environment.close()
    leave.set()
    thread.join(30)
    assert closed_at_work == [0] and game.num_closed == 1
    environment.close()
    assert game.num_closed == 1
    with pytest.raises(EnvironmentFault, match="closed"):
        environment.reset(0)


def test_an_environment_can_be_reset_again_and_a_step_before_the_first_reset_is_a_fault() -> None:
    game = ScriptedGame(replies=[reply(3), reply(3)])
    environment = play(game)
    act(environment)
    environment.reset(1)
    assert environment.result().episode_return == 0 and game.num_closed == 1
    with pytest.raises(EnvironmentFault, match="no game"):
        act(unstarted(game))


# --- tasks, config, what is missing ---


def test_task_keys_are_frozen_unique_and_depend_on_the_games_settings() -> None:
    family = TextWorldEnvironment.build(TextWorldConfig(num_train=3))
    keys = [task.key for split in ("train", "valid", "test") for task in family.tasks(split)]
    assert len(set(keys)) == len(keys) == 3 + 2 + 4
    assert keys[:2] == ["textworld/quest-9f83bdf88c61/train/0", "textworld/quest-9f83bdf88c61/train/1"]
    other = TextWorldEnvironment.build(TextWorldConfig(num_train=3, game_seed=1))
    larger = TextWorldEnvironment.build(
        TextWorldConfig.model_validate({"game": {"type": "quest", "num_rooms": 3}, "num_train": 3})
    )
    assert len({f.tasks("train")[0].key for f in (family, other, larger)}) == 3
    same = TextWorldEnvironment.build(TextWorldConfig(num_train=9, max_moves=7, cache=Path("elsewhere")))
    # rules of play and a longer list leave the games alone
    assert same.tasks("train")[:3] == family.tasks("train")
    with pytest.raises(ConfigError, match="not a task of these"):
        EnvironmentEpisode(Scripted(TextWorldConfig(num_train=3)), other.tasks("train")[0]).reset(0)
    with pytest.raises(ConfigError, match="split"):
        family.tasks("dev")


@pytest.mark.parametrize(
    "changes",
    [
        {"num_train": 0, "num_valid": 0, "num_test": 0},
        {"max_moves": 0},
        {"game": {"type": "chess"}},
        {"game": {"type": "quest", "quest_length": 2, "quest_breadth": 3}},
        {"game": {"type": "coin_collector", "level": 151}},
        {"game": {"type": "treasure_hunter", "level": 31}},
        {"game": {"type": "cooking", "num_ingredients": 1, "num_to_find": 2}},
        {"game": {"type": "cooking", "num_rooms": 2}},
    ],
)
def test_an_impossible_config_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        TextWorldConfig.model_validate(changes)


def test_a_missing_package_and_another_version_are_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    family = TextWorldEnvironment.build(TextWorldConfig())
    with monkeypatch.context() as patch:
        patch.setattr(importlib.util, "find_spec", lambda name: None)
        with pytest.raises(ToolUnavailable, match=r"pip install 'outrider\[textworld\]'"):
            family.make()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "9.9")
    with pytest.raises(ToolUnavailable, match=r"9\.9 found"):
        family.expert(family.tasks("train")[0], 0)


def test_the_default_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    assert TextWorldConfig().shelf().root == tmp_path / "textworld"
    assert TextWorldConfig(cache=tmp_path / "own").shelf().root == tmp_path / "own"


@pytest.mark.parametrize(
    ("status", "kind"), [(3, ConfigError), (1, EnvironmentFault), (-9, EnvironmentFault)]
)
def test_the_childs_status_decides_the_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, status: int, kind: type[Exception]
) -> None:
    finished = subprocess.CompletedProcess(
        [], status, stdout="", stderr="Traceback\nno quest of this length\n"
    )
    monkeypatch.setattr(textworld_games, "_run_child", lambda order, limit_s: finished)
    with pytest.raises(kind, match="no quest of this length"):
        TextWorldConfig(cache=tmp_path).shelf().ensure([("train", 0)])


def test_making_that_stalls_is_a_fault_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(textworld_games, "_LEAD_S", 0.02)
    shelf = TextWorldConfig(cache=tmp_path, make_limit_s=0.01).shelf()
    with pytest.raises(EnvironmentFault, match=r"within 0\.03 s"):
        shelf.ensure([("train", 0)])
    assert list((tmp_path / shelf.name).iterdir()) == []


def test_concurrent_requests_make_a_game_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    orders: list[tuple[tuple[Split, int], ...]] = []
    shelf = TextWorldConfig(cache=tmp_path, num_makers=2).shelf()

    def make(order: textworld_games._Order, limit_s: float) -> "subprocess.CompletedProcess[str]":
        orders.append(order.keys)
        for key in order.keys:
            shelf.story(*key).parent.mkdir()
            shelf.story(*key).touch()
        return subprocess.CompletedProcess([], 0, stdout="", stderr="")

    monkeypatch.setattr(textworld_games, "_run_child", make)
    wanted: list[tuple[Split, int]] = [("train", 0), ("train", 1), ("train", 2)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: shelf.ensure(wanted), range(8)))
    assert sorted(orders) == [(("train", 0), ("train", 2)), (("train", 1),)]  # two makers share the work


def run_maker(monkeypatch: pytest.MonkeyPatch, shelf: GameShelf, make_one: Callable[..., None]) -> int:
    """The child's program in this process, with its games made by ``make_one``."""
    work = shelf.root / "work"
    work.mkdir(parents=True)
    (shelf.root / shelf.name).mkdir(exist_ok=True)
    wanted = (("train", 0), ("test", 1))
    order = textworld_games._Order(shelf=shelf, keys=wanted, work=work)
    monkeypatch.setattr(sys, "stdin", io.StringIO(order.model_dump_json()))
    monkeypatch.setattr(textworld_games, "_make_game", make_one)
    return textworld_games.main()


def test_the_game_of_the_first_maker_to_finish_is_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    shelf = TextWorldConfig(cache=tmp_path).shelf()

    def make(order: object, split: Split, index: int, folder: Path) -> None:
        assert not shelf.story(split, index).exists()
        folder.mkdir()
        (folder / "game.z8").write_text("ours")
        if split == "train":  # the other maker finishes now
            shelf.story(split, index).parent.mkdir()
            shelf.story(split, index).write_text("theirs")

    assert run_maker(monkeypatch, shelf, make) == 0
    assert [shelf.story(*key).read_text() for key in (("train", 0), ("test", 1))] == ["theirs", "ours"]


def test_an_impossible_game_has_its_own_status(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def make(*_: object) -> None:
        raise ConfigError("no quest of this length")

    shelf = TextWorldConfig(cache=tmp_path).shelf()
    assert run_maker(monkeypatch, shelf, make) == 3 and "no quest of this length" in capsys.readouterr().err
    assert list((tmp_path / shelf.name).iterdir()) == []


# --- one real game: three points, and eating an ingredient raw loses it ---


@pytest.fixture(scope="session")
def families(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, ...]:
    """The same game made twice, in two folders, by two processes that would hash in different orders."""
    pytest.importorskip("textworld", reason="TextWorld is an optional extra")
    configs = [
        TextWorldConfig(game=Cooking(), num_train=1, cache=tmp_path_factory.mktemp("games"), make_ahead=False)
        for _ in range(2)
    ]
    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(2) as pool:
        patch.delenv("PYTHONHASHSEED", raising=False)
        patch.setenv("INFORM_HOME", "/nowhere")
        # ensure() makes one after the other
        list(pool.map(lambda config: config.shelf()._make([("train", 0)]), configs))
    return tuple(map(TextWorldEnvironment.build, configs))


@pytest.fixture(scope="session")
def family(families: tuple[Any, ...]) -> Any:
    return families[0]


@pytest.fixture(scope="session")
def gold(family: Any) -> tuple[str, ...]:
    return walkthrough(family.settings.shelf().story("train", 0))


def start(family: Any) -> EnvironmentEpisode:
    environment = family.make()(family.tasks("train")[0])
    environment.reset(0)
    return environment


def with_listing(family: Any, show: bool) -> Any:
    return TextWorldEnvironment.build(family.settings.model_copy(update={"show_admissible": show}))


def test_the_same_settings_make_the_same_bytes_in_any_process(families: tuple[Any, ...]) -> None:
    shelves = [family.settings.shelf() for family in families]
    folders = [shelf.root / shelf.name for shelf in shelves]
    files = [
        {path.relative_to(f).as_posix(): path.read_bytes() for path in f.rglob("*") if path.is_file()}
        for f in folders
    ]
    assert files[0] == files[1] and sorted(files[0]) == ["train-0/game.json", "train-0/game.z8"]
    assert files[0]["train-0/game.z8"][0x12:0x18] == b"000000"  # where the compiler writes the day
    assert [path.name for path in folders[0].iterdir()] == ["train-0"]  # and no work is left behind


def test_the_walkthrough_wins_every_point(family: Any, gold: tuple[str, ...]) -> None:
    typed: TaskSet = family
    factory: EnvironmentFactory = typed.make()
    task = typed.tasks("train")[0]
    steps = typed.expert(task, 0)
    assert steps is not None and [step.is_terminal for step in steps] == [False] * (len(steps) - 1) + [True]
    environment = factory(task)
    (prompt,) = environment.reset(9)
    assert "cookbook" in prompt.content and "$$" not in prompt.content and "tw-" not in prompt.content
    results = [environment.step(Message(role="assistant", content=step.text)) for step in steps]
    assert [text_of(result) for result in results] == [step.observation for step in steps]
    record = environment.result()
    assert record.success and record.episode_return == 1.0 and record.metrics["max_score"] == 3
    assert sum(result.reward > 0 for result in results) == 3
    assert sum(result.reward for result in results) == pytest.approx(1.0)
    assert all(refusal(command) == "" for command in gold)


def test_an_expert_beyond_max_moves_is_none_and_losing_ends_the_game(
    family: Any, gold: tuple[str, ...]
) -> None:
    short = TextWorldEnvironment.build(family.settings.model_copy(update={"max_moves": 2}))
    assert short.expert(short.tasks("train")[0], 0) is None
    environment = start(family)
    (take,) = [command for command in gold if command.startswith("take ")]
    for command in gold[: gold.index(take) + 1]:
        act(environment, command)
    last = act(environment, f"eat {take.removeprefix('take ').split(' from ')[0]}")
    assert last.done and not last.truncated and "You lost" in text_of(last)
    record = environment.result()
    assert (record.success, record.metrics["lost"], record.metrics["score"]) == (False, 1.0, 1.0)


@pytest.mark.parametrize("show", [False, True])
def test_the_real_game_reports_refused_commands(family: Any, gold: tuple[str, ...], show: bool) -> None:
    """A walkthrough is carried out to its end, what is not possible is refused, and no player reads how
    that is known.
    """
    environment = start(with_listing(family, show))
    for command in ("take moon", "eat me", "dance", "unlock me with me"):
        assert act(environment, command).refused, command
    copied = environment.copy()
    for played in (environment, copied):
        results = [act(played, command) for command in ("look", "inventory", "wait", *gold)]
        assert all(result.carried_out for result in results) and results[-1].done
        assert not any("[" in text_of(result) for result in results)
        played.close()


@pytest.mark.parametrize("show", [False, True])
def test_a_fork_plays_like_the_original_and_is_independent(
    family: Any, gold: tuple[str, ...], show: bool
) -> None:
    family = with_listing(family, show)
    for cut in (0, len(gold) // 2, len(gold) - 1):
        environment: CopyableEnvironment = start(family)
        for command in gold[:cut]:
            environment.step(Message(role="assistant", content=f"<action>{command}</action>"))
        fork = environment.copy()
        assert isinstance(fork, EnvironmentEpisode) and fork.result() == environment.result()
        wandering = fork.copy()
        for command in ("drop cookbook", "go north", "wait"):
            act(wandering, command)
        wandering.close()
        messages = [
            Message(role="assistant", content=f"<action>{command}</action>") for command in gold[cut:]
        ]
        theirs = [environment.step(message) for message in messages]
        environment.close()
        ours = [fork.step(message) for message in messages]
        assert ours == theirs and ours[-1].done and fork.result() == environment.result()
        ended = fork.copy()
        assert ended.result().success


def test_admissible_commands_are_sorted_and_can_be_written(family: Any) -> None:
    game = StoryGame.start(family.settings.shelf().story("train", 0), with_commands=True)
    commands = game.commands()
    assert list(commands) == sorted(commands) and "look" in commands
    assert [command for command in commands if refusal(command.lower())] == []
    game.close()
    game.close()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    words=st.lists(
        st.sampled_from(["take", "all", "cookbook", "me", "in", "x", "again", "9", "-", "'", "put"])
        | st.text(max_size=8)
    )
)
def test_the_real_game_answers_any_text(family: Any, words: list[str]) -> None:
    environment = start(family)
    for text in (" ".join(words), f"<action>{' '.join(words)}</action>", "<action>look</action>"):
        result = environment.step(Message(role="assistant", content=text))
        assert text_of(result) and "\n>" not in text_of(result)
    environment.close()


def test_games_in_several_threads_have_the_same_texts(family: Any, gold: tuple[str, ...]) -> None:
    logic = pytest.importorskip("textworld.logic")
    factory = TextWorldEnvironment.build(family.settings.model_copy(update={"show_admissible": True})).make()
    task = family.tasks("train")[0]

    def episode(_: int) -> list[str]:
        environment = factory(task)
        texts = [message.content for message in environment.reset(0)]
        for command in gold[:2]:
            texts.append(text_of(act(environment, command)))
        twin = environment.copy()
        environment.close()
        texts += [text_of(act(twin, command)) for command in gold[2:]]
        return texts

    alone = episode(0)
    # as in a new process: loading parses, with one parser for all threads
    logic.GameLogic.parse.cache_clear()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)  # threads interrupt each other 500 times as often
    try:
        with ThreadPoolExecutor(4) as pool:
            assert all(texts == alone for texts in pool.map(episode, range(8)))
    finally:
        sys.setswitchinterval(interval)


@pytest.mark.parametrize("other", ["moves", "starts", "is copied"])
def test_a_copy_locks_the_rules_that_games_share(
    family: Any, monkeypatch: pytest.MonkeyPatch, other: str
) -> None:
    story = family.settings.shelf().story("train", 0)
    first, second = (StoryGame.start(story, with_commands=True) for _ in range(2))
    copying, done = threading.Event(), threading.Event()
    overtaken: list[bool] = []

    def slow_copy(value: object) -> object:
        if not copying.is_set():
            copying.set()
            overtaken.append(done.wait(0.5))
        return copy.deepcopy(value)

    def interfere() -> None:
        assert copying.wait(30)
        if other == "moves":
            second.act("look")
        else:
            (StoryGame.start(story, with_commands=True) if other == "starts" else second.copy()).close()
        done.set()

    monkeypatch.setattr(importlib.import_module("textworld.core"), "deepcopy", slow_copy)
    with ThreadPoolExecutor(1) as pool:
        interfering = pool.submit(interfere)
        first.copy().close()
        interfering.result(60)
    assert overtaken == [False]


def test_settings_and_factory_can_be_pickled(family: Any) -> None:
    assert pickle.loads(pickle.dumps(family.settings)) == family.settings
    factory = pickle.loads(pickle.dumps(family.make()))
    environment = factory(pickle.loads(pickle.dumps(family.tasks("train")[0])))
    assert environment.reset(0) == start(family).reset(0)
    environment.close()


def test_a_broken_game_file_is_an_error_with_its_folder(family: Any, tmp_path: Path) -> None:
    config = family.settings.model_copy(update={"cache": tmp_path})
    story = config.shelf().story("train", 0)
    story.parent.mkdir(parents=True)
    story.write_bytes(b"")
    story.with_suffix(".json").write_text("{}")
    with pytest.raises(ToolUnavailable, match="train-0"):
        TextWorldEnvironment.build(config).make()


def test_splits_draw_different_games() -> None:
    keys: list[tuple[Split, int]] = [("train", 0), ("train", 1), ("valid", 0), ("test", 0)]
    draws = {tuple(textworld_games.draw_seeds(0, split, index, attempt=0).values()) for split, index in keys}
    assert len(draws) == len(keys)
