"""Which settings ``--smoke`` changes, as overrides that stand above all others."""

import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final

from outrider import __version__
from outrider.config import NONE, to_toml
from outrider.engines.names import cache_folder
from outrider.files import first_folder
from outrider.memory.step_store import check_file
from outrider.training.run_dir import RECORD
from outrider.training.settings import RunSettings

# What stands in for files and servers that a recipe names and this machine does not have: four questions,
# their passages, chats that answer them, a buffer of these, and a server that always says the same.


REPLY: Final = "<think>two and two</think><answer>\\boxed{4}</answer>\n<judgment>Correct</judgment>"
NO_SERVER: Final = "http://127.0.0.1:1/v1"  # what --dry-run shows, which starts none
_NUMBERS: Final = ("two and two", "one and three", "three and one", "four and zero")
_EMBEDDER: Final = "hash"


@dataclass(frozen=True, slots=True)
class SmokeAssets:
    """Names below one folder, which :func:`write` fills."""

    folder: Path

    @property
    def model(self) -> Path:
        """A tiny random model."""
        return self.folder / "model"

    @property
    def questions(self) -> Path:
        """A data set of sums."""
        return self.folder / "questions.jsonl"

    @property
    def passages(self) -> Path:
        """What a search in a corpus finds."""
        return self.folder / "passages.jsonl"

    @property
    def trajectories(self) -> Path:
        """Chats that answer the questions."""
        return self.folder / "trajectories.jsonl"

    @property
    def buffer(self) -> Path:
        """A step-trace buffer of these chats."""
        return self.folder / "steps.sqlite"


def smoke_assets() -> SmokeAssets:
    """Those of this version, which need not be there yet."""
    return SmokeAssets(cache_folder() / f"smoke-{__version__}")


def write(names: SmokeAssets) -> None:
    """Makes what is named, once on a machine."""
    if names.folder.is_dir():
        return
    from outrider.memory.chat_files import import_trajectories
    from outrider.memory.embedders import load_embedder
    from outrider.memory.step_buffer import StepTraceBuffer
    from outrider.smoke.model import save_model

    with first_folder(names.folder) as folder:
        made = SmokeAssets(folder)
        save_model(made.model)
        questions = [f"How much is {phrase}?" for phrase in _NUMBERS]
        _write_lines(made.questions, [{"question": phrase, "answer": "4"} for phrase in questions])
        _write_lines(
            made.passages,
            [{"id": phrase, "title": phrase, "text": f"{phrase} is four."} for phrase in _NUMBERS],
        )
        _write_lines(made.trajectories, [_chat(number, phrase) for number, phrase in enumerate(questions)])
        read = import_trajectories(made.trajectories)
        with StepTraceBuffer(made.buffer, load_embedder(_EMBEDDER), mode="write") as buffer:
            buffer.add_trajectories(read.trajectories, questions=read.questions)


def _chat(number: int, question: str) -> dict[str, Any]:
    """One search and the answer; returns differ, so that a critic has something to learn."""
    turns = ("user", question), ("assistant", "<search>two</search>"), ("tool", "is four."), (
        "assistant", "<answer>\\boxed{4}</answer>"
    )  # fmt: skip
    messages = [{"role": role, "content": text} for role, text in turns]
    return {"question": question, "reward": float(number % 2), "messages": messages}


def _write_lines(path: Path, records: Sequence[Mapping[str, Any]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


def buffer_embedder(buffer: Path, default: str) -> str:
    """The one that a buffer which is there was built with, as far as it is the hash or ``default``."""
    from outrider.memory.embedders import load_embedder

    hashed = load_embedder(_EMBEDDER)
    try:
        check_file(buffer, embedder=hashed.name, dim=hashed.dim)
    except Exception:  # whatever is wrong with it, the run tells
        return default
    return _EMBEDDER


@contextmanager
def server() -> Iterator[str]:
    """The URL of an OpenAI-compatible chat server that always gives the same reply."""
    serving = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    thread = threading.Thread(target=serving.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{serving.server_address[1]}/v1"
    finally:
        serving.shutdown()
        serving.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        """Which models are served: none is named, so that any name is right."""
        self._answer({"data": []})

    def do_POST(self) -> None:
        """One reply for all."""
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        message = {"role": "assistant", "content": REPLY}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        self._answer({"choices": [choice], "usage": {"completion_tokens": 9}})

    def _answer(self, body: Mapping[str, Any]) -> None:
        content = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing."""


_GROUP: Final = 4
_LIMITS: Final[Mapping[str, int]] = {
    "rollout.max_turns": 2, "rollout.max_turn_tokens": 16, "rollout.max_response_tokens": 1024,
    "rollout.max_observation_tokens": 128, "rollout.max_splice_tokens": 256,
    "train.num_steps": 1, "train.tasks_per_step": 2, "update.num_mini_batches": 2, "update.num_epochs": 1,
    "cold_start.num_examples": 2, "cold_start.num_epochs": 1, "model.trained_layers": 1,
    "buffer.num_tasks": 2, "evaluation.num_tasks": 2, "evaluation.num_samples": 1,
    "evaluation.num_trials": 2, "num_threads": 1, "train.max_concurrent": 2,
}  # fmt: skip
_SET: Final[dict[str, Any]] = {
    "model.device": "cpu", "model.precision": "float32", "model.context_length": None, "evaluation.every": 0,
    "evaluation.panel": None, "trackers": [], "train.max_policy_tokens": None, "train.keep_checkpoints": 9,
}  # fmt: skip
# where experts are imitated: their paths have to fit, at a token a character
_ROOM: Final[dict[str, Any]] = {
    "rollout.max_turn_tokens": 96, "rollout.max_response_tokens": 16_000,
}  # fmt: skip
_CUTS: Final = ("rollout.max_turns", "environment.max_moves")
# of an environment, an algorithm or an engine, at any depth
_LIMITS_BY_NAME: Final[Mapping[str, int]] = {
    "num_train": 2, "num_valid": 2, "num_test": 2, "num_train_variations": 2, "num_valid_variations": 2,
    "num_test_variations": 2, "max_moves": 4, "max_extra_batches": 1, "max_tip_tokens": 16,
    "num_candidates": 2, "num_simulators": 1, "num_servers": 1,
}  # fmt: skip
_COUNTS: Final = ("first_wave", "num_hybrid")  # rollouts of a group: they shrink with it
_SIZES: Final = ("environment.num_train", "environment.num_train_variations")
_FILES: Final = ("corpus", "pages", "products", "attributes", "human_goals", "data", "demonstrations")


def smoke_overrides(settings: RunSettings, names: SmokeAssets, *, server: str) -> list[str]:
    """``section.key=value`` for all that differs from ``settings``. ``server``: URL of the stand-in for
    endpoints. What shrinks stays in proportion where it can: hybrid rollouts of a group of 16 are as many of
    four.
    """
    tree = settings.model_dump(mode="json")
    before = dict(_leaves(tree))
    overrides = {key: min(limit, before[key] or limit) for key, limit in _LIMITS.items() if before[key]}
    overrides |= _SET | {"model.name": str(names.model), "model.initial_checkpoint": None}
    if (checkpoint := settings.model.initial_checkpoint) is not None:
        overrides["model.initial_checkpoint"] = smoke_checkpoint(checkpoint, names)
    if tree["engine"]["type"] == "vllm":
        overrides["engine"] = {"type": "local"}
    overrides |= _buffer(settings, names)
    overrides |= _cluster(tree)
    for section in ("environment", "algorithm", "engine"):
        if section not in overrides:
            overrides |= dict(_shrunk(tree[section], f"{section}.", _share(tree, section)))
    overrides |= (files := dict(_files(tree["environment"], names)))
    if stages := _stages(tree["train"], is_replaced=bool(files)):  # their patterns name any training task
        overrides = {key: value for key, value in overrides.items() if key not in _SIZES} | stages
    overrides |= {
        key: None for key, value in before.items() if _is_lost(key, value, ("algorithm", "cold_start"))
    }
    overrides |= dict(_endpoints(tree, "", server))
    if settings.cold_start.num_examples:
        overrides = {key: value for key, value in overrides.items() if key not in _CUTS} | _ROOM
    if settings.train.num_steps or settings.cold_start.num_examples:
        overrides["evaluation.at_start"] = False  # there is one at the end
    return [_override(key, value) for key, value in overrides.items() if before.get(key, ...) != value]


def describe_omissions(settings: RunSettings) -> str:
    """What ``--smoke`` does not try, in one line; empty where nothing is left out."""
    tree = settings.model_dump(mode="json")
    names = [
        f"{key} = {tree['cluster'][key]}"
        for key in (dotted_key.partition(".")[2] for dotted_key in _cluster(tree))
    ]
    parts = [f"[cluster] ({', '.join(names)})"] if names else []
    if tree["engine"]["type"] == "vllm":
        parts.append("engine.type = vllm")
    if not parts:
        return ""
    return f"--smoke leaves out {' and '.join(parts)}: everything runs in one process, with the local engine"


def smoke_checkpoint(checkpoint: str, names: SmokeAssets) -> str | None:
    """The newest checkpoint of the run that ``checkpoint`` is one of, whatever its step, if that was a smoke
    run; the weights of another model are left out. What is not there stays as it is, and is told.
    """
    run = Path(checkpoint).parent.parent
    if not (run / RECORD).is_file():
        return checkpoint
    if f'name = "{names.model}"' not in (run / RECORD).read_text(encoding="utf-8"):
        return None
    checkpoints = sorted(Path(checkpoint).parent.glob("step-*"))
    return str(checkpoints[-1]) if checkpoints else checkpoint


def _buffer(settings: RunSettings, names: SmokeAssets) -> dict[str, Any]:
    path, embedder = settings.buffer.path, settings.buffer.embedder
    if path is None:
        return {"buffer.embedder": "hash"}
    if Path(path).exists():
        return {"buffer.embedder": buffer_embedder(Path(path), embedder)}
    return {"buffer.path": str(names.buffer), "buffer.embedder": "hash"}


def _stages(train: Mapping[str, Any], *, is_replaced: bool) -> dict[str, Any]:
    """A step of each, so that the run crosses their borders; the tasks of a stand-in have other names."""
    if not train["stages"] or not train["num_steps"]:
        return {}
    stages = [
        {"tasks": ["*"] if is_replaced else stage["tasks"], "num_steps": 1} for stage in train["stages"]
    ]
    del stages[-1]["num_steps"]
    return {"train.stages": stages, "train.num_steps": len(stages)}


def _cluster(tree: Mapping[str, Any]) -> dict[str, Any]:
    """One process: ``cluster`` as if it were not there."""
    from outrider.training.settings import ClusterSettings

    plain = ClusterSettings().model_dump(mode="json")
    return {f"cluster.{key}": value for key, value in plain.items() if tree["cluster"][key] != value}


def _share(tree: Mapping[str, Any], section: str) -> float:
    """By how much a group shrinks."""
    size = tree["algorithm"].get("group_size", _GROUP) if section == "algorithm" else _GROUP
    return min(1.0, _GROUP / size)


def _shrunk(tree: Mapping[str, Any], above: str, share: float) -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _shrunk(value, f"{above}{key}.", share)
        elif key == "group_size":
            yield f"{above}{key}", min(value, _GROUP)
        elif key in _COUNTS and value:
            yield f"{above}{key}", max(1, round(value * share))
        elif key == "embedder":
            yield f"{above}{key}", "hash"
        elif key in _LIMITS_BY_NAME:
            yield f"{above}{key}", min(_LIMITS_BY_NAME[key], value or _LIMITS_BY_NAME[key])


def _files(tree: Mapping[str, Any], names: SmokeAssets) -> Iterator[tuple[str, Any]]:
    """Files of an environment that are not there: of a data set and of a corpus there are stand-ins,
    environments of their own go back to what they ship.
    """
    for key, value in tree.items():
        is_set = isinstance(value, Mapping) and isinstance(value.get("path"), str)
        if is_set and not Path(value["path"]).exists():
            yield f"environment.{key}", {"path": str(names.questions)}
        elif _is_lost(f"environment.{key}", value, ("environment",)):
            yield f"environment.{key}", str(names.passages) if key in ("corpus", "pages") else None


def _is_lost(key: str, value: Any, sections: tuple[str, ...]) -> bool:
    section, name = key.partition(".")[0], key.rpartition(".")[2]
    return section in sections and name in _FILES and isinstance(value, str) and not Path(value).exists()


def _endpoints(tree: Mapping[str, Any], above: str, server: str) -> Iterator[tuple[str, Any]]:
    """Every URL of a server; of a list, such as the tools', the list as a whole."""
    for key, value in tree.items():
        if key == "base_url":
            yield f"{above}{key}", server
        elif isinstance(value, Mapping):
            yield from _endpoints(value, f"{above}{key}.", server)
        elif isinstance(value, list) and (changed := _replace_base_url(value, server)) != value:
            yield f"{above}{key}", changed


def _replace_base_url(value: Any, server: str) -> Any:
    if isinstance(value, list):
        return [_replace_base_url(item, server) for item in value]
    if not isinstance(value, Mapping):
        return value
    return {
        key: server if key == "base_url" else _replace_base_url(item, server) for key, item in value.items()
    }


def _leaves(tree: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Every key with its value, those of sections too."""
    for key, value in tree.items():
        yield f"{above}{key}", value
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{above}{key}.")


def _override(key: str, value: Any) -> str:
    plain = NONE if value is None else value
    literal = to_toml({"v": [plain]}).removeprefix("v = [").removesuffix("]")  # in a list a table is inline
    return f"{key}={literal}"
