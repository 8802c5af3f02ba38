"""``outrider serve``: the trained policy behind an OpenAI-compatible endpoint."""

import argparse
import os
from pathlib import Path

from outrider.commands import describe
from outrider.errors import ConfigError
from outrider.printing import print_lines


def add_serve(parser: argparse.ArgumentParser) -> None:
    """The arguments."""
    describe(
        parser,
        "Serve the policy of a run at an OpenAI-compatible endpoint (extra: agent). Requests get the system "
        "prompt and the tools of the run if they have none, and its stop strings.",
        "outrider serve runs/demo",
        "outrider serve runs/demo --port 9000 evaluation.temperature=1",
    )
    parser.add_argument("run", type=Path, help="run directory")
    parser.add_argument(
        "overrides", nargs="*", help="section.key=value, for example evaluation.temperature=1"
    )
    parser.add_argument("--step", type=int, metavar="N", help="checkpoint of this step (default: the newest)")
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to bind; others than loopback need --api-key-env"
    )
    parser.add_argument("--port", type=int, default=8000, help="port (default: 8000; 0: any that is free)")
    parser.add_argument(
        "--api-key-env", metavar="NAME", help="environment variable with the key that clients must send"
    )
    parser.set_defaults(command=_serve)


def _serve(parsed: argparse.Namespace) -> int:
    api_key = None
    if (variable := parsed.api_key_env) is not None and not (api_key := os.environ.get(variable, "").strip()):
        problem = "is empty" if variable in os.environ else "is not set"
        raise ConfigError(f"--api-key-env {variable}: the environment variable {problem}")
    if not 0 <= parsed.port < 65536:
        raise ConfigError(f"--port {parsed.port}: ports are numbers from 0 to 65535")
    from outrider import api
    from outrider.training.export import find_checkpoint
    from outrider.training.run_dir import RECORD

    find_checkpoint(parsed.run, parsed.step)  # a folder that is no run is reported before its settings
    settings = api.run_settings(parsed.run / RECORD, overrides=parsed.overrides)
    try:
        from outrider.training.serve import serve_run
    except ImportError as error:
        raise ConfigError(f"outrider serve needs {error.name}: pip install 'outrider[agent]'") from error
    serve_run(
        parsed.run, settings, step=parsed.step, host=parsed.host, port=parsed.port, api_key=api_key,
        note=print_lines,
    )  # fmt: skip
    return 0
