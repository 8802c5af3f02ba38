"""Small files that survive a kill and a power failure: replaced as a whole, forced to disk."""

import os
from pathlib import Path


def replace_file(path: Path, content: bytes) -> None:
    """Replace the file so that a kill leaves either the old content or the new. Raises OSError."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(temporary, path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Force a file, or the names in a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
