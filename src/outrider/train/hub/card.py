"""The model card of a run: what it was trained from and how, its scores with intervals, how to load it."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from huggingface_hub import ModelCard, ModelCardData

from outrider import __version__
from outrider.metrics import WRITTEN_TOKENS
from outrider.printing import format_mean_return, score
from outrider.train.hub.shown import OMITTED, base_model, public_settings, public_variables
from outrider.train.settings import RunSettings
from outrider.watch.run_directory import Evaluation, RunData

BASES: Final[Mapping[str, tuple[str, str]]] = {
    "smollm2-135m-instruct": ("HuggingFaceTB/SmolLM2-135M-Instruct", "apache-2.0"),
    "gemma3-270m": ("google/gemma-3-270m", "gemma"),
}
"""What the packaged models are on the hub, and under which licence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    """The model that training began with: its name on the hub and its licence, each empty where it is not
    known.
    """

    name: str = ""
    license: str = ""


def find_base(name: str) -> Base:
    """The base of ``model.name``. Of a folder the licence is what its own card says; the name of a folder
    says nothing to others.
    """
    if name in BASES:
        return Base(name=BASES[name][0], license=BASES[name][1])
    card = Path(name) / "README.md"
    if card.is_file():
        return Base(license=_license(card))
    return Base(name=base_model(name))


def add_license(base: Base, license_name: Any) -> Base:
    """With the licence that the hub tells of it."""
    return (
        Base(name=base.name, license=license_name) if isinstance(license_name, str) and license_name else base
    )


def model_card(
    repo: str, settings: RunSettings, run: RunData, *, step: int, base: Base, template: str
) -> str:
    """Markdown with the hub's fields in front. ``step`` is the checkpoint's: what came later is left out.
    ``template`` is the chat template.
    """
    method = settings.algorithm.type.rpartition(":")[2]
    data = ModelCardData(
        license=base.license or None,
        base_model=base.name or None,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["outrider", "reinforcement-learning", method],
    )
    tokens = sum(
        float(value)
        for record in run.records
        if record["kind"] == "train" and _record_step(record) <= step
        for name in WRITTEN_TOKENS
        if isinstance(value := record.get(name), int | float)
    )
    environment = settings.environment.type.rpartition(":")[2]
    base_name = base.name or "a model from a folder"
    parts = [
        f"---\n{data.to_yaml()}\n---",
        f"# {repo.rpartition('/')[2]}",
        f"{base_name}, trained with `{method}` on tasks of `{environment}` by Outrider {__version__}: {step} steps, "
        f"{tokens:,.0f} policy tokens, seed {settings.seed}.",
        "" if base.license else "The licence of the model that training began with applies.",
        _scores(run.evaluations, step),
        _loading(repo, settings, template),
        "## Recipe\n\nWhat is not at its default; texts that may name a path, an address or a person are "
        f"left out.\n\n```toml\n{public_settings(settings).strip()}\n```",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _record_step(record: Mapping[str, Any]) -> int:
    return int(record["step"])


def _scores(evaluations: tuple[Evaluation, ...], step: int) -> str:
    rows = []
    for evaluation in evaluations:
        metric = evaluation.metrics.get("score")
        if evaluation.step > step or metric is None:
            continue
        cells = [
            f"**{evaluation.label}**" if evaluation.step == step else evaluation.label,
            f"{evaluation.step}",
            score(metric.value, metric.ci_low, metric.ci_high)
            + format_mean_return(metric.value, evaluation.mean_return).rstrip(","),
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


def _license(card: Path) -> str:
    try:
        license_name = ModelCard.load(card).data.get("license")
    except Exception:  # whatever the parser raises: a card that is no card says nothing
        return ""
    return license_name if isinstance(license_name, str) else ""
