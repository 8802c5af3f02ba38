"""The system calls that model-written Python may use, as a seccomp filter program for x86_64 and aarch64.

An allow-list: a call that is not named here, also one that a future kernel adds, fails with EPERM. Left out
on purpose are all that start processes or threads, open sockets or pipes, send signals, or change an owner, a
mode, a time or an attribute of a file (Landlock does not cover those four). Numbers: Linux
``arch/x86/entry/syscalls/syscall_64.tbl`` and ``include/uapi/asm-generic/unistd.h``. Program format: classic
BPF, ``linux/seccomp.h`` and ``linux/filter.h``.
"""

import ctypes
import errno
import os
import platform
import resource
import struct
import sys
import sysconfig
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

AUDIT_ARCH: Mapping[str, int] = MappingProxyType({"x86_64": 0xC000003E, "aarch64": 0xC00000B7})

# Name -> (number on x86_64, number on aarch64); -1 where the architecture does not have the call.
ALLOWED: Mapping[str, tuple[int, int]] = MappingProxyType(
    {
        # reading and writing open files
        "read": (0, 63),
        "write": (1, 64),
        "close": (3, 57),
        "lseek": (8, 62),
        "pread64": (17, 67),
        "pwrite64": (18, 68),
        "readv": (19, 65),
        "writev": (20, 66),
        "dup": (32, 23),
        "dup2": (33, -1),
        "dup3": (292, 24),
        "fsync": (74, 82),
        "fdatasync": (75, 83),
        "ftruncate": (77, 46),
        "getdents64": (217, 61),
        # names of files (what may be opened, made or removed is Landlock's part)
        "stat": (4, -1),
        "lstat": (6, -1),
        "fstat": (5, 80),
        "newfstatat": (262, 79),
        "statx": (332, 291),
        "access": (21, -1),
        "faccessat": (269, 48),
        "faccessat2": (439, 439),
        "readlink": (89, -1),
        "readlinkat": (267, 78),
        "getcwd": (79, 17),
        "chdir": (80, 49),
        "rename": (82, -1),
        "renameat": (264, 38),
        "renameat2": (316, 276),
        "unlink": (87, -1),
        "unlinkat": (263, 35),
        # memory
        "mmap": (9, 222),
        "mprotect": (10, 226),
        "munmap": (11, 215),
        "brk": (12, 214),
        "mremap": (25, 216),
        # time, waiting, signals of its own
        "poll": (7, -1),
        "ppoll": (271, 73),
        "select": (23, -1),
        "pselect6": (270, 72),
        "nanosleep": (35, 101),
        "pause": (34, -1),
        "clock_nanosleep": (230, 115),
        "clock_gettime": (228, 113),
        "clock_getres": (229, 114),
        "gettimeofday": (96, 169),
        "time": (201, -1),
        "times": (100, 153),
        "alarm": (37, -1),
        "getitimer": (36, 102),
        "setitimer": (38, 103),
        "rt_sigaction": (13, 134),
        "rt_sigprocmask": (14, 135),
        "rt_sigreturn": (15, 139),
        "sigaltstack": (131, 132),
        "restart_syscall": (219, 128),
        # questions about itself and the machine
        "getpid": (39, 172),
        "getppid": (110, 173),
        "gettid": (186, 178),
        "getuid": (102, 174),
        "geteuid": (107, 175),
        "getgid": (104, 176),
        "getegid": (108, 177),
        "getrusage": (98, 165),
        "uname": (63, 160),
        "sysinfo": (99, 179),
        "sched_getaffinity": (204, 123),
        "getrandom": (318, 278),
        # what the C library needs to run and to end
        "futex": (202, 98),
        "sched_yield": (24, 124),
        "set_tid_address": (218, 96),
        "set_robust_list": (273, 99),
        "rseq": (334, 293),
        "membarrier": (324, 283),
        "exit": (60, 93),
        "exit_group": (231, 94),
    }
)

# Calls that depend on an argument: name -> (number on x86_64, number on aarch64, index of the argument).
_OPENING: Mapping[str, tuple[int, int, int]] = MappingProxyType({"open": (2, -1, 1), "openat": (257, 56, 2)})
_FCNTL = (72, 25, 1)
_MADVISE = (28, 233, 2)
_IOCTL = (16, 29)

# F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_DUPFD_CLOEXEC. Not F_SETOWN, F_SETSIG and F_SETFL: together they make
# the kernel send any signal to any process of the same user as soon as a pipe becomes ready.
_FCNTL_COMMANDS = (0, 1, 2, 3, 1030)

# NORMAL, RANDOM, SEQUENTIAL, WILLNEED, DONTNEED, FREE, HUGEPAGE, NOHUGEPAGE, DONTDUMP, DODUMP: what
# allocators use. Not MERGEABLE (another process's pages can be guessed), REMOVE, HWPOISON, SOFT_OFFLINE, nor
# what a future kernel adds.
_MADVICE = (0, 1, 2, 3, 4, 8, 14, 15, 16, 17)

_LD_WORD, _AND, _JUMP_EQUAL, _RETURN = 0x20, 0x54, 0x15, 0x06
_ALLOW, _KILL, _FAIL = 0x7FFF0000, 0x80000000, 0x00050000
_NUMBER, _ARCH, _ARGUMENTS = 0, 4, 16  # offsets in struct seccomp_data


def filter_program(machine: str) -> bytes:
    """The filter for ``machine`` (``platform.machine()``): 8 bytes an instruction. KeyError for an unknown
    machine.
    """
    column = list(AUDIT_ARCH).index(machine) if machine in AUDIT_ARCH else -1
    denied = _op(_RETURN, _FAIL | errno.EPERM)
    program = [
        _op(_LD_WORD, _ARCH),
        _op(_JUMP_EQUAL, AUDIT_ARCH[machine], 1, 0),
        _op(_RETURN, _KILL),
        _op(_LD_WORD, _NUMBER),
    ]
    for call_numbers in ALLOWED.values():
        program += _for_call(call_numbers[column], [_op(_RETURN, _ALLOW)])
    for *numbers_opening, argument in _OPENING.values():
        program += _for_call(numbers_opening[column], _open_without_hidden_truncation(argument, denied))
    for (*numbers, argument), values in ((_FCNTL, _FCNTL_COMMANDS), (_MADVISE, _MADVICE)):
        program += _for_call(numbers[column], _allow_values(argument, values, denied))
    # Every open() asks "are you a terminal?"; the honest answer keeps it quiet.
    program += _for_call(_IOCTL[column], [_op(_RETURN, _FAIL | errno.ENOTTY)])
    return b"".join([*program, denied])


def _open_without_hidden_truncation(argument: int, denied: bytes) -> list[bytes]:
    """O_RDONLY with O_TRUNC empties a file that may only be read; Landlock sees that from kernel 6.2 on
    only.
    """
    return [
        _op(_LD_WORD, _ARGUMENTS + 8 * argument),
        _op(_AND, os.O_TRUNC | os.O_ACCMODE),
        _op(_JUMP_EQUAL, os.O_TRUNC | os.O_RDONLY, 0, 1),
        denied,
        _op(_RETURN, _ALLOW),
    ]


def _allow_values(argument: int, values: Iterable[int], denied: bytes) -> list[bytes]:
    """Only these values of an argument."""
    body = [_op(_LD_WORD, _ARGUMENTS + 8 * argument)]
    for value in values:
        body += [_op(_JUMP_EQUAL, value, 0, 1), _op(_RETURN, _ALLOW)]
    return [*body, denied]


def _for_call(number: int, body: list[bytes]) -> list[bytes]:
    """``body`` (which always returns) for one call number; nothing where the architecture lacks the call."""
    return [] if number < 0 else [_op(_JUMP_EQUAL, number, 0, len(body)), *body]


def _op(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)


# Paths that locked Python may read: the standard library, the shared libraries of the system and the
# preloaded packages.
#
# Never all of ``site-packages``: it holds data sets too, and with them the answers of the tasks.


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


# A file system of fixed size for a sandbox: a tmpfs in a mount namespace of its own. Linux; nothing is seen
# from outside.
#
# Only a file system knows what a process holds: a file that was removed and closed lives on while one page of
# it is mapped, and no folder and no descriptor shows it. Needs CAP_SYS_ADMIN or user namespaces
# (``user_namespaces(7)``, ``mount_namespaces(7)``).


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
        _check_call(libc.unshare(_NEW_MOUNTS | _NEW_USER), "unshare")
        for name, line in (
            ("setgroups", "deny"),
            ("uid_map", f"{user} {user} 1"),
            ("gid_map", f"{group} {group} 1"),
        ):
            with open(f"/proc/self/{name}", "w", encoding="ascii") as file:
                file.write(line)
    _check_call(libc.mount(b"none", b"/", None, _RECURSIVE | _PRIVATE, None), "mount --make-rprivate")
    flags = _NO_SUID | _NO_DEVICES
    _check_call(
        libc.mount(b"outrider", os.fsencode(folder), b"tmpfs", flags, options.encode()), "mount tmpfs"
    )
    if os.path.isdir(_SHARED_MEMORY):
        _check_call(
            libc.mount(b"outrider", _SHARED_MEMORY.encode(), b"tmpfs", flags | _READ_ONLY, b"size=4096"),
            "mount /dev/shm",
        )


def _check_call(result: int, operation: str) -> None:
    if result != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{operation}: {os.strerror(error)}")


# Locks the calling process in: resource limits, Landlock (files) and seccomp (system calls). Linux; no
# library needed.
#
# The locks are one-way and pass on to children. They are built from the kernel's own interface through
# ``ctypes``: ``Documentation/userspace-api/landlock.rst`` and ``seccomp_filter.rst`` of the Linux kernel.


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
