"""From recorded rollouts to a critic to better play: through the loop on a walk, and by the commands in the
shop.
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from outrider.algorithms.retrospex import CriticSettings, RescoringEngine, RetrospexSettings, encode_turns
from outrider.algorithms.retrospex_critic import Critic, train
from outrider.cli import main
from outrider.config import validate
from outrider.engines.base import Engine, Request
from outrider.environments.base import EpisodeResult, StepResult
from outrider.evaluation.critic_training import build_trajectories, recorded_trajectories
from outrider.memory.embedders import HashEmbedder
from outrider.rollout.settings import Limits
from outrider.trace import Trace
from outrider.training.step_records import trace_rows
from outrider.types import Message
from tests.evaluation.test_recorded import run_of
from tests.rollout.fakes import TOKENIZER, Factory, scheduler, scripted, tasks
from tests.tiny import save_tiny_model

LIMITS = Limits(max_turns=8, max_response_tokens=3000, step_timeout_s=60)
ACTIONS = ("left", "right", "give up")


class Walk:
    """The lamp is four rooms to the right; who gives up gets nothing."""

    def reset(self, seed: int) -> Sequence[Message]:
        self.place, self.over = 1, False
        return (Message(role="user", content="find the lamp"),)

    def step(self, message: Message) -> StepResult:
        said = message.content.removeprefix("<a>").removesuffix("</a>")
        self.place += {"left": -1, "right": 1, "give up": 0}[said]
        self.place, self.over = max(0, self.place), said == "give up" or self.place == 4
        answer = None if self.over else Message(role="user", content=f"this is room{self.place}")
        return StepResult(message=answer, done=self.over, reward=self.result().episode_return)

    def result(self) -> EpisodeResult:
        found = float(self.place == 4)
        return EpisodeResult(episode_return=found, success=bool(found))

    def close(self) -> None:
        """Nothing is held."""


def wander(request: Request, text: str) -> str:
    return f"<a>{np.random.default_rng(request.seed).choice(ACTIONS)}</a>"


def play(engine: Engine, num: int, *, seed: int) -> list[Trace]:
    made = scheduler(engine, Factory(lambda task, n: Walk()), limits=LIMITS, stop=("</a>",), seed=seed)
    return made.run(tasks(1), modes=("plain",) * num, training_step=0).traces


def mean_return(traces: list[Trace]) -> float:
    return float(np.mean([leaf.episode_return for one in traces for leaf, _ in one.rollouts()]))


@pytest.mark.slow
def test_a_critic_of_earlier_walks_improves_a_random_walk() -> None:
    wanderer = scripted(wander)
    recorded = play(wanderer, 300, seed=0)
    settings = CriticSettings(
        embedder="hash", hidden=32, learning_rate=1e-3, num_updates=500, target_rate=0.05
    )
    paths = build_trajectories(trace_rows(recorded, step=0, tokenizer=TOKENIZER).nodes, name="run")
    embedder = HashEmbedder()
    critic = Critic(train(encode_turns(paths, embedder), settings), embedder, settings)
    alone = mean_return(play(wanderer, 100, seed=1))
    chosen = validate(RetrospexSettings, {"critic": "none", "decay": 0.9, "floor": 0.5})
    helped = mean_return(play(RescoringEngine(wanderer, critic, chosen), 100, seed=1))
    assert alone < 0.2 and helped > 0.5, (alone, helped)  # its first turn is the wanderer's own


RECIPE = """
seed = 1
num_threads = 1
model = {{ name = "{root}/model", precision = "float32", context_length = 4096 }}
environment = {{ type = "webshop", num_test = 2, show_actions = false }}
algorithm = {{ type = "grpo", group_size = 2 }}
rollout = {{ max_turns = 2, max_turn_tokens = 12, max_response_tokens = 900, max_observation_tokens = 300 }}
evaluation = {{ num_tasks = 2, num_samples = 2, temperature = 1.0 }}
"""


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("critic")
    config = save_tiny_model(root / "model") / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"max_position_embeddings": 4096}))
    path = root / "shop.toml"
    path.write_text(RECIPE.format(root=root))
    return path


def test_commands_record_train_and_use_a_critic(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = recipe.parent
    plain, critic = root / "plain", root / "critic.safetensors"
    record = ["eval", str(recipe), "--progress", "none", "evaluation.split=train", "--run", str(plain)]
    assert main(record) == 0
    recorded = recorded_trajectories(plain)
    assert len(recorded) == 4 and all(one.prompt[0].content and one.steps for one in recorded)
    learn = ["critic", "--from", str(plain), "--out", str(critic), "embedder=hash", "num_updates=40"]
    assert main(learn) == 0
    output = capsys.readouterr().out
    assert "4 trajectories" in output and "40 of 40 updates" in output and "engine.type=retrospex" in output
    first = critic.read_bytes()
    assert main(learn) == 2 and "exists" in capsys.readouterr().err
    critic.rename(root / "first")
    assert main(learn) == 0 and critic.read_bytes() == first
    played = [
        "eval", str(recipe), "--progress", "none", f"engine={{type='retrospex', critic='{critic}'}}",
        "engine.preset=webshop", "evaluation.split=train",
    ]  # fmt: skip
    records = []
    for name in ("one", "other"):
        assert main([*played, "--run", str(root / name)]) == 0
        records.append((root / name / "evaluations.jsonl").read_text())
        config = (root / name / "config.toml").read_text()
        assert re.search(r"num_candidates = 4", config) and str(critic) in config
    assert records[0] == records[1]
    texts = [[step.text for one in recorded_trajectories(root / name) for step in one.steps]
             for name in ("plain", "one")]  # fmt: skip
    assert texts[0] != texts[1]  # the critic, random as it is, has chosen


def test_a_bad_source_or_critic_is_one_line(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = ["--out", str(tmp_path / "critic"), "embedder=hash"]
    assert main(["critic", "--from", str(tmp_path), *out]) == 1
    assert "no run directory" in capsys.readouterr().err
    assert main(["critic", "--from", str(tmp_path / "gone.jsonl"), *out]) == 1
    assert main(["critic", "--from", str(tmp_path), *out, "expectile=1.5"]) == 2
    assert main(["critic", "--from", str(tmp_path), "--out", str(tmp_path / "gone" / "critic")]) == 2
    assert "is no folder" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    for folder, problem in (("empty", "is no critic"), ("gone", "engine.critic")):
        missing = ["engine.type=retrospex", f"engine.critic={tmp_path / folder}"]
        assert (
            main(["eval", str(recipe), "--run", str(tmp_path / "run"), "--progress", "none", *missing]) == 1
        )
        assert problem in capsys.readouterr().err and not (tmp_path / "run").exists()


def test_trajectories_of_a_file_are_learned_from(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = {
        "question": "find the lamp", "reward": 1.0,
        "messages": [{"role": "user", "content": "find the lamp"}, {"role": "assistant", "content": "go"}],
    }  # fmt: skip
    (tmp_path / "chats.jsonl").write_text(json.dumps(record) + "\n")
    files = ["--from", str(tmp_path / "chats.jsonl"), "--out", str(tmp_path / "critic")]
    assert main(["critic", *files, "embedder=hash", "num_updates=3", "batch_size=2"]) == 0
    assert "1 trajectory, 1 turn, mean return 1" in capsys.readouterr().out


def test_held_out_evaluations_are_used_on_request(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    learn = ["critic", "--from", str(run_of(tmp_path, "test")), "embedder=hash", "num_updates=2"]
    assert main([*learn, "--out", str(tmp_path / "critic")]) == 1
    assert "--held-out" in capsys.readouterr().err
    assert main([*learn, "--out", str(tmp_path / "critic"), "--held-out"]) == 0
    assert "4 trajectories" in capsys.readouterr().out
