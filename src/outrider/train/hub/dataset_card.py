"""The card of a data set: what is in it, how it is loaded, and what nobody has looked at."""

from collections.abc import Mapping
from typing import Final

from huggingface_hub import DatasetCardData

from outrider import __version__
from outrider.train.hub.shown import plain

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
    """Markdown with the hub's fields in front. ``agents`` are told by the number of their trajectories, those
    whose names may be private without one.
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
