"""What a run was warned of: the lines of ``notes.jsonl`` in capitals, and those of faults."""

import re
from pathlib import Path
from typing import Any, Final

from outrider.json_lines import readable
from outrider.watch.recorded_progress import NOTES

_ALARM: Final = re.compile(r"[A-Z]{2,}[A-Z ]*[: ]|step \d+: .*(lost|missing|faults)")
_LONGER: Final = "to the same bits as far as it went"  # a run that was given more, as documented


def read_alarms(run: Path) -> list[dict[str, Any]]:
    """Warnings with their step (None: before training) and time, in order; none of a run that kept no
    notes.
    """
    try:
        lines = [value for _, value in readable(run / NOTES) if value is not None]
    except OSError:
        return []
    return [
        {"step": line.get("step"), "time": line.get("time"), "text": str(line["text"])}
        for line in lines
        if "text" in line and _ALARM.match(str(line["text"])) and _LONGER not in str(line["text"])
    ]
