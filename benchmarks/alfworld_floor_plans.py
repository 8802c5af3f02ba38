"""The floor plans, tables and goal texts of the package ``alfworld`` in one file, for games made offline.

    python -m benchmarks.alfworld_floor_plans --package site-packages/alfworld

The files of the package are read without importing it, because its tables do not need its dependencies.
"""

import argparse
import importlib.util
import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import outrider.environments.alfworld as target

OUT: Final = Path(target.__file__).parent / "floor_plans.json"
# Numbers of receptacles without a position in the layouts (default: one).
_WITHOUT_PLACE: Final = {"StoveBurner": 4}
# The basin is the receptacle; the layouts list the positions of its container.
_BASINS: Final = {"SinkBasin": "Sink", "BathtubBasin": "Bathtub"}
_PROPERTIES: Final = ("Heatable", "Coolable", "Cleanable", "Sliceable")
# The box is a container that opens; the text games have no command for its contents.
_VESSELS: Final = ("Bowl", "Box", "Cup", "Mug", "Pan", "Plate", "Pot")


def read_package(package: Path, license_text: str) -> dict[str, Any]:
    """What the offline games need of the package's folder."""
    constants = _module(package / "gen" / "constants.py")
    goals = _module(package / "gen" / "goal_library.py").gdict
    can_hold = {
        kind: sorted(one for one in held if not one.endswith("Sliced"))
        for kind, held in sorted(constants.VAL_RECEPTACLE_OBJECTS.items())
        if kind not in _VESSELS
    }
    can_hold = {kind: held for kind, held in can_hold.items() if held}
    task_types = [one for one in constants.GOALS if "movable" not in one]
    files = sorted((package / "gen" / "layouts").glob("FloorPlan*-objects.json"), key=_number)
    return {
        "source": "alfworld 0.4.2 (PyPI): gen/layouts, gen/constants.py, gen/goal_library.py",
        "license": license_text,
        "task_types": {
            one: {"rooms": sorted(constants.GOALS_VALID[one]), "texts": goals[one]["templates"]}
            for one in task_types
        },
        "can_hold": can_hold,
        "openable": sorted(constants.OPENABLE_CLASS_SET & set(can_hold)),
        "vessels": sorted(_VESSELS),
        "properties": {name.lower(): _kept(constants.VAL_ACTION_OBJECTS[name]) for name in _PROPERTIES},
        "rooms": {room: [min(numbers), max(numbers)] for room, numbers in constants.SCENE_TYPE.items()},
        "held_out": sorted(constants.TEST_SCENE_NUMBERS),
        "plans": {str(_number(file)): _plan(file, can_hold) for file in files},
    }


def _plan(file: Path, can_hold: dict[str, list[str]]) -> dict[str, Any]:
    kinds = set(json.loads(file.read_text()))
    placed = json.loads(file.with_name(file.name.replace("objects", "openable")).read_text())
    counts = Counter(key.partition("|")[0] for key in placed)
    receptacles = {
        kind: counts[_BASINS.get(kind, kind)] or _WITHOUT_PLACE.get(kind, 1)
        for kind in can_hold
        if kind in kinds or kind in counts
    }
    held = {one for kind in receptacles for one in can_hold[kind]} | {"DeskLamp"}
    return {"receptacles": receptacles, "things": sorted(kinds & held)}


def _module(file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _number(file: Path) -> int:
    return int(file.name.removeprefix("FloorPlan").partition("-")[0])


def _kept(kinds: Iterable[str]) -> list[str]:
    return sorted(one for one in kinds if not one.endswith("Sliced"))


def written(found: dict[str, Any]) -> str:
    """Return JSON with one line per table and plan, so that diffs are readable."""
    lines = []
    for key, value in found.items():
        if isinstance(value, dict):
            inner = ",\n".join(f"  {json.dumps(name)}: {json.dumps(one)}" for name, one in value.items())
            lines.append(f" {json.dumps(key)}: {{\n{inner}\n }}")
        else:
            lines.append(f" {json.dumps(key)}: {json.dumps(value)}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--package", type=Path, required=True, help="folder of the package alfworld")
    parser.add_argument("--license", type=Path, help="its licence; default: that of its .dist-info folder")
    arguments = parser.parse_args()
    notice = arguments.license or next(arguments.package.parent.glob("alfworld-*.dist-info/**/LICENSE*"))
    OUT.write_text(written(read_package(arguments.package, notice.read_text(encoding="utf-8").strip())))


if __name__ == "__main__":
    main()
