"""A file system of fixed size for a sandbox: a tmpfs in a mount namespace of its own. Linux; nothing is seen
from outside.

Only a file system knows what a process holds: a file that was removed and closed lives on while one page of
it is mapped, and no folder and no descriptor shows it. Needs CAP_SYS_ADMIN or user namespaces
(``user_namespaces(7)``, ``mount_namespaces(7)``).
"""

import ctypes
import os
import sys

_NEW_MOUNTS, _NEW_USER = 0x00020000, 0x10000000
_READ_ONLY, _NO_SUID, _NO_DEVICES, _RECURSIVE, _PRIVATE = 1, 2, 4, 1 << 14, 1 << 18
_DETACH = 2
_SHARED_MEMORY = "/dev/shm"


def may_mount() -> bool:
    """Whether this system has mount namespaces at all; only trying tells whether this process may have
    one.
    """
    return sys.platform == "linux"


def mount_scratch(folder: str, *, num_bytes: int, num_files: int) -> bool:
    """Put an empty file system of ``num_bytes`` and ``num_files`` files and folders over ``folder``, for this
    process and its children.

    ``/dev/shm`` becomes an empty folder that cannot be written. False, and nothing is changed, where the
    kernel does not allow it. The process must have one thread.
    """
    options = f"size={num_bytes},nr_inodes={num_files + 1},mode=0700"  # one more for the root
    trial = os.fork()  # half of it may work, as under AppArmor, and cannot be undone
    if trial == 0:
        status = 1
        try:
            _mount(folder, options)
            status = 0
        finally:
            os._exit(status)
    if os.waitpid(trial, 0)[1] != 0:
        return False
    _mount(folder, options)
    return True


def unmount(folder: str) -> None:
    """Take away what :func:`mount_scratch` put over ``folder``, so that the folder can be removed; nothing
    where it did not.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).umount2(os.fsencode(folder), _DETACH)


def _mount(folder: str, options: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    user, group = os.geteuid(), os.getegid()
    if libc.unshare(_NEW_MOUNTS) != 0:
        _check(libc.unshare(_NEW_MOUNTS | _NEW_USER), "unshare")
        for name, line in (
            ("setgroups", "deny"),
            ("uid_map", f"{user} {user} 1"),
            ("gid_map", f"{group} {group} 1"),
        ):
            with open(f"/proc/self/{name}", "w", encoding="ascii") as file:
                file.write(line)
    _check(libc.mount(b"none", b"/", None, _RECURSIVE | _PRIVATE, None), "mount --make-rprivate")
    flags = _NO_SUID | _NO_DEVICES
    _check(libc.mount(b"outrider", os.fsencode(folder), b"tmpfs", flags, options.encode()), "mount tmpfs")
    if os.path.isdir(_SHARED_MEMORY):
        _check(
            libc.mount(b"outrider", _SHARED_MEMORY.encode(), b"tmpfs", flags | _READ_ONLY, b"size=4096"),
            "mount /dev/shm",
        )


def _check(result: int, operation: str) -> None:
    if result != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{operation}: {os.strerror(error)}")
