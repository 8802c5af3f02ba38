"""Paths that locked Python may read: the standard library, the shared libraries of the system and the
preloaded packages.

Never all of ``site-packages``: it holds data sets too, and with them the answers of the tasks.
"""

import os
import sys
import sysconfig
from collections.abc import Callable, Iterable

_OPEN_FILES = ("/dev/null", "/dev/urandom", "/etc/ld.so.cache", "/usr/share/zoneinfo")
_LIBRARY_FOLDERS = ("/lib", "/lib64", "/usr/lib", "/usr/lib64")
_PACKAGE_FOLDERS = ("site-packages", "dist-packages")


def standard_paths() -> list[str]:
    """Existing paths that every interpreter needs, in a fixed order, none inside another's list twice."""
    stdlib = sysconfig.get_path("stdlib")
    libraries = [*_LIBRARY_FOLDERS, str(sysconfig.get_config_var("LIBDIR") or "/usr/lib")]
    paths = [*_OPEN_FILES, *_children(stdlib, lambda name: name not in _PACKAGE_FOLDERS)]
    for folder in dict.fromkeys(os.path.realpath(folder) for folder in libraries):
        # Other Pythons live here, each with its own packages; ours was listed above.
        paths += _children(folder, lambda name: not name.startswith("python"))
    return [path for path in dict.fromkeys(paths) if os.path.exists(path)]


def package_paths(names: Iterable[str]) -> list[str]:
    """Files and folders of loaded top-level modules ``names``, and of the shared libraries that wheels put
    beside them.
    """
    paths = []
    for name in sorted(names):
        module = sys.modules[name]
        spec = module.__spec__
        if spec is None or (not spec.has_location and spec.submodule_search_locations is None):
            continue  # built in, or made in memory
        locations = list(spec.submodule_search_locations or ()) or [str(spec.origin)]
        for location in locations:
            paths += [location, os.path.join(os.path.dirname(location), f"{name}.libs")]
    return [path for path in dict.fromkeys(paths) if os.path.exists(path)]


def loaded_packages(own: str) -> set[str]:
    """Top-level modules loaded now that belong neither to the standard library nor to the package ``own``."""
    top = {name.partition(".")[0] for name in sys.modules}
    return {name for name in top - sys.stdlib_module_names - {"__main__", own} if name in sys.modules}


def standard_search_path() -> list[str]:
    """``sys.path`` without any folder of installed packages, so that ``import`` of a closed one says "no
    module".
    """
    stdlib = sysconfig.get_path("stdlib")
    return [path for path in sys.path if _belongs(path, stdlib)]


def _belongs(path: str, stdlib: str) -> bool:
    parts = os.path.relpath(path, os.path.dirname(stdlib)).split(os.sep)
    zipped = os.path.basename(stdlib).replace(".", "") + ".zip"
    return parts[0] in (os.path.basename(stdlib), zipped) and not set(parts) & set(_PACKAGE_FOLDERS)


def _children(folder: str, accepts: Callable[[str], bool]) -> list[str]:
    if not os.path.isdir(folder):
        return []
    return [os.path.join(folder, name) for name in sorted(os.listdir(folder)) if accepts(name)]
