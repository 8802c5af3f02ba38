"""Resources of a process: memory, processes, threads, ports, open files, temporary files. Reads /proc
(Linux).
"""

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

_MIB: Final = 1 << 20
_PROC: Final = Path("/proc")


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """``memory_mib`` is resident memory of this process; ``processes`` are its descendants; ``ports`` sockets
    of all of them.
    """

    memory_mib: float
    processes: int
    threads: int
    ports: int
    files: int
    temporary: int

    def as_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def held(*, temporary: Path) -> Held:
    """Return the current resources of this process; ``temporary`` is the folder of its temporary files."""
    pages = int((_PROC / "self" / "statm").read_text().split()[1])
    below = descendants(os.getpid())
    return Held(
        memory_mib=round(pages * os.sysconf("SC_PAGE_SIZE") / _MIB, 1),
        processes=len(below),
        threads=len(os.listdir("/proc/self/task")),
        ports=sum(text.startswith("socket:") for pid in (os.getpid(), *below) for text in _open_files(pid)),
        files=len(_open_files(os.getpid())),
        temporary=sum(1 for path in temporary.rglob("*") if path.is_file()),
    )


def descendants(pid: int) -> list[int]:
    """Return all child processes recursively, without those that have ended and were not waited for."""
    parents: dict[int, int] = {}
    for entry in _PROC.iterdir():
        if entry.name.isdigit():
            try:
                state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            except (OSError, ValueError):
                continue  # it has ended since
            if state != "Z":
                parents[int(entry.name)] = int(parent)
    found: list[int] = [pid]
    for one in found:
        found += [child for child, parent in parents.items() if parent == one]
    return found[1:]


def growth(values: Sequence[float]) -> float:
    """Return the largest later value relative to the first one; 0 for fewer than two values."""
    return max(values[1:]) / values[0] - 1 if len(values) > 1 else 0.0


def _open_files(pid: int) -> list[str]:
    found = []
    folder = f"/proc/{pid}/fd"
    try:
        names = os.listdir(folder)
    except OSError:
        return []
    for name in names:
        try:
            found.append(os.readlink(f"{folder}/{name}"))
        except OSError:
            continue  # closed meanwhile, for example the one that lists the folder
    return found
