"""Starts the program. The folder's files are a package under a name of its own: were the folder searched for
modules, they would hide others' of the same names.
"""

import sys
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

NAME = "outrider_verifiers_player"

if __name__ == "__main__":
    spec = spec_from_file_location(NAME, Path(__file__).with_name("__init__.py"))
    assert spec is not None and spec.loader is not None  # it is a file of Python
    sys.modules[NAME] = module_from_spec(spec)
    spec.loader.exec_module(sys.modules[NAME])
    import_module(f"{NAME}.playing").main()
