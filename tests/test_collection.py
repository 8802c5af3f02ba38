"""The order in which workers get the test files."""

from pathlib import Path

from tests.conftest import LONGEST


def test_the_files_that_start_first_exist() -> None:
    """A renamed file would silently start late and leave a worker without work at the end."""
    folder = Path(__file__).parent
    assert [name for name in LONGEST if not (folder / name).is_file()] == []
