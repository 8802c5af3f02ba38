"""``outrider protocol``: how published code plays and trains on a task, point by point."""

import argparse
import json
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from outrider.commands import describe, positive
from outrider.config import to_toml
from outrider.errors import ConfigError
from outrider.files import read_toml
from outrider.printing import plural, print_lines
from outrider.protocols import (
    Difference,
    all_points,
    compare_protocols,
    compare_settings,
    find_protocol,
    format_value,
    nested_settings,
    protocol_names,
)
from outrider.suggestions import did_you_mean


def add_protocol(parser: argparse.ArgumentParser) -> None:
    """The actions and their arguments."""
    describe(
        parser,
        "Compare the protocols of published code with recipes and runs: prompts, parsing, penalties, "
        "training and evaluation, with the place in the code for every point.",
        "outrider protocol list",
        "outrider protocol diff runs/demo verl-agent-alfworld",
    )
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    listing = actions.add_parser("list", help="list the protocols, and which of them a recipe can name")
    describe(listing, "List the protocols, and which of them a recipe can name.", "outrider protocol list")
    listing.set_defaults(command=_list)
    showing = actions.add_parser("show", help="print the points of a protocol and the settings that it fills")
    describe(
        showing,
        "Print the points of a protocol with their places in the published code, the points that Outrider "
        "does not copy with the reasons, and the settings that protocol = NAME fills.",
        "outrider protocol show verl-agent-alfworld",
    )
    showing.add_argument("name", metavar="NAME", help="name of a protocol")
    showing.set_defaults(command=_show)
    comparing = actions.add_parser("diff", help="compare a run, a recipe or a protocol with a protocol")
    describe(
        comparing,
        "Compare a run, a recipe or a protocol with a protocol, point by point. The exit status is 0 if all "
        "points are the same, 3 if one differs or cannot be expressed, and 4 if some are only unknown.",
        "outrider protocol diff opid-alfworld verl-agent-alfworld",
        "outrider protocol diff runs/first verl-agent-alfworld --json",
    )
    comparing.add_argument(
        "left", metavar="RUN|RECIPE|NAME", help="run directory, recipe, or name of a protocol"
    )
    comparing.add_argument("right", metavar="NAME", help="name of a protocol")
    comparing.add_argument("--json", action="store_true", help="print one JSON object with all points")
    comparing.set_defaults(command=_diff)
    counting = actions.add_parser("cost", help="count the tokens that an update computes per episode")
    describe(
        counting,
        "Count the tokens that an update computes for one episode of ALFWorld: with a window, with the whole "
        "chat for every turn, and as one trace. The games are made offline and played by a scripted searcher "
        "that does not win.",
        "outrider protocol cost verl-agent-alfworld",
        "outrider protocol cost opid-alfworld --games 4 --turns 10 50",
    )
    counting.add_argument("name", metavar="NAME", help="name of a protocol for ALFWorld")
    counting.add_argument("--games", type=positive, default=24, metavar="N", help="games (default: 24)")
    counting.add_argument(
        "--thought", type=int, default=100, metavar="N", help="tokens of every thought (default: 100)"
    )
    counting.add_argument(
        "--turns", type=positive, nargs="+", default=[10, 20, 50], metavar="N", help="turns of an episode"
    )
    counting.add_argument("--model", help="model of the tokenizer (default: the packaged SmolLM2)")
    counting.set_defaults(command=_cost)


def _list(_: argparse.Namespace) -> int:
    width = max(map(len, protocol_names()))
    for name in protocol_names():
        protocol = find_protocol(name)
        reason = f" (not run: {', '.join(protocol.needed)})" if protocol.needed else ""
        print_lines(f"{name:{width}}  {protocol.title}{reason}")
    print_lines("", 'protocol = "NAME" in a recipe fills the settings that the recipe leaves out.')
    return 0


def _show(parsed: argparse.Namespace) -> int:
    protocol = find_protocol(parsed.name)
    print_lines(f"{protocol.name}: {protocol.title}", f"source: {protocol.source}")
    group = ""
    for name, value in protocol.points.items():
        point = all_points()[name]
        if point.group != group:
            group = point.group
            print_lines("", group)
        text = f"{name} = {format_value(value)}  ({point.meaning.lower()})"
        print_lines(*textwrap.wrap(text, 100, initial_indent="  ", subsequent_indent="      "))
        if name in protocol.evidence:
            print_lines(f"      {protocol.evidence[name]}")
        if name in protocol.cannot:
            print_lines(f"      NOT COPIED: {protocol.cannot[name]}")
    if not protocol.needed:
        print_lines("", f'settings that protocol = "{protocol.name}" fills:')
        print_lines(*to_toml(nested_settings(protocol.settings())).split("\n"))
    return 0


def _diff(parsed: argparse.Namespace) -> int:
    difference = find_difference(parsed.left, parsed.right)
    if parsed.json:
        print_lines(json.dumps(difference.to_dict()))
    else:
        print_lines(*difference.lines())
    return difference.exit_status


def find_difference(left: str, right: str) -> Difference:
    """Compare a run directory, a recipe or a protocol with the protocol ``right``.

    Raises ConfigError if ``left`` is none of these.
    """
    protocol = find_protocol(right)
    if left in protocol_names():
        return compare_protocols(find_protocol(left), protocol)
    return compare_settings(left, _read_settings(Path(left)), protocol)


def _read_settings(path: Path) -> Mapping[str, Any]:
    if (record := path / "config.toml").is_file():
        return read_toml(record)
    if not path.is_file():
        hint = did_you_mean(str(path), protocol_names())
        raise ConfigError(f"{path} is no run directory, no recipe and no protocol{hint}")
    from outrider.api import run_settings

    return run_settings(path).model_dump(mode="json")


def _cost(parsed: argparse.Namespace) -> int:
    from outrider.commands.dry_run import load_renderer
    from outrider.config import load_settings
    from outrider.engines.local.model import resolve_model
    from outrider.environments.window import WindowedSettings
    from outrider.planning.token_bill import ALL_STEPS, token_bill
    from outrider.printing import FittedTable, Terminal
    from outrider.training.settings import RunSettings

    if parsed.thought < 0:
        raise ConfigError("--thought must be at least 0")
    num_steps = find_protocol(parsed.name).points.get("history_steps")
    if find_protocol(parsed.name).points["tasks"] != "alfworld" or not isinstance(num_steps, int):
        raise ConfigError(f"{parsed.name} does not play ALFWorld with a window: its cost cannot be counted")
    sizes = [f"environment.num_{split}={size}" for split, size in (("train", 1), ("valid", 1), ("test", 999))]
    model = [] if parsed.model is None else [f"model.name={parsed.model}"]
    overrides = [f"protocol={parsed.name}", "environment.data=none", *sizes, *model]
    settings = load_settings(RunSettings, file=None, overrides=overrides)
    assert isinstance(settings.environment, WindowedSettings)
    bill = token_bill(
        settings.environment,
        load_renderer(settings, resolve_model(settings.model.name)),
        windows=sorted({num_steps, 2, 5, ALL_STEPS}),
        turns=sorted(parsed.turns),
        num_games=parsed.games,
        num_thought_tokens=parsed.thought,
    )
    table = FittedTable("samples", *(plural(n, "turn") for n in bill.tokens), "mean prompt")
    for name in next(iter(bill.tokens.values())):
        counts = (f"{tokens[name]:,.0f}" for tokens in bill.tokens.values())
        table.add_row(name, *counts, f"{bill.prompts[name]:,.0f}" if name in bill.prompts else "")
    print_lines(
        f"tokens that an update computes per episode of {parsed.name}, "
        f"{plural(bill.num_games, 'game')}, thoughts of "
        f"{parsed.thought} tokens, tokenizer of {settings.model.name}"
    )
    Terminal().print(table)
    return 0
