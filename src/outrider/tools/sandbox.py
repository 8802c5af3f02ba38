"""Locks the calling process in: resource limits, Landlock (files) and seccomp (system calls). Linux; no
library needed.

The locks are one-way and pass on to children. They are built from the kernel's own interface through
``ctypes``: ``Documentation/userspace-api/landlock.rst`` and ``seccomp_filter.rst`` of the Linux kernel.
"""

import ctypes
import errno
import os
import platform
import resource
import struct
import sys
from collections.abc import Iterable
from dataclasses import dataclass

from outrider.tools.sandbox_filter import AUDIT_ARCH

_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 22, 38
_PR_CAPBSET_DROP, _PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL = 24, 47, 4
_CAPABILITY_VERSION_3, _MAX_CAPABILITIES = 0x20080522, 64
_SECCOMP_MODE_FILTER = 2
# The same numbers on every architecture.
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR, _REMOVE_FILE, _MAKE_REG, _TRUNCATE = (
    1,
    2,
    4,
    8,
    32,
    256,
    1 << 14,
)
_READING = _EXECUTE | _READ_FILE | _READ_DIR
_FIRST_RIGHTS = (1 << 13) - 1  # what ABI 1 knows
# (ABI, right): refer, truncate, ioctl on devices
_LATER_RIGHTS = ((2, 1 << 13), (3, _TRUNCATE), (5, 1 << 15))


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Ceilings of one locked process. Seconds and bytes; ``memory_bytes`` counts beyond what is mapped
    already.
    """

    wall_seconds: float
    cpu_seconds: int
    memory_bytes: int
    disk_bytes: int
    output_bytes: int
    num_open_files: int = 32
    num_files: int = 256


def problems() -> tuple[str, ...]:
    """Parts of the full lock that this machine lacks, each as a short phrase; empty where none is missing."""
    if sys.platform != "linux":
        return (f"Landlock and seccomp (this is {sys.platform}, not Linux)",)
    missing = []
    if landlock_abi() < 1:
        missing.append("Landlock (Linux 5.13 or newer with CONFIG_SECURITY_LANDLOCK)")
    if not seccomp_works():
        missing.append(f"seccomp filters for {platform.machine()} (known: {', '.join(AUDIT_ARCH)})")
    return tuple(missing)


def landlock_abi() -> int:
    """Version of the kernel's Landlock interface; 0 or less where there is none."""
    return _libc().syscall(_CREATE_RULESET, None, 0, 1) if sys.platform == "linux" else 0


def seccomp_works() -> bool:
    """Whether the kernel takes filters and :mod:`sandbox_filter` has the numbers of this machine."""
    if sys.platform != "linux" or platform.machine() not in AUDIT_ARCH or sys.maxsize < 2**32:
        return False
    # No program at address 0: a kernel with filters says EFAULT, one without says EINVAL.
    failed = _libc().prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, None, 0, 0)
    return bool(failed) and ctypes.get_errno() == errno.EFAULT


def die_with_parent() -> None:
    """Have the kernel kill this process when the thread that forked it ends."""
    if sys.platform == "linux":
        _check(_libc().prctl(_PR_SET_PDEATHSIG, 9, 0, 0, 0), "prctl(PR_SET_PDEATHSIG)")


def drop_capabilities() -> None:
    """Give up every capability for good, so that a worker of root is no more than any other user's
    (``capabilities(7)``).
    """
    libc = _libc()
    for number in range(_MAX_CAPABILITIES):
        if libc.prctl(_PR_CAPBSET_DROP, number, 0, 0, 0) != 0:
            break  # no such capability, or none to drop it with: then there is nothing to inherit either
    libc.prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
    # 2 x (effective, permitted, inheritable)
    header, nothing = struct.pack("=Ii", _CAPABILITY_VERSION_3, 0), bytes(24)
    _check(libc.capset(header, nothing), "capset")


def set_limits(limits: Limits) -> None:
    """Resource limits of the calling process; none of them can be raised again under the filter."""
    mapped = _mapped_bytes()
    ceilings = {
        resource.RLIMIT_CPU: (limits.cpu_seconds, limits.cpu_seconds + 1),
        resource.RLIMIT_FSIZE: (limits.disk_bytes, limits.disk_bytes),
        resource.RLIMIT_NOFILE: (limits.num_open_files, limits.num_open_files),
        resource.RLIMIT_NPROC: (0, 0),
        resource.RLIMIT_CORE: (0, 0),
    }
    if mapped:
        ceilings[resource.RLIMIT_AS] = (mapped + limits.memory_bytes,) * 2
    for name, ceiling in ceilings.items():
        resource.setrlimit(name, ceiling)


def read_ruleset(paths: Iterable[str]) -> int:
    """A Landlock ruleset (file descriptor) under which only ``paths``, and what lies in them, can be read."""
    return _ruleset(_READING, [(path, _READ_FILE | _READ_DIR) for path in paths])


def write_ruleset(folder: str) -> int:
    """A Landlock ruleset under which only plain files directly in ``folder`` can be made, changed and
    removed.
    """
    abi = landlock_abi()
    handled = (_FIRST_RIGHTS | sum(right for since, right in _LATER_RIGHTS if abi >= since)) & ~_READING
    writing = (_WRITE_FILE | _REMOVE_FILE | _MAKE_REG | _TRUNCATE) & handled
    return _ruleset(handled, [(folder, writing), (os.devnull, (_WRITE_FILE | _TRUNCATE) & handled)])


def restrict(ruleset: int) -> None:
    """Put the calling process under a ruleset, on top of those it is under already."""
    forbid_new_privileges()
    _check(_libc().syscall(_RESTRICT_SELF, ruleset, 0), "landlock_restrict_self")


def forbid_new_privileges() -> None:
    """No set-user-id program can raise this process; both locks demand it."""
    _check(_libc().prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl(PR_SET_NO_NEW_PRIVS)")


def install_filter(program: bytes) -> None:
    """Put the calling process under a seccomp filter program."""
    forbid_new_privileges()
    instructions = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("@HP", len(program) // 8, ctypes.addressof(instructions))
    _check(_libc().prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, header, 0, 0), "prctl(PR_SET_SECCOMP)")


def _ruleset(handled: int, grants: Iterable[tuple[str, int]]) -> int:
    libc = _libc()
    ruleset = _check(
        libc.syscall(_CREATE_RULESET, struct.pack("=Q", handled), 8, 0), "landlock_create_ruleset"
    )
    for path, rights in grants:
        target = os.open(path, os.O_PATH | os.O_CLOEXEC)
        if not os.path.isdir(path):
            # the kernel refuses folder rights on a file
            rights &= _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE
        rule = struct.pack("=Qi", rights, target)
        failed = libc.syscall(_ADD_RULE, ruleset, 1, rule, 0)
        os.close(target)
        _check(failed, f"landlock_add_rule for {path}")
    return ruleset


def _mapped_bytes() -> int:
    """Size of the address space now; 0 where the kernel does not say (then there is no memory limit)."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[0]) * resource.getpagesize()
    except FileNotFoundError:
        return 0


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _check(result: int, operation: str) -> int:
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{operation}: {os.strerror(error)}")
    return result
