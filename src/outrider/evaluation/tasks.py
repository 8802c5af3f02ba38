"""``outrider eval --tasks``: settings, task sets by name, and tasks with their environments."""

import base64
import binascii
import hashlib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeAlias
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from outrider.config import NONE, Settings, to_toml
from outrider.engines.base import sampling_truncation
from outrider.engines.chat import EndpointSettings
from outrider.environments.base import (
    EnvironmentConfig,
    EnvironmentFactory,
    EnvironmentSettings,
    TaskSet,
    is_inline,
    make_task_set,
    split_tasks,
)
from outrider.environments.tool_qa.datasets import (
    QuestionFactory,
    answer_column,
    hash_tasks,
    hub_rows,
    is_list_text,
    warn_of_list_texts,
)
from outrider.environments.tool_qa.rewards import JudgeSettings
from outrider.errors import ConfigError, DataError
from outrider.evaluation.grading import Kind, Scorer, find_variant, number_after_mark
from outrider.evaluation.results import SETTINGS
from outrider.files import file_sha256, read_toml, replace_file
from outrider.plugins.imports import add_search_folder
from outrider.plugins.listing import plugin_digests, write_origins
from outrider.plugins.registry import is_import_path, is_known, known_names
from outrider.records import SUFFIXES, Row, number_text, read_rows
from outrider.rollout.settings import Limits
from outrider.suggestions import did_you_mean
from outrider.training.settings import ModelSettings
from outrider.types import Json, Message, Task

_CONFIG: Final = "config.toml"
_DATA: Final = ("train", "valid", "test")
_PROMPT_KEYS: Final = ("require_think", "require_boxed")  # settings of a reward that change the prompt


def config_of_run(name: str) -> dict[str, Any] | None:
    """The recorded settings of a run directory, or of the run that a checkpoint belongs to; None for any
    other model. Unreadable files are reported when the model is loaded.
    """
    folder = Path(name).absolute()
    for run in (folder, folder.parent.parent):
        if (run / _CONFIG).is_file() and (run == folder or folder.parent.name == "checkpoints"):
            add_search_folder(run)  # its tools may be functions of the user
            try:
                return read_toml(run / _CONFIG)
            except (OSError, DataError):
                return None
    return None


def with_run_settings(values: Mapping[str, Any]) -> dict[str, Any]:
    """The tree of an evaluation with tools, with the environment and the limits of the run for what the tree
    does not set. The data sets of the run, and what its reward needs, are left out: the tasks are others.
    """
    model = values.get("model")
    config = config_of_run(str(model.get("name"))) if isinstance(model, Mapping) else None
    environment = (config or {}).get("environment", {})
    if config is None or environment.get("type") != "tools":
        return dict(values)
    run_environment = {key: value for key, value in environment.items() if key not in (*_DATA, "reward")}
    reward = {key: value for key, value in environment.get("reward", {}).items() if key in _PROMPT_KEYS}
    overrides, limits = values.get("environment") or {}, values.get("rollout") or {}
    # The last limit of growing turn limits is that of an evaluation; the earlier ones belong to training.
    rollout = {key: value for key, value in config.get("rollout", {}).items() if key in Limits.model_fields}
    return {
        **values,
        "environment": {**run_environment, "reward": reward, **overrides},
        "rollout": {**rollout, **limits},
    }


def differences(name: str, environment: Mapping[str, Any] | None, rollout: Mapping[str, Any]) -> list[str]:
    """One line about what the evaluation sets differently from the run that trained the model, else none."""
    config = config_of_run(name)
    if config is None:
        return []
    trained = config.get("environment", {})
    if environment is None:
        if trained.get("type") != "tools":
            return []
        return [
            "OTHER PROMPT THAN IN TRAINING: the questions are asked without tools, and the run trained with "
            f"environment.type = tools, protocol = {trained.get('protocol')}; set tools = on (--tools on) "
            "to play as it trained"
        ]
    if environment.get("type") != trained.get("type"):
        return [
            f"OTHER ENVIRONMENT THAN IN TRAINING: {environment.get('type')}, the run trained on "
            f"{trained.get('type')}"
        ]
    sections = [("environment", environment, trained), ("rollout", rollout, config.get("rollout", {}))]
    changes = [
        f"{key} = {value} (run: {before})"
        for section, current, recorded in sections
        for key, value, before in _iter_changes(current, recorded, f"{section}.")
    ]
    return [f"OTHER SETTINGS THAN IN TRAINING: {', '.join(changes)}"] if changes else []


def _iter_changes(
    current: Mapping[str, Any], recorded: Mapping[str, Any], prefix: str
) -> Iterator[tuple[str, Any, Any]]:
    for key, value in current.items():
        if key in _DATA or key not in recorded:
            continue
        before = None if recorded[key] == NONE else recorded[key]
        if isinstance(value, Mapping) and isinstance(before, Mapping):
            keys = _PROMPT_KEYS if key == "reward" else tuple(value)
            yield from _iter_changes(
                {name: value[name] for name in keys if name in value}, before, f"{prefix}{key}."
            )
        elif value not in (before, recorded[key]):  # "none" is also a value, for example of window.actions
            yield f"{prefix}{key}", value, before


# Task sets by name, from the Hugging Face hub or from a local file, and the fixed tasks of an evaluation.
#
# A name selects a data set, its columns, its metric and its prompt. The metric is the one that ARPO reports
# (arXiv 2507.19849, section 4): token F1 for the Wikipedia questions, a judge for open ones, mathematical
# equality for mathematics.


PROMPTS: Final[Mapping[Kind, str]] = {
    "math": r"Solve the problem step by step. End with the final answer alone in \boxed{...}.",
    "qa": (
        r"Answer the question. Think it through first, then end with the shortest "
        r"exact answer alone in \boxed{...}."
    ),
}


Columns: TypeAlias = tuple[str, str]
"""The columns of question and answer in one known format; dotted names go into nested records."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Benchmark:
    """A named task set.

    Args:
        columns: The known formats; the first that fits the first row is used.
        hub: Name, configuration and split of the data set on the hub.
        gold_behind_mark: The answer is GSM8K's number after ``####``.
        attachment: A column whose rows need a file and are left out.
        canary: A column with the key of encrypted rows.
        level: A column that goes into the tasks' metadata.
        aliases: A column of further accepted answers, if a row has it.
        access: What a user has to do to get the data.
    """

    name: str
    kind: Kind
    scorer: Scorer
    columns: tuple[Columns, ...]
    hub: tuple[str, str | None, str] | None = None
    gold_behind_mark: bool = False
    attachment: str | None = None
    canary: str | None = None
    level: str | None = None
    aliases: str | None = None
    access: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalTasks:
    """Tasks of an evaluation in a fixed order, and the hash of their content.

    ``num_left_out`` counts rows that need an attachment.
    """

    benchmark: Benchmark
    tasks: tuple[Task, ...]
    panel_hash: str
    num_left_out: int = 0


_QUESTION: Final = ("question", "answer")
_PROBLEM: Final = ("problem", "answer")
_GAIA_ACCESS: Final = (
    "GAIA is gated: accept its terms at huggingface.co/datasets/gaia-benchmark/GAIA and log in "
    "(hf auth login, or HF_TOKEN), or give your copy as gaia=FILE. Only its validation split has answers"
)
_BROWSECOMP_ACCESS: Final = (
    "BrowseComp must not be published as plain text: keep traces of it to yourself. Without the hub give "
    "your copy as browsecomp=FILE (.jsonl or .parquet with the columns problem, answer and canary)"
)


def _wiki(name: str, config: str, split: str, *, aliases: str | None = None) -> Benchmark:
    return Benchmark(
        name=name, kind="qa", scorer="f1", hub=("RUC-NLPIR/FlashRAG_datasets", config, split),
        columns=(("question", "golden_answers"), _QUESTION), aliases=aliases,
    )  # fmt: skip


def _problems(name: str, hub: str, split: str) -> Benchmark:
    columns = (_PROBLEM, _QUESTION)
    return Benchmark(name=name, kind="math", scorer="math", hub=(hub, None, split), columns=columns)


BENCHMARKS: Final[Mapping[str, Benchmark]] = {
    task_set.name: task_set
    for task_set in (
        Benchmark(
            name="gsm8k", kind="math", scorer="math", hub=("openai/gsm8k", "main", "test"),
            columns=(_QUESTION,), gold_behind_mark=True,
        ),
        _problems("math500", "HuggingFaceH4/MATH-500", "test"),
        _problems("aime24", "HuggingFaceH4/aime_2024", "train"),
        _problems("aime25", "math-ai/aime25", "test"),
        _wiki("hotpotqa", "hotpotqa", "dev"),
        _wiki("2wiki", "2wikimultihopqa", "dev"),
        _wiki("musique", "musique", "dev", aliases="answer_aliases"),
        _wiki("bamboogle", "bamboogle", "test"),
        Benchmark(
            name="simpleqa", kind="qa", scorer="judge", hub=("basicv8vc/SimpleQA", None, "test"),
            columns=(_PROBLEM, _QUESTION),
        ),
        Benchmark(
            name="webwalkerqa", kind="qa", scorer="judge", hub=("callanwu/WebWalkerQA", None, "main"),
            columns=(_QUESTION,),
        ),
        Benchmark(
            name="gaia", kind="qa", scorer="judge", hub=("gaia-benchmark/GAIA", "2023_all", "validation"),
            columns=(("Question", "Final answer"), _QUESTION), attachment="file_name", level="Level",
            access=_GAIA_ACCESS,
        ),
        Benchmark(
            name="browsecomp", kind="qa", scorer="judge", hub=("smolagents/browse_comp", None, "test"),
            columns=(_PROBLEM, _QUESTION), canary="canary", access=_BROWSECOMP_ACCESS,
        ),
    )
}  # fmt: skip
_OTHER_NAMES: Final = {"2wikimultihopqa": "2wiki", "aime2024": "aime24", "aime2025": "aime25"}
_ANY_FILE: Final = (
    _QUESTION,
    _PROBLEM,
    *((question, answer) for answer in ("answers", "golden_answers") for question in ("question", "problem")),
)


def load_benchmark(name_or_path: str, *, limit: int | None = None, others: Sequence[str] = ()) -> EvalTasks:
    """Load tasks from ``gsm8k`` (the hub), ``gsm8k=FILE`` (the set's rules for a local file) or ``FILE``
    (questions, F1).

    A name goes as papers write it, too (``MATH-500``). ``limit`` takes the first tasks; ``others`` are names
    beside those of task sets, for the message about an unknown one. Raises ConfigError for an unknown name or
    a limit below 1, ToolUnavailable without the package ``datasets`` where the hub is needed, and DataError,
    naming the row, for data that are missing, gated, empty or malformed.
    """
    if limit is not None and limit < 1:
        raise ConfigError(f"a panel needs at least one task, not {limit}")
    benchmark, path = find_benchmark(name_or_path, others=others)
    if path is not None:
        rows = read_rows(path)
    else:
        assert benchmark.hub is not None  # only a file of the user has none
        advice = f". {benchmark.access}" if benchmark.access else f"; or give {benchmark.name}=FILE"
        rows = list(hub_rows(*benchmark.hub, advice=advice))
        if not rows:
            raise DataError(f"{benchmark.hub[0]}: the data set is empty")
    columns = _columns(benchmark, rows)
    usable = [
        (index, row)
        for index, row in enumerate(rows)
        if benchmark.attachment is None or not row.values.get(benchmark.attachment)
    ]
    tasks = tuple(_task(benchmark, columns, row, index) for index, row in usable[:limit])
    warn_of_list_texts([row.location for (_, row), task in zip(usable, tasks, strict=False)
                        if len(task.answers) == 1 and is_list_text(task.answers[0])])  # fmt: skip
    if not tasks:
        raise DataError(f"{name_or_path}: every task needs an attachment, and none can be given")
    return EvalTasks(
        benchmark=benchmark, tasks=tasks, panel_hash=hash_tasks(tasks), num_left_out=len(rows) - len(usable)
    )


def prompt_messages(benchmark: Benchmark, task: Task) -> tuple[Message, Message]:
    """The prompt of an evaluation without tools; with tools the environment makes its own."""
    return Message(role="system", content=PROMPTS[benchmark.kind]), Message(
        role="user", content=task.question
    )


def find_benchmark(name_or_path: str, *, others: Sequence[str] = ()) -> tuple[Benchmark, Path | None]:
    """The task set with that name, and the local file if one is given. Reads no data.

    Raises ConfigError as :func:`load_benchmark` does.
    """
    written, equals, file = name_or_path.partition("=")
    bare = re.sub(r"[-_ ]", "", written.lower())
    name = _OTHER_NAMES.get(bare, bare)
    if name in BENCHMARKS and (file or not equals):
        return BENCHMARKS[name], Path(file) if equals else None
    path = Path(name_or_path)
    known = (*BENCHMARKS, *others)
    if equals and file and not path.exists():
        suggestion = did_you_mean(written, BENCHMARKS)
        raise ConfigError(
            f"unknown task set {written!r} in {name_or_path!r}{suggestion}; NAME=FILE takes the rules of one "
            f"of {', '.join(BENCHMARKS)}, and questions of your own go as FILE alone"
        )
    if path.suffix not in SUFFIXES:
        raise ConfigError(
            f"unknown task set {name_or_path!r}{did_you_mean(written, known)}; "
            f"give one of {', '.join(known)}, or a file ({', '.join(SUFFIXES)})"
        )
    return Benchmark(name=path.stem, kind="qa", scorer="f1", columns=_ANY_FILE), path


def _columns(benchmark: Benchmark, rows: Sequence[Row]) -> Columns:
    """The first known format whose columns the first row has."""
    for columns in benchmark.columns:
        try:
            rows[0].get(columns[0]), rows[0].get(columns[1])
        except DataError:
            continue
        return columns
    expected = " or ".join(f"{question!r} and {answer!r}" for question, answer in benchmark.columns)
    available = ", ".join(sorted(rows[0].values))
    raise DataError(
        f"{rows[0].location}: {benchmark.name} needs the columns {expected}; the row has {available}"
    )


def _task(benchmark: Benchmark, columns: Columns, row: Row, index: int) -> Task:
    question = row.text(columns[0]).strip()
    value = row.get(answer_column(row, columns[1]))
    aliases = row.values.get(benchmark.aliases) if benchmark.aliases is not None else None
    values = [
        *(value if isinstance(value, list) else [value]),
        *(aliases if isinstance(aliases, list) else []),
    ]
    answers = list(dict.fromkeys(_answers(values, row, columns)))
    if benchmark.gold_behind_mark:
        numbers = [number_after_mark(answer) for answer in answers]
        if None in numbers:
            raise DataError(
                f"{row.location}: the answer lacks a number behind '#### ', or has other text in that line"
            )
        answers = [number for number in numbers if number is not None]
    task = Task(key=f"{benchmark.name}-{index}", question=question, answers=tuple(answers))
    if benchmark.canary is not None and benchmark.canary in row.values:
        key = row.text(benchmark.canary)
        task = replace(
            task,
            question=_decrypt(question, key, row),
            answers=tuple(_decrypt(encrypted, key, row) for encrypted in answers),
        )
    if benchmark.level is not None and benchmark.level in row.values:
        task = replace(task, metadata={"level": str(row.get(benchmark.level))})
    return task


def _answers(values: Sequence[Json], row: Row, columns: Columns) -> Iterator[str]:
    """Texts of the accepted answers; a blank one among others is passed over."""
    texts: list[str] = []
    for value in values:
        if isinstance(value, Decimal) and value.is_finite():  # of Parquet
            texts.append(number_text(value))
            continue
        if (
            isinstance(value, bool)
            or not isinstance(value, str | int | float)
            or (isinstance(value, float) and not math.isfinite(value))
        ):
            raise DataError(
                f"{row.location}: column {columns[1]!r} must hold text or numbers, got {value!r}"[:300]
            )
        texts.append(value.strip() if isinstance(value, str) else number_text(value))
    if not any(texts):
        raise DataError(f"{row.location}: column {columns[1]!r} holds no answer")
    yield from filter(None, texts)


def _decrypt(text: str, canary: str, row: Row) -> str:
    """BrowseComp's cipher: base64 of the text XOR the canary's SHA-256, repeated."""
    key = hashlib.sha256(canary.encode()).digest()
    try:
        cipher = base64.b64decode(text, validate=True)
        return bytes(byte ^ key[position % len(key)] for position, byte in enumerate(cipher)).decode("utf-8")
    except (binascii.Error, UnicodeDecodeError, ValueError) as error:
        raise DataError(f"{row.location}: cannot decrypt with the row's canary") from error


# The configuration of ``outrider eval --tasks``.


_QUESTIONS: Final = "tools"  # the environment of questions from data sets


def environment_names() -> list[str]:
    """Environments with tasks of their own, by the names that ``tasks`` takes; an import path is one, too."""
    return [name for name in known_names("environments") if name != _QUESTIONS]


def is_environment(tasks: str) -> bool:
    """Whether ``tasks`` names an environment. Installed packages are searched only if no task set has the
    name.
    """
    if tasks in BENCHMARKS or tasks == _QUESTIONS:
        return False
    return is_known("environments", tasks)


class EvalTasksLimits(Limits):
    """The rollout loop's limits, with room for long answers and long games. A question without tools has one
    turn.
    """

    max_turns: int = Field(30, ge=1)
    max_turn_tokens: int = Field(1024, ge=1)
    max_response_tokens: int = Field(4096, ge=1)


class EvalTasksSettings(Settings):
    """One evaluation on one set of tasks, of a local model or a model behind an endpoint."""

    tasks: str
    """A task set (``gsm8k``), a task set with your own file (``gsm8k=FILE``), a file of questions, or an
    environment.
    """
    limit: int | None = Field(None, ge=1)
    """Use only the first tasks."""
    panel: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] | None = None
    """Expected hash of the tasks. Different tasks, for example after a data set changed on the hub, are an
    error."""
    split: str = "test"
    """Split of an environment's tasks; task sets have only one."""
    model: ModelSettings | None = None
    """``name`` may also be a run directory (its newest checkpoint) or a checkpoint in one."""
    endpoint: EndpointSettings | None = None
    environment: EnvironmentConfig | None = None
    """The environment's settings, or with ``tools = "on"`` those of the tools (``environment.corpus``)."""
    tools: Literal["default", "on", "off"] = "default"
    """``default``: off for questions, on for environments. With ``on``, if the model is a run, tools, prompt
    and limits default to those of the run.
    """
    num_samples: int = Field(1, ge=1)
    """k of pass@k and avg@k."""
    temperature: float = Field(0.0, ge=0)
    top_p: float | None = Field(None, gt=0, le=1)
    """Sample from the likeliest tokens with this share of the probability (None: from all tokens)."""
    top_k: int | None = Field(None, ge=1)
    """Sample from this number of likeliest tokens (None: from all tokens)."""
    instruction: Literal["system", "user"] = "system"
    """Without tools: the role of the message with the answer instructions. If the chat template does not
    support system messages, they are in the user message in both cases."""
    rollout: EvalTasksLimits = EvalTasksLimits()
    rules: Literal["default", "arpo-train", "arpo-eval", "squad"] = "default"
    """Extraction and normalisation of answers (``evals.extraction``)."""
    metric: Scorer | None = None
    """Scorer of questions. None: the judge if one is configured, otherwise the scorer of the task set."""
    judge: JudgeSettings | None = None
    batch_size: int = Field(32, ge=1)
    """Episodes that a local model runs as a batch; results are stored when the whole batch has ended. For an
    endpoint, the number of concurrent requests.
    """
    max_retries: int = Field(2, ge=0)
    """Retries of an episode after a fault of a tool or an environment."""
    max_faults_in_a_row: int = Field(8, ge=1)
    """Consecutive faults of the endpoint or of the judge after which the evaluation stops, so that an
    unreachable server does not cost the back-off time of every sample.
    """
    num_threads: int = Field(2, ge=1)
    watchdog_s: float = Field(300.0, ge=0)
    """Seconds without progress after which a line reports where the evaluation waits (0: never)."""
    seed: int = 0

    @property
    def truncation(self) -> dict[str, Any]:
        """``top_p`` and ``top_k``, as far as they are set."""
        return sampling_truncation(self)

    @property
    def num_concurrent(self) -> int:
        """Number of concurrent episodes, at most the number of simulators."""
        room = None if self.environment is None else self.environment.max_concurrent
        return self.batch_size if room is None else min(self.batch_size, room)

    @property
    def runs_episodes(self) -> bool:
        """Whether an environment's own record is the score, and not the graded answer to a question."""
        return is_environment(self.tasks) and self.tools != "off"

    @model_validator(mode="before")
    @classmethod
    def _expand_environment(cls, values: Any) -> Any:
        """``tasks = "webshop"`` is ``environment.type = "webshop"``, and ``tools = "on"`` is
        ``environment.type = "tools"``, with the settings of the run if the model is one.
        """
        if not isinstance(values, dict):
            return values
        environment = values.get("environment") or {}
        name = str(values.get("tasks"))
        name = name if is_import_path(name) else name.lower()
        if is_environment(name):
            return {
                **values,
                "tasks": name,
                "environment": {"type": name, **environment}
                if isinstance(environment, dict)
                else environment,
            }
        if values.get("tools") == "on" and isinstance(environment, dict):
            values = with_run_settings(values)
            environment = values.get("environment") or {}
            names = ["search", "python"] if "corpus" in environment else ["python"]
            return {**values, "environment": {"type": "tools", "tools": names, **environment}}
        if environment and isinstance(environment, dict) and "type" not in environment:
            raise ValueError("questions have environment settings, such as a corpus, only with tools = on")
        return values

    @model_validator(mode="after")
    def _validate(self) -> "EvalTasksSettings":
        if (self.model is None) == (self.endpoint is None):
            raise ValueError("give exactly one of a model and an endpoint")
        if self.temperature == 0 and self.truncation:
            raise ValueError("temperature = 0 is greedy: remove top_p and top_k")
        if self.num_samples > 1 and self.temperature == 0:
            raise ValueError(
                "at temperature 0 all samples of a task are one: num_samples > 1 needs a temperature"
            )
        if is_environment(self.tasks):
            if self.environment is not None and self.environment.type != self.tasks:
                raise ValueError(
                    f"tasks = {self.tasks} and environment.type = {self.environment.type} contradict"
                )
            if self.tools == "off" and self.environment is not None and not self.environment.is_closed_book:
                raise ValueError(f"{self.tasks} needs its environment (tools = off)")
        elif (self.tools == "on") != (self.environment is not None and self.environment.type == _QUESTIONS):
            raise ValueError(
                "questions have environment settings exactly with tools = on, and those of the tools"
            )
        strips = self.model is not None and self.model.history_thinking == "strip"
        if strips and self.tools != "off" and self.environment is not None and is_inline(self.environment):
            raise ValueError(
                "model.history_thinking = strip needs turns that are messages of their own: "
                "these episodes are one message (environment.protocol)"
            )
        if self.runs_episodes and (self.judge is not None or self.metric is not None):
            raise ValueError(f"{self.tasks} scores itself: metric and judge are for questions")
        if self.metric == "judge" and self.judge is None:
            raise ValueError("metric = judge needs a judge")
        if self.judge is not None and self.metric not in (None, "judge"):
            raise ValueError(f"metric = {self.metric} does not use a judge")
        return self


def write_settings(settings: EvalTasksSettings, folder: Path) -> str:
    """Write :data:`~outrider.evaluation.results.SETTINGS`, with which replies are graded again. Returns a
    line if the last command requested another server, else "". Raises OSError.
    """
    write_origins(settings, folder)
    # a judge may be named later
    values = _without_secrets(
        {key: value for key, value in settings.model_dump(mode="json").items() if value is not None}
    )
    path, line = folder / SETTINGS, ""
    if path.exists() and settings.endpoint is not None:
        try:
            last = read_toml(path)["endpoint"]["base_url"]
        except (DataError, KeyError, TypeError):
            last = "an unknown server"
        if last != (address := values["endpoint"]["base_url"]):
            line = f"OTHER SERVER: the earlier results are from {last}, now {address}"
    replace_file(path, (to_toml(values) + "\n").encode())
    return line


def _without_secrets(tree: dict[str, Any]) -> dict[str, Any]:
    """Addresses without a user, a password and a query."""
    public: dict[str, Any] = {}
    for key, value in tree.items():
        if key == "base_url" and isinstance(value, str):
            parts = urlsplit(value)
            value = parts._replace(netloc=parts.netloc.rpartition("@")[2], query="", fragment="").geturl()
        public[key] = _without_secrets(value) if isinstance(value, dict) else value
    return public


# Set-up of an evaluation from its settings: tasks, environments, limits, and their identity.


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalSetup:
    """``scorer`` is None if the environment's own record is the score. ``tools`` are the tag names of the
    tools that are available for questions. ``identity`` contains everything that results depend on, except
    the player.
    """

    eval_tasks: EvalTasks
    factory: EnvironmentFactory
    stop: tuple[str, ...]
    limits: Limits
    scorer: Scorer | None
    tools: tuple[str, ...]
    identity: Mapping[str, Json]

    @property
    def tasks(self) -> tuple[Task, ...]:
        """In the panel's order."""
        return self.eval_tasks.tasks

    @property
    def kind(self) -> Kind:
        """Of the questions."""
        return self.eval_tasks.benchmark.kind


def judge_identity(judge: JudgeSettings) -> dict[str, Json]:
    """Everything that a verdict depends on, without the address of the server."""
    values: dict[str, Json] = judge.model_dump(mode="json", exclude={"endpoint"})
    return {**values, "model": judge.endpoint.model, "seed": judge.endpoint.seed}


def open_eval_tasks(settings: EvalTasksSettings) -> EvalSetup:
    """Load tasks and tools; close ``factory`` in the end.

    Raises ConfigError, also for tasks that are not the pinned panel, DataError and ToolUnavailable.
    """
    task_set = None if settings.environment is None else make_task_set(settings.environment)
    eval_tasks = load_tasks(settings, task_set)
    scorer = choose_scorer(eval_tasks.benchmark, settings)
    identity: dict[str, Json] = {
        "tasks": eval_tasks.benchmark.name, "panel_hash": eval_tasks.panel_hash, "rules": settings.rules,
        "metric": scorer, "judge": None if settings.judge is None else judge_identity(settings.judge),
        "temperature": settings.temperature, "rollout": settings.rollout.model_dump(mode="json"),
        "seed": settings.seed, "environment": None, "instruction": None, **settings.truncation,
    }  # fmt: skip
    limits: Limits = settings.rollout
    stop: tuple[str, ...] = ()
    tools: tuple[str, ...] = ()
    factory: EnvironmentFactory
    if task_set is None or settings.environment is None or settings.tools == "off":

        def prompt(task: Task) -> tuple[Message, ...]:
            instruction, question = prompt_messages(eval_tasks.benchmark, task)
            if settings.instruction == "system":
                return (instruction, question)
            return (replace(question, content=f"{instruction.content}\n\n{question.content}"),)

        identity["instruction"] = [message.content for message in prompt(Task(key="", question=""))]
        factory = QuestionFactory(prompt=prompt, extract=find_variant(settings.rules).extract)
    else:
        identity["environment"] = environment_identity(settings.environment) | dict(plugin_digests(settings))
        if wait_s := settings.environment.waiting_s(settings.num_concurrent):
            # A step that may wait for the Python calls of others has that much longer before it is a fault.
            limits = limits.model_copy(update={"step_timeout_s": limits.step_timeout_s + wait_s})
        factory, stop, tools = task_set.make(), task_set.stop, settings.environment.tool_names()
    return EvalSetup(
        eval_tasks=eval_tasks, factory=factory, stop=stop, limits=limits, scorer=scorer, tools=tools,
        identity=identity,
    )  # fmt: skip


def load_tasks(settings: EvalTasksSettings, task_set: TaskSet | None) -> EvalTasks:
    """Load only the tasks. Raises ConfigError and DataError."""
    if is_environment(settings.tasks):
        assert task_set is not None  # the settings require it
        tasks = tuple(split_tasks(task_set, settings.split)[: settings.limit])
        if not tasks:
            raise ConfigError(f"the split {settings.split!r} has no tasks to evaluate on: set split")
        benchmark = Benchmark(name=settings.tasks, kind="qa", scorer="em", columns=())
        eval_tasks = EvalTasks(benchmark=benchmark, tasks=tasks, panel_hash=hash_tasks(tasks))
    else:
        eval_tasks = load_benchmark(settings.tasks, limit=settings.limit, others=environment_names())
    if settings.panel not in (None, eval_tasks.panel_hash):
        raise ConfigError(
            f"panel is {settings.panel}, and these {len(eval_tasks.tasks)} tasks are {eval_tasks.panel_hash}"
        )
    return eval_tasks


def choose_scorer(benchmark: Benchmark, settings: EvalTasksSettings) -> Scorer | None:
    """None where the environment's own record is the score. Raises ConfigError for a metric that these tasks
    cannot have.
    """
    if settings.runs_episodes:
        return None
    scorer = settings.metric or ("judge" if settings.judge is not None else benchmark.scorer)
    if scorer == "judge" and settings.judge is None:
        raise ConfigError(
            f"{benchmark.name} is graded by a judge: set its address (judge.endpoint.base_url; --judge URL), "
            "or another metric (metric=em)"
        )
    if scorer == "math" and benchmark.kind != "math":
        raise ConfigError(
            f"{benchmark.name} is no task set of mathematics; for a file of problems give math500=FILE"
        )
    return scorer


# Settings of later versions with the behaviour of earlier ones, whose evaluations can be continued.
_ADDED: Final = (
    ("result_tag", "result"), ("max_answers", 1), ("context", "chat"), ("success_at", "full"),
    ("actions", "templates"),
)  # fmt: skip


def environment_identity(environment: EnvironmentSettings) -> dict[str, Json]:
    """The environment's settings, with files by their content and without caches."""
    identity: dict[str, Json] = _hash_files(environment.model_dump())
    added: list[tuple[str, Json]] = list(_ADDED)
    if identity.get("context") == "chat":
        added.append(("window", identity.get("window")))
    if environment.type == "scienceworld":  # WebShop has recorded its reward before
        added.append(("reward", "score"))
    files = {name: _hash_files(path) for name, path in environment.input_files().items()}
    return {key: value for key, value in identity.items() if (key, value) not in added} | files


def _hash_files(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _hash_files(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_hash_files(item) for item in value]
    if not isinstance(value, Path):
        return value
    return file_sha256(value) if value.is_file() else None  # the folder of a cache
