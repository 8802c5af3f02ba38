"""``--smoke``: run any recipe end to end in seconds on a CPU, before you pay for a GPU.

Settings are reduced by overrides above the recipe and the command line: a tiny random model, one step, two
tasks, small groups, short turns, and stand-ins for missing files and servers. A ``[cluster]`` is reduced to
a few processes, which take about a minute to start. It finds recipes that cannot run; its numbers mean
nothing.
"""

import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from outrider import __version__
from outrider.config import format_override
from outrider.engines.base import cache_folder
from outrider.files import first_folder
from outrider.memory.step_store import check_file
from outrider.training.run_dir import RECORD
from outrider.training.settings import RunSettings
from outrider.viewer.run_reader import numbered_checkpoints

if TYPE_CHECKING:
    from transformers import LlamaConfig, PreTrainedTokenizerFast

REPLY: Final = "<think>two and two</think><answer>\\boxed{4}</answer>\n<judgment>Correct</judgment>"
NO_SERVER: Final = "http://127.0.0.1:1/v1"  # printed by --dry-run, which starts no server
_NUMBERS: Final = ("two and two", "one and three", "three and one", "four and zero")
_EMBEDDER: Final = "hash"
TEMPLATE: Final = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CHARACTERS: Final = (*(chr(code) for code in range(32, 127)), "\n")
# Whole actions are tokens of the model, so that random turns call tools, act and answer.
_ACTIONS: Final = (
    "<think>two and two</think><search>two</search>",
    "<think>two and two</think><python>print(2 + 2)</python>",
    "<think>two and two</think><answer>\\boxed{4}</answer>",
    "<think>two and two</think><answer>\\boxed{5}</answer>",
    "look around", "inventory", "search[red shirt]", "click[Buy Now]",
)  # fmt: skip
_NUM_COPIES: Final = 3  # of the actions, with blanks before them: half of all random tokens are actions
_CONTEXT: Final = 32_768


class SmokeAssets:
    """Paths of the stand-ins in one folder, which :func:`write` creates."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = folder / "model"
        self.questions = folder / "questions.jsonl"
        self.passages = folder / "passages.jsonl"  # a corpus for searches
        self.trajectories = folder / "trajectories.jsonl"  # chats that answer the questions
        self.buffer = folder / "steps.sqlite"  # a step-trace buffer of these chats


def smoke_assets() -> SmokeAssets:
    """Return the paths for this version of Outrider."""
    return SmokeAssets(cache_folder() / f"smoke-{__version__}")


def write(names: SmokeAssets) -> None:
    """Create the stand-ins, once per machine."""
    if names.folder.is_dir():
        return
    from outrider.memory.chat_files import import_trajectories
    from outrider.memory.embedders import load_embedder
    from outrider.memory.step_buffer import StepTraceBuffer

    def write_lines(path: Path, records: Sequence[Mapping[str, Any]]) -> None:
        path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")

    with first_folder(names.folder) as folder:
        made = SmokeAssets(folder)
        save_model(made.model)
        questions = [f"How much is {phrase}?" for phrase in _NUMBERS]
        write_lines(made.questions, [{"question": phrase, "answer": "4"} for phrase in questions])
        write_lines(
            made.passages,
            [{"id": phrase, "title": phrase, "text": f"{phrase} is four."} for phrase in _NUMBERS],
        )
        write_lines(made.trajectories, [_chat(number, phrase) for number, phrase in enumerate(questions)])
        read = import_trajectories(made.trajectories)
        with StepTraceBuffer(made.buffer, load_embedder(_EMBEDDER), mode="write") as buffer:
            buffer.add_trajectories(read.trajectories, questions=read.questions)


def _chat(number: int, question: str) -> dict[str, Any]:
    """Return a chat with one search and the answer; returns differ, so that a critic can learn."""
    turns = ("user", question), ("assistant", "<search>two</search>"), ("tool", "is four."), (
        "assistant", "<answer>\\boxed{4}</answer>"
    )  # fmt: skip
    messages = [{"role": role, "content": text} for role, text in turns]
    return {"question": question, "reward": float(number % 2), "messages": messages}


def character_tokenizer(actions: Sequence[str] = ()) -> "PreTrainedTokenizerFast":
    """Build a tokenizer with one token per character, the chat markers and ``actions``."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<|im_start|>", "<|im_end|>", "<unk>"]
    vocabulary = {token: i for i, token in enumerate([*special, *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", unk_token="<unk>")
    fast.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    fast.add_tokens(list(actions))
    fast.chat_template = TEMPLATE
    return fast


def tiny_config(
    *, num_layers: int = 2, hidden_size: int = 32, context: int = 512, num_actions: int = 0
) -> "LlamaConfig":
    """Return a config with grouped-query attention and tied embeddings, like SmolLM2."""
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=3 + len(CHARACTERS) + num_actions, hidden_size=hidden_size,
        intermediate_size=2 * hidden_size, num_hidden_layers=num_layers, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=context, tie_word_embeddings=True, eos_token_id=1,
        bos_token_id=None,
    )  # fmt: skip


def save_model(folder: Path) -> None:
    """Save a model with random weights, always the same ones."""
    import torch
    from transformers import LlamaForCausalLM

    actions = [" " * copy + action for copy in range(_NUM_COPIES) for action in _ACTIONS]
    config = tiny_config(context=_CONTEXT, num_actions=len(actions))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
    assert model.generation_config is not None
    model.generation_config.eos_token_id = 1
    model.save_pretrained(folder)
    character_tokenizer(actions).save_pretrained(folder)


def buffer_embedder(buffer: Path, default: str) -> str:
    """Return the embedder of an existing buffer: "hash", or else ``default``."""
    from outrider.memory.embedders import load_embedder

    hashed = load_embedder(_EMBEDDER)
    try:
        check_file(buffer, embedder=hashed.name, dim=hashed.dim)
    except Exception:  # the run reports what is wrong with it
        return default
    return _EMBEDDER


@contextmanager
def server() -> Iterator[str]:
    """Run an OpenAI-compatible chat server that always returns the same reply; yields its URL."""
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
        # no model is listed, so that any name is accepted
        self._answer({"data": []})

    def do_POST(self) -> None:
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
        pass


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
# if experts are imitated, their trajectories have to fit, with one token per character
_ROOM: Final[dict[str, Any]] = {
    "rollout.max_turn_tokens": 96, "rollout.max_response_tokens": 16_000,
}  # fmt: skip
_WINDOW: Final = 24_000  # tokens of a prompt that is built anew, with one token per character
_CUTS: Final = ("rollout.max_turns", "environment.max_moves")
# settings of environment, algorithm and engine, at any depth
_LIMITS_BY_NAME: Final[Mapping[str, int]] = {
    "num_train": 2, "num_valid": 2, "num_test": 2, "num_train_variations": 2, "num_valid_variations": 2,
    "num_test_variations": 2, "max_moves": 4, "max_extra_batches": 1, "max_tip_tokens": 16,
    "num_candidates": 2, "num_simulators": 1, "num_servers": 1,
}  # fmt: skip
_COUNTS: Final = ("first_wave", "num_hybrid")  # of a group, reduced in proportion to its size
_SIZES: Final = ("environment.num_train", "environment.num_train_variations")
_FILES: Final = ("corpus", "pages", "products", "attributes", "human_goals", "data", "demonstrations")


def smoke_overrides(settings: RunSettings, names: SmokeAssets, *, server: str) -> list[str]:
    """Return overrides ``section.key=value`` of everything that differs from ``settings``.

    ``server`` is the URL of the stand-in for endpoints. Values are reduced in proportion if possible, for
    example the hybrid rollouts of a group.
    """
    tree = settings.model_dump(mode="json")
    before = dict(_leaves(tree))
    overrides = {key: min(limit, before[key] or limit) for key, limit in _LIMITS.items() if before[key]}
    overrides |= {
        f"environment.task_list.{split}": None for split in tree["environment"].get("task_list", ())
    }
    if sets := tree["evaluation"]["panels"]:  # the tasks of a stand-in are others
        overrides.pop("evaluation.num_tasks")
        smaller = {"num_tasks": 2, "sha256": None, "task_list": None}
        overrides["evaluation.panels"] = [entry | smaller for entry in sets]
    overrides |= _SET | {"model.name": str(names.model), "model.initial_checkpoint": None}
    if (checkpoint := settings.model.initial_checkpoint) is not None:
        overrides["model.initial_checkpoint"] = smoke_checkpoint(checkpoint, names)
    if settings.rollout.steps_per_limit is not None:  # growing limits of turns
        overrides |= {"rollout.earlier_max_turns": [], "rollout.steps_per_limit": None}
    if tree["engine"]["type"] == "vllm":
        overrides["engine"] = {"type": "local"}
    overrides |= _buffer(settings, names)
    overrides |= _cluster(settings)
    for section in ("environment", "algorithm", "engine"):
        if section not in overrides:
            overrides |= dict(_shrunk(tree[section], f"{section}.", _share(tree, section)))
    if settings.environment.rebuilt_prompt_tokens is not None:
        overrides["environment.window.max_prompt_tokens"] = _WINDOW
    overrides |= (files := dict(_files(tree["environment"], names)))
    if stages := _stages(tree["train"], is_replaced=bool(files)):  # their patterns may name any training task
        overrides = {key: value for key, value in overrides.items() if key not in _SIZES} | stages
    for section, count in (("algorithm", "num_demonstrations"), ("cold_start", "num_examples")):
        key = f"{section}.demonstrations"
        is_replaced = before.get(key) is not None and "environment.train" in files  # tasks of a stand-in
        if is_replaced or _is_lost(key, before.get(key), (section,)):
            overrides[key] = None
            if not settings.environment.has_experts:  # nothing else shows a solution
                overrides[f"{section}.{count}"] = 0
    overrides |= dict(_endpoints(tree, "", server))
    if settings.cold_start.num_examples and overrides.get("cold_start.num_examples"):
        overrides = {key: value for key, value in overrides.items() if key not in _CUTS} | _ROOM
    if settings.train.num_steps or settings.cold_start.num_examples:
        overrides["evaluation.at_start"] = False  # one at the end is enough
    return [format_override(key, value) for key, value in overrides.items() if before.get(key, ...) != value]


def describe_omissions(settings: RunSettings) -> str:
    """Describe in one line what ``--smoke`` replaces in ``[cluster]`` and does not test; "" if it tests
    everything.
    """
    before, parts = settings.cluster.model_dump(mode="json"), []
    replaced = {key.partition(".")[2]: value for key, value in _cluster(settings).items()}
    if replaced:
        changes = [f"{key} = {value} (recipe: {before[key]})" for key, value in replaced.items()]
        parts.append(f"runs [cluster] with {', '.join(changes)}")
    if settings.engine.type == "vllm":
        parts.append("leaves out engine.type = vllm")
    return f"--smoke {' and '.join(parts)}" if parts else ""


def smoke_checkpoint(checkpoint: str, names: SmokeAssets) -> str | None:
    """Return the newest checkpoint of the run of ``checkpoint`` if that was a smoke run, else None.

    A missing checkpoint is returned unchanged, and the run reports it.
    """
    run = Path(checkpoint).parent.parent
    if not (run / RECORD).is_file():
        return checkpoint
    if f'name = "{names.model}"' not in (run / RECORD).read_text(encoding="utf-8"):
        return None
    checkpoints = numbered_checkpoints(Path(checkpoint).parent)
    return str(checkpoints[-1][1]) if checkpoints else checkpoint


def _buffer(settings: RunSettings, names: SmokeAssets) -> dict[str, Any]:
    path, embedder = settings.buffer.path, settings.buffer.embedder
    if path is None:
        return {"buffer.embedder": "hash"}
    if Path(path).exists():
        return {"buffer.embedder": buffer_embedder(Path(path), embedder)}
    return {"buffer.path": str(names.buffer), "buffer.embedder": "hash"}


def _stages(train: Mapping[str, Any], *, is_replaced: bool) -> dict[str, Any]:
    """Reduce each stage to one step. Tasks of a stand-in have other names, so patterns are replaced."""
    if not train["stages"] or not train["num_steps"]:
        return {}
    stages = [
        {"tasks": ["*"] if is_replaced else stage["tasks"], "num_steps": 1} for stage in train["stages"]
    ]
    del stages[-1]["num_steps"]
    return {"train.stages": stages, "train.num_steps": len(stages)}


def _cluster(settings: RunSettings) -> dict[str, Any]:
    """Reduce ``cluster`` to two trainer ranks, one engine and two rollout workers on this machine. All
    other keys get their defaults, which are valid on a CPU.
    """
    from outrider.training.settings import ClusterSettings

    cluster, smaller = settings.cluster, ClusterSettings().model_dump(mode="json")
    smaller["num_trainers"] = min(2, cluster.num_trainers)
    # Two workers, because with one of them ``weights`` would have to request separate processes.
    if cluster.is_remote and min(settings.train.tasks_per_step, settings.num_concurrent) > 1:
        smaller |= {"num_rollout_workers": 2, "max_staleness": min(1, cluster.max_staleness)}
    before = cluster.model_dump(mode="json")
    return {f"cluster.{key}": value for key, value in smaller.items() if before[key] != value}


def _share(tree: Mapping[str, Any], section: str) -> float:
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
    """Replace missing files of an environment by stand-ins, or by the files that the environment ships."""
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
    """Replace every URL of a server; a list, for example of tools, is replaced as a whole."""
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
    """Yield all keys, also of sections, with their values."""
    for key, value in tree.items():
        yield f"{above}{key}", value
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{above}{key}.")
