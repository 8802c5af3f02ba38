"""``outrider push``: a run's weights or a data set, with a card, as a repository of the Hugging Face hub."""

import getpass
import json
import os
import re
import socket
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from keyword import iskeyword
from math import isfinite
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

from huggingface_hub import DatasetCardData, HfApi, ModelCard, ModelCardData, get_token
from huggingface_hub.errors import (  # type: ignore[attr-defined]  # HTTPError: of whichever client it has
    HfHubHTTPError,
    HFValidationError,
    HTTPError,
)
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

from outrider import __version__
from outrider.config import NONE, to_toml
from outrider.errors import ConfigError, HubError
from outrider.memory.chat_files import SUFFIXES, Imported, import_trajectories
from outrider.memory.step_store import Database, check_file, check_schema, copy_database, load_all, meta
from outrider.metrics import WRITTEN_TOKENS
from outrider.printing import format_mean_return, one_line, plural, score
from outrider.protocols import compare_settings, find_protocol, protocol_names
from outrider.resolved import leaves
from outrider.training.checkpoint import checkpoint_step
from outrider.training.export import export_run, find_checkpoint
from outrider.training.run_dir import RECORD, recorded_settings
from outrider.training.settings import RunSettings
from outrider.types import Trajectory
from outrider.viewer.evaluations import score_mark
from outrider.viewer.records import SCHEMA, StepFiles, evaluation_file, read_rows, step_file
from outrider.viewer.run_reader import Evaluation, RunData, read_run

CARD: Final = "README.md"
_LONGEST: Final = 300  # characters of the hub's own words


@dataclass(frozen=True, slots=True, kw_only=True)
class Pushed:
    """The card, the files with their sizes in bytes, and the address (empty after a dry run)."""

    card: str
    files: tuple[tuple[str, int], ...]
    url: str = ""


def require_target(repo: str, *, dry_run: bool) -> None:
    """Raises ConfigError for an invalid repository name, and HubError without a login."""
    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise ConfigError(f"--repo {repo!r} is no name of a repository: {one_line(str(error))}") from error
    if "/" not in repo:
        raise ConfigError(f"--repo {repo!r} names no owner: write owner/{repo}")
    if not dry_run and get_token() is None:
        raise HubError("no token for the hub: log in with 'hf auth login', or set HF_TOKEN")


def upload(
    folder: Path,
    repo: str,
    *,
    kind: Literal["model", "dataset"],
    card: str,
    private: bool,
    dry_run: bool,
    message: str,
) -> Pushed:
    """Write the card to the folder and upload the folder with the commit message ``message``. Creates a
    missing repository.

    Raises ConfigError if ``private`` is set and the repository is public, and HubError if the hub fails. Call
    it again to continue; files that were already uploaded are skipped.
    """
    (folder / CARD).write_text(card, encoding="utf-8")
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    files = tuple((path.relative_to(folder).as_posix(), path.stat().st_size) for path in paths)
    if dry_run:
        return Pushed(card=card, files=files)
    api = HfApi(library_name="outrider", library_version=__version__)  # the address is $HF_ENDPOINT
    with _hub_errors(repo):
        api.create_repo(repo, private=private, exist_ok=True, repo_type=kind)
        is_public = private and not api.repo_info(repo, repo_type=kind).private
    if is_public:  # create_repo leaves an existing repository as it is
        raise ConfigError(
            f"{repo} exists and is public; nothing was sent: change that in its settings on the hub, or push "
            "without --private"
        )
    with _hub_errors(repo):
        api.upload_folder(repo_id=repo, folder_path=folder, commit_message=message, repo_type=kind)
    url = f"{api.endpoint}/{'datasets/' if kind == 'dataset' else ''}{repo}"
    return Pushed(card=card, files=files, url=url)


@contextmanager
def _hub_errors(repo: str) -> Iterator[None]:
    """Convert every error of the hub or its client to one line without the token."""
    try:
        yield
    except (HTTPError, OSError, ValueError, RuntimeError, LookupError, TypeError) as error:
        # the last two: an answer that lacks what the client looks for
        words = _format_error(error)
        if token := get_token():
            words = words.replace(token, "(token)")
        raise HubError(
            f"{repo} was not pushed: {words[:_LONGEST]}; the same command continues the upload"
        ) from error


def _format_error(error: BaseException) -> str:
    if isinstance(error, HfHubHTTPError) and error.server_message:
        return one_line(f"{error.server_message} (status {error.response.status_code})")
    if type(error) is RuntimeError and error.__cause__ is not None:  # the cause has the details
        return f"{one_line(str(error))} {_format_error(error.__cause__)}"
    return one_line(str(error)) or type(error).__name__


# Settings of a run that may be published: those whose format rules out paths and secrets.


OMITTED: Final = "(not shown)"
_PLAIN: Final = re.compile(r"[\w.@:+=*-]*", re.ASCII)
_DATE: Final = re.compile(r"\d{1,2} [A-Za-z]{3,9} \d{4}", re.ASCII)  # as templates write the day
_MODEL: Final = re.compile(r"[\w.-]+(/[\w.-]+)?", re.ASCII)
_SECRET: Final = re.compile(
    r"(^|_)(api_?keys?|keys?|token|secret|password|passwd|auth|authorization|credentials?|variable)(_|$)",
    re.IGNORECASE,
)
_PROGRAM_KEYS: Final = frozenset({"args", "command", "env", "headers"})  # may contain a key in any form
_ALWAYS_SHOWN: Final = frozenset({"algorithm.type", "environment.type", "model.name", "seed"})
_LONGEST_MIXED: Final = 24  # of letters and digits without a break: longer ones may be keys


def public_settings(settings: RunSettings) -> str:
    """TOML of the non-default settings. Texts with spaces or slashes, and texts that may be a secret or the
    name of a person or machine, are replaced by a placeholder.
    """
    tree: dict[str, Any] = {}
    for leaf in leaves(settings, sources={}):
        if leaf.source == "default" and leaf.key not in _ALWAYS_SHOWN:
            continue
        *above, name = leaf.key.split(".")
        table = tree
        for part in above:
            table = table.setdefault(part, {})
        table[name] = _redact(leaf.key, leaf.value)
    return to_toml(tree)


def public_variables(variables: Mapping[str, Any], template: str) -> dict[str, Any]:
    """The entries of ``model.template_kwargs`` that the chat template uses. A value that is not a boolean,
    number, plain word or date is replaced by ``OMITTED``.
    """
    own = set(re.findall(r"\w+", template))
    shown: dict[str, Any] = {}
    for name, value in variables.items():
        if name not in own or not name.isidentifier() or iskeyword(name):
            continue
        if isinstance(value, str):
            is_plain = plain(value) == value or bool(_DATE.fullmatch(value))
        else:
            is_plain = value is None or (isinstance(value, bool | int | float) and isfinite(value))
        shown[name] = value if is_plain and not may_be_secret(name) else OMITTED
    return shown


def private_words() -> frozenset[str]:
    """Names of this user and this machine."""
    names = {socket.gethostname(), Path.home().name}
    with suppress(OSError, KeyError):  # a user without a name
        names.add(getpass.getuser())
    return frozenset(word.lower() for name in names for word in _words(name))


def base_model(name: str) -> str:
    """The name of a public model; empty for a local folder."""
    is_plain = _MODEL.fullmatch(name) and not Path(name).exists()
    return name if is_plain else ""


def _redact(key: str, value: Any) -> Any:
    parts = key.split(".")
    if (value and _PROGRAM_KEYS & set(parts)) or any(may_be_secret(part) for part in parts):
        return OMITTED
    if isinstance(value, Mapping):
        return {
            item: _redact(f"{key}.{item}", inner) for item, inner in value.items() if plain(item) != OMITTED
        }
    if isinstance(value, list | tuple):
        return [_redact(key, item) for item in value]
    if value is None:
        return NONE
    if isinstance(value, bool | int | float):
        return value
    if key == "model.name":
        return base_model(str(value)) or OMITTED
    return value if plain(str(value)) != OMITTED else OMITTED


def may_be_secret(name: str) -> bool:
    """Whether a name is a secret's, by its words: ``api_key``, ``API-KEY`` and ``apiKey`` alike."""
    return bool(_SECRET.search(re.sub(r"(?<=[a-z])(?=[A-Z])|\W", "_", name)))


def plain(text: str) -> str:
    """The text if it is not a path, key, or name of a person or machine, otherwise :data:`OMITTED`."""
    words = _words(text)
    looks_random = any(len(word) > _LONGEST_MIXED and re.search(r"\d", word) for word in words)
    is_private = private_words() & {word.lower() for word in words}
    return text if _PLAIN.fullmatch(text) and not looks_random and not is_private else OMITTED


def _words(text: str) -> list[str]:
    return re.findall(r"[^\W_]+", text)


# The model card of a run: base model, training settings, scores with intervals, and loading instructions.


BASES: Final[Mapping[str, tuple[str, str]]] = {
    "smollm2-135m-instruct": ("HuggingFaceTB/SmolLM2-135M-Instruct", "apache-2.0"),
    "gemma3-270m": ("google/gemma-3-270m", "gemma"),
    "qwen2.5-coder-0.5b-instruct": ("Qwen/Qwen2.5-Coder-0.5B-Instruct", "apache-2.0"),
}
"""Hub names and licences of the packaged models."""


def find_base(name: str) -> tuple[str, str]:
    """Name on the hub and licence of ``model.name``, each empty if it is unknown. The licence of a folder is
    that of its card; the name of a folder is not published.
    """
    if name in BASES:
        return BASES[name]
    card = Path(name) / CARD
    if not card.is_file():
        return base_model(name), ""
    try:
        license_name = ModelCard.load(card).data.get("license")
    except Exception:  # whatever the YAML parser raises for a file that is no card
        license_name = None
    return "", license_name if isinstance(license_name, str) else ""


def model_card(
    repo: str, settings: RunSettings, run: RunData, *, step: int, base: tuple[str, str], template: str
) -> str:
    """Markdown with the hub's metadata in front.

    Args:
        repo: The name of the repository.
        settings: The settings of the run.
        run: Its metrics and evaluations, of which those after ``step`` are left out.
        step: The step of the checkpoint.
        base: Name and licence of the base model.
        template: The chat template.
    """
    name, license_name = base
    method = run.method.rpartition(":")[2]
    data = ModelCardData(
        license=license_name or None,
        base_model=name or None,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["outrider", "reinforcement-learning", method],
    )
    tokens = sum(
        value or 0.0 for metric in WRITTEN_TOKENS for at, value in run.curve("train", metric) if at <= step
    )
    environment = settings.environment.type.rpartition(":")[2]
    parts = [
        f"---\n{data.to_yaml()}\n---",
        f"# {repo.rpartition('/')[2]}",
        f"{name or 'a model from a folder'}, trained with `{method}` on tasks of `{environment}` by "
        f"Outrider {__version__}: {plural(step, 'step')}, "
        f"{tokens:,.0f} policy tokens, seed {settings.seed}.",
        "" if license_name else "The licence of the model that training began with applies.",
        _scores(run.evaluations, step),
        score_mark(run.config),
        _protocol(settings),
        _loading(repo, settings, template),
        "## Recipe\n\nWhat is not at its default; texts that may name a path, an address or a person are "
        f"left out.\n\n```toml\n{public_settings(settings).strip()}\n```",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _scores(evaluations: tuple[Evaluation, ...], step: int) -> str:
    rows = []
    for evaluation in evaluations:
        if evaluation.step > step or evaluation.interval is None:
            continue
        cells = [
            f"**{evaluation.full_label}**" if evaluation.step == step else evaluation.full_label,
            f"{evaluation.step}",
            score(*evaluation.interval)
            + format_mean_return(evaluation.score, evaluation.mean_return).rstrip(","),
            f"{evaluation.num_tasks} of `{evaluation.split}`",
            f"{evaluation.num_faults}",
            f"{evaluation.temperature:g}",
            f"`{evaluation.panel_hash}`",
        ]
        rows.append(f"| {' | '.join(cells)} |")
    if not rows:
        return "## Scores\n\nThe run has no evaluation of these weights or of earlier ones."
    lines = [
        "## Scores",
        "",
        "Means over tasks with 95 % intervals of the tasks (not of seeds), as `outrider train` printed them. "
        f"Rows of step {step} are of these weights. Rollouts that ended in a fault are in no score. Equal "
        "hashes are equal panels of tasks: keys, questions, answers and metadata in their order.",
        "",
        "| evaluation | step | score | tasks | faults | temperature | panel |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        *rows,
    ]
    return "\n".join(lines)


def _protocol(settings: RunSettings) -> str:
    if settings.protocol not in protocol_names():
        return ""
    protocol = find_protocol(settings.protocol)
    difference = compare_settings("this run", settings.model_dump(mode="json"), protocol)
    return "## Protocol\n\n```text\n" + "\n".join(difference.lines()) + "\n```"


def _loading(repo: str, settings: RunSettings, template: str) -> str:
    all_variables = public_variables(settings.model.template_kwargs, template)
    variables = {name: value for name, value in all_variables.items() if value != OMITTED}
    kwargs = "".join(f", {name}={value!r}" for name, value in variables.items())
    hidden = ", ".join(f"`{name}`" for name in all_variables if name not in variables)
    unsaid = f"; the value of {hidden} is left out here" if hidden else ""
    thinking = {
        "keep": "thinking of earlier turns stays in the context: send it back as it was written",
        "strip": "thinking of earlier turns is taken out of the context, as chat servers do",
    }[settings.model.history_thinking]
    form = settings.environment.call_format
    calls = (
        f"tool calls have the form `{form}`" if form else "turns are plain text, without native tool calls"
    )
    return f"""## Load

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{repo}")
tokenizer = AutoTokenizer.from_pretrained("{repo}")
messages = [{{"role": "user", "content": "..."}}]
inputs = tokenizer.apply_chat_template(
    messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"{kwargs}
)
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=64)[0]))
```

Contexts are as in training where a server renders them so (`outrider.json` says the same):

- `history_thinking = "{settings.model.history_thinking}"`: {thinking}
- `template_kwargs = {json.dumps(variables)}`: variables of the chat template (`chat_template_kwargs` of
  vLLM){unsaid}
- `call_format`: {calls}"""


# The card of a data set: content, loading instructions, and unreviewed properties.


_LOADING: Final[Mapping[str, tuple[str, str, str]]] = {
    "step-trace buffer": (
        "One SQLite file, which a recipe names in `[buffer]` to retrieve steps from.",
        "",
        "outrider buffer stats buffer.sqlite",
    ),
    "trajectories": (
        "A line is a chat with its question and reward. `outrider buffer import` makes a buffer of them, and "
        "`cold_start.demonstrations` imitates them.",
        "trajectories.jsonl",
        "outrider buffer import trajectories.jsonl --out buffer.sqlite",
    ),
    "traces": (
        "A file for every training step or evaluation, a row for every node of a tree of rollouts: text, "
        "tokens, log-probs, and at leaves outcome and return.",
        "traces/*.parquet",
        "",
    ),
}


def dataset_card(repo: str, kind: str, counts: Mapping[str, int], agents: Mapping[str, int]) -> str:
    """Markdown with the hub's metadata in front. ``agents`` maps agents to their number of trajectories;
    names that may be private are omitted.
    """
    description, files, command = _LOADING[kind]
    configs = [{"config_name": "default", "data_files": files}] if files else None
    data = DatasetCardData(tags=["outrider", "reinforcement-learning"], configs=configs)
    agent_counts: dict[str, int] = {}
    for agent, count in sorted(agents.items()):
        agent_counts[plain(agent)] = agent_counts.get(plain(agent), 0) + count
    rows = [*counts.items(), *((f"trajectories of {agent}", count) for agent, count in agent_counts.items())]
    lines = [f"| {name} | {count:,} |" for name, count in rows]
    load = [
        f"hf download {repo} --repo-type dataset --local-dir data",
        *([f"cd data && {command}"] if command else []),
    ]
    parts = [
        f"---\n{data.to_yaml()}\n---",
        f"# {repo.rpartition('/')[2]}",
        f"Outrider {__version__}: {kind}. {description}",
        "\n".join(["| what | number |", "| --- | --- |", *lines]),
        "## Load",
        "\n".join(["```sh", *load, "```"]),
        "Texts are as agents, tasks and tools wrote them: nobody has read them over for names, errors or "
        "claims. No licence is named here; what the tasks and the agents' models came under applies.",
    ]
    return "\n\n".join(parts) + "\n"


# ``outrider push --dataset``: a buffer, demonstrations or traces as a data set of the Hugging Face hub.


_SHORTEST: Final = 8  # characters of a secret: a shorter one would be found in any text


Prepared: TypeAlias = tuple[str, dict[str, int], Counter[str]]
"""The kind of a data set, its counts by name, and the number of trajectories by agent."""


def push_dataset(path: Path, repo: str, *, private: bool = False, dry_run: bool = False) -> Pushed:
    """Validate a data set, write its card, and upload both. ``path`` is a step-trace buffer, a file of chat
    trajectories, or the folder ``traces`` of a run.

    Raises DataError and BufferCorrupt for other or damaged files, and ConfigError if the data contain a
    secret of the process environment; other errors as :func:`outrider.evaluation.hub.push_run`.
    """
    require_target(repo, dry_run=dry_run)
    with tempfile.TemporaryDirectory(prefix="outrider-push-") as scratch:
        folder = Path(scratch) / "dataset"
        folder.mkdir()
        prepare_file = _trajectories if path.suffix.lower() in SUFFIXES else _buffer
        kind, counts, agents = (_traces if path.is_dir() else prepare_file)(path, folder)
        card = dataset_card(repo, kind, counts, agents)
        return upload(
            folder, repo, kind="dataset", card=card, private=private, dry_run=dry_run,
            message=f"Outrider {__version__}: {kind}",
        )  # fmt: skip


def _buffer(path: Path, folder: Path) -> Prepared:
    """Copy a consistent snapshot of the file, including removed steps."""
    copy = folder.with_name("copy.sqlite")  # SQLite puts files of its own beside what it reads
    copy_database(path, copy)
    with closing(Database(copy, writable=False)) as database:
        with database.guard() as db:
            check_schema(path, db)
        dim = int(meta(database, "dim"))
        check_file(copy, embedder=str(meta(database, "embedder")), dim=dim)
        load_all(database, dim=dim)  # every checksum
        with database.guard() as db:
            trajectories = db.execute("SELECT agent, task_key, question, trajectory_id FROM trajectories")
            rows = trajectories.fetchall()
            _require_no_secret(path, (text for row in rows for text in row))
            steps = db.execute("SELECT text, observation FROM steps")
            _require_no_secret(path, (text for row in steps for text in row))
        num_steps = int(meta(database, "num_steps"))
    copy.rename(folder / "buffer.sqlite")
    counts = {"tasks": len({row[1] for row in rows}), "trajectories": len(rows), "steps": num_steps}
    return "step-trace buffer", counts, Counter(row[0] for row in rows)


def _trajectories(path: Path, folder: Path) -> Prepared:
    """Write only the columns that Outrider reads; unknown columns are not published."""
    imported = import_trajectories(path)
    lines = [_record(trajectory, imported) for trajectory in imported.trajectories]
    _require_no_secret(path, lines)
    (folder / "trajectories.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    trajectories = imported.trajectories
    counts = {
        "tasks": len(imported.questions),
        "trajectories": len(trajectories),
        "steps": sum(len(trajectory.steps) for trajectory in trajectories),
    }
    return "trajectories", counts, Counter(trajectory.agent for trajectory in trajectories)


def _record(trajectory: Trajectory, imported: Imported) -> str:
    """Serialize to a line that is read back as the same trajectory."""
    messages = [{"role": message.role, "content": message.content} for message in trajectory.prompt]
    for step in trajectory.steps:
        messages.append({"role": "assistant", "content": step.text})
        if step.observation:
            messages.append({"role": "user", "content": step.observation})
    record = {
        "question": imported.questions[trajectory.task_key],
        "messages": messages,
        "reward": trajectory.reward,
        "task_key": trajectory.task_key,
        "agent": trajectory.agent,
        "trajectory_id": trajectory.trajectory_id,
        "num_tokens": trajectory.num_tokens,
    }
    return json.dumps(record, ensure_ascii=False)


def _traces(path: Path, folder: Path) -> Prepared:
    source = StepFiles(path)
    names = [*map(step_file, source.steps()), *map(evaluation_file, source.evaluations())]
    if not names:
        raise ConfigError(f"{path} has no traces: name the folder traces of a run")
    counts = Counter({"files of steps and evaluations": len(names), "nodes": 0, "rollouts": 0})
    copies = StepFiles(folder / "traces")
    for name in names:
        rows = read_rows(path, name)
        _require_no_secret(path / name, (text for row in rows for text in (row.text, row.metadata)))
        counts["nodes"] += len(rows)
        counts["rollouts"] += sum(row.outcome is not None for row in rows)
        copies.write_rows(name, rows, SCHEMA)
    return "traces", dict(counts), Counter()


def _require_no_secret(path: Path, texts: Iterable[str]) -> None:
    secrets = {
        f"the value of ${name}": value
        for name, value in os.environ.items()
        if may_be_secret(name) and len(value) >= _SHORTEST
    }
    if token := get_token():
        secrets["the token of the hub"] = token
    for text in texts:
        for name, value in secrets.items():
            if value in text or json.dumps(value)[1:-1] in text:
                raise ConfigError(f"{path} contains {name}; nothing was sent: remove it first")


# ``outrider push``: a run's weights with a model card as a repository of the Hugging Face hub.


def push_run(
    run: Path, repo: str, *, step: int | None = None, private: bool = False, dry_run: bool = False
) -> Pushed:
    """Export the newest checkpoint (or that of ``step``), write its card, and upload both. The address is
    ``$HF_ENDPOINT``, the token that of the login or of ``$HF_TOKEN``.

    Raises :class:`ConfigError` for an invalid repository name and for ``private`` if the repository is
    public, :class:`CheckpointError` as :func:`~outrider.training.export.export_run`, and :class:`HubError` if
    the hub fails. Call it again to continue; files that were already uploaded are skipped.
    """
    checkpoint = find_checkpoint(run, step)
    require_target(repo, dry_run=dry_run)
    settings = recorded_settings(run / RECORD)
    base, license_name = find_base(settings.model.name)
    if base and not license_name:
        with suppress(HTTPError, OSError, ValueError):  # unknown to the hub, or the hub is not reachable
            info = HfApi().model_info(base)
            hub_license = info.card_data.get("license") if info.card_data else None
            license_name = hub_license if isinstance(hub_license, str) else ""
    with tempfile.TemporaryDirectory(prefix="outrider-push-") as scratch:
        folder = Path(scratch) / "model"
        export_run(run, folder, checkpoint=checkpoint, with_prompt=False)  # it may be private
        template = folder / "chat_template.jinja"
        card = model_card(
            repo, settings, read_run(run), step=checkpoint_step(checkpoint), base=(base, license_name),
            template=template.read_text(encoding="utf-8") if template.is_file() else "",
        )  # fmt: skip
        return upload(
            folder, repo, kind="model", card=card, private=private, dry_run=dry_run,
            message=f"Outrider {__version__}: step {checkpoint_step(checkpoint)}",
        )  # fmt: skip
