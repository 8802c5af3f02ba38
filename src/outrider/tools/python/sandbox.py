"""Locks for model-written Python: a seccomp filter, Landlock, resource limits and a scratch file system.

Linux only; uses the kernel's own interfaces through ``ctypes``
(``Documentation/userspace-api/landlock.rst``, ``seccomp_filter.rst``, ``linux/seccomp.h``,
``linux/filter.h``). The locks cannot be undone and are inherited by children.

The seccomp filter for x86_64 and aarch64 is an allow-list: a system call that is not named here, also one
that a future kernel adds, fails with EPERM. It excludes all calls that start processes or threads, open
sockets or pipes, send signals, or change an owner, a mode, a time or an attribute of a file (Landlock does
not cover the latter four).
"""

import ctypes
import errno
import os
import platform
import resource
import struct
import sys
import sysconfig
from collections.abc import Callable, Iterable
from dataclasses import dataclass

AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

# Name, number on x86_64, number on aarch64; -1 if the architecture does not have the call. Numbers from Linux
# arch/x86/entry/syscalls/syscall_64.tbl and include/uapi/asm-generic/unistd.h.
_CALLS = {
    "reading and writing open files": (
        "read 0 63, write 1 64, close 3 57, lseek 8 62, pread64 17 67, pwrite64 18 68, readv 19 65, "
        "writev 20 66, dup 32 23, dup2 33 -1, dup3 292 24, fsync 74 82, fdatasync 75 83, "
        "ftruncate 77 46, getdents64 217 61"
    ),
    "file names (Landlock decides which files may be opened, created or removed)": (
        "stat 4 -1, lstat 6 -1, fstat 5 80, newfstatat 262 79, statx 332 291, access 21 -1, "
        "faccessat 269 48, faccessat2 439 439, readlink 89 -1, readlinkat 267 78, getcwd 79 17, "
        "chdir 80 49, rename 82 -1, renameat 264 38, renameat2 316 276, unlink 87 -1, unlinkat 263 35"
    ),
    "memory": ("mmap 9 222, mprotect 10 226, munmap 11 215, brk 12 214, mremap 25 216"),
    "time, waiting, its own signals": (
        "poll 7 -1, ppoll 271 73, select 23 -1, pselect6 270 72, nanosleep 35 101, pause 34 -1, "
        "clock_nanosleep 230 115, clock_gettime 228 113, clock_getres 229 114, gettimeofday 96 169, "
        "time 201 -1, times 100 153, alarm 37 -1, getitimer 36 102, setitimer 38 103, "
        "rt_sigaction 13 134, rt_sigprocmask 14 135, rt_sigreturn 15 139, sigaltstack 131 132, "
        "restart_syscall 219 128"
    ),
    "information about itself and the machine": (
        "getpid 39 172, getppid 110 173, gettid 186 178, getuid 102 174, geteuid 107 175, "
        "getgid 104 176, getegid 108 177, getrusage 98 165, uname 63 160, sysinfo 99 179, "
        "sched_getaffinity 204 123, getrandom 318 278"
    ),
    "needed by the C library to run and to exit": (
        "futex 202 98, sched_yield 24 124, set_tid_address 218 96, set_robust_list 273 99, rseq 334 293, "
        "membarrier 324 283, exit 60 93, exit_group 231 94"
    ),
}
ALLOWED: dict[str, tuple[int, int]] = {
    name: (int(x86_64), int(aarch64))
    for calls in _CALLS.values()
    for name, x86_64, aarch64 in (call.split() for call in calls.split(", "))
}

# Calls that depend on an argument: number on x86_64, number on aarch64, index of the argument.
_OPENING = ((2, -1, 1), (257, 56, 2))  # open, openat
_FCNTL = (72, 25, 1)
_MADVISE = (28, 233, 2)
_IOCTL = (16, 29)

# F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_DUPFD_CLOEXEC. Not F_SETOWN, F_SETSIG and F_SETFL: together they make
# the kernel send any signal to any process of the same user as soon as a pipe becomes ready.
_FCNTL_COMMANDS = (0, 1, 2, 3, 1030)

# NORMAL, RANDOM, SEQUENTIAL, WILLNEED, DONTNEED, FREE, HUGEPAGE, NOHUGEPAGE, DONTDUMP, DODUMP, as used by
# allocators. Not MERGEABLE (another process's pages can be guessed), REMOVE, HWPOISON, SOFT_OFFLINE, nor
# anything that a future kernel adds.
_MADVICE = (0, 1, 2, 3, 4, 8, 14, 15, 16, 17)

_LD_WORD, _AND, _JUMP_EQUAL, _RETURN = 0x20, 0x54, 0x15, 0x06
_ALLOW, _KILL, _FAIL = 0x7FFF0000, 0x80000000, 0x00050000
_NUMBER, _ARCH, _ARGUMENTS = 0, 4, 16  # offsets in struct seccomp_data

_PACKAGE_FOLDERS = ("site-packages", "dist-packages")

_NEW_MOUNTS, _NEW_USER = 0x00020000, 0x10000000
_READ_ONLY, _NO_SUID, _NO_DEVICES, _RECURSIVE, _PRIVATE = 1, 2, 4, 1 << 14, 1 << 18
_DETACH = 2

_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 22, 38
_PR_CAPBSET_DROP, _PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL = 24, 47, 4
_CAPABILITY_VERSION_3, _MAX_CAPABILITIES = 0x20080522, 64
_SECCOMP_MODE_FILTER = 2
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # the same on every architecture
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR, _REMOVE_FILE = 1, 2, 4, 8, 32
_MAKE_REG, _TRUNCATE = 256, 1 << 14
_READING = _EXECUTE | _READ_FILE | _READ_DIR
_FIRST_RIGHTS = (1 << 13) - 1  # all rights of ABI 1
_LATER_RIGHTS = ((2, 1 << 13), (3, _TRUNCATE), (5, 1 << 15))  # (ABI, right): refer, truncate, device ioctl


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of one locked process, in seconds and bytes. ``memory_bytes`` is on top of what is mapped at the
    time of locking.
    """

    wall_seconds: float
    cpu_seconds: int
    memory_bytes: int
    disk_bytes: int
    output_bytes: int
    num_open_files: int = 32
    num_files: int = 256


def problems() -> tuple[str, ...]:
    """Name each lock that this machine lacks; empty if none is missing."""
    if sys.platform != "linux":
        return (f"Landlock and seccomp (this is {sys.platform}, not Linux)",)
    missing = []
    if landlock_abi() < 1:
        missing.append("Landlock (Linux 5.13 or newer with CONFIG_SECURITY_LANDLOCK)")
    if not seccomp_works():
        missing.append(f"seccomp filters for {platform.machine()} (known: {', '.join(AUDIT_ARCH)})")
    return tuple(missing)


# --- System calls: seccomp ---


def filter_program(machine: str) -> bytes:
    """Return the seccomp filter for ``machine`` (``platform.machine()``), 8 bytes per instruction.

    Raises KeyError for an unknown machine.
    """

    def op(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
        return struct.pack("=HBBI", code, if_true, if_false, value)

    def on_call(number: int, body: list[bytes]) -> list[bytes]:
        """``body``, which always returns, for one call; nothing if the architecture lacks the call."""
        return [] if number < 0 else [op(_JUMP_EQUAL, number, 0, len(body)), *body]

    column = list(AUDIT_ARCH).index(machine) if machine in AUDIT_ARCH else -1
    denied, allowed = op(_RETURN, _FAIL | errno.EPERM), op(_RETURN, _ALLOW)
    program = [
        op(_LD_WORD, _ARCH),
        op(_JUMP_EQUAL, AUDIT_ARCH[machine], 1, 0),
        op(_RETURN, _KILL),
        op(_LD_WORD, _NUMBER),
    ]
    for numbers in ALLOWED.values():
        program += on_call(numbers[column], [allowed])
    for *opening, argument in _OPENING:
        # O_RDONLY with O_TRUNC empties a file that may only be read; Landlock prevents it from kernel 6.2 on.
        body = [
            op(_LD_WORD, _ARGUMENTS + 8 * argument),
            op(_AND, os.O_TRUNC | os.O_ACCMODE),
            op(_JUMP_EQUAL, os.O_TRUNC | os.O_RDONLY, 0, 1),
            denied,
            allowed,
        ]
        program += on_call(opening[column], body)
    for (*checked, argument), values in ((_FCNTL, _FCNTL_COMMANDS), (_MADVISE, _MADVICE)):
        body = [op(_LD_WORD, _ARGUMENTS + 8 * argument)]
        for value in values:
            body += [op(_JUMP_EQUAL, value, 0, 1), allowed]
        program += on_call(checked[column], [*body, denied])
    # open() checks whether the file is a terminal and expects this error.
    program += on_call(_IOCTL[column], [op(_RETURN, _FAIL | errno.ENOTTY)])
    return b"".join([*program, denied])


def seccomp_works() -> bool:
    """Whether the kernel accepts filters and there is one for this machine."""
    if sys.platform != "linux" or platform.machine() not in AUDIT_ARCH or sys.maxsize < 2**32:
        return False
    # Address 0 is no program: a kernel with filters returns EFAULT, one without EINVAL.
    failed = _libc().prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, None, 0, 0)
    return bool(failed) and ctypes.get_errno() == errno.EFAULT


def install_filter(program: bytes) -> None:
    """Install a seccomp filter for the calling process."""
    _forbid_new_privileges()
    instructions = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("@HP", len(program) // 8, ctypes.addressof(instructions))
    _check(_libc().prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, header, 0, 0), "prctl(PR_SET_SECCOMP)")


# --- Readable paths: the standard library, the system's shared libraries and the preloaded packages. Never
# all of site-packages, which also contains data sets and with them the answers of tasks. ---


def standard_paths() -> list[str]:
    """Return the existing paths that every interpreter needs, without duplicates and in a fixed order."""
    stdlib = sysconfig.get_path("stdlib")
    paths = ["/dev/null", "/dev/urandom", "/etc/ld.so.cache", "/usr/share/zoneinfo"]
    paths += _children(stdlib, lambda name: name not in _PACKAGE_FOLDERS)
    libraries = [
        "/lib",
        "/lib64",
        "/usr/lib",
        "/usr/lib64",
        str(sysconfig.get_config_var("LIBDIR") or "/usr/lib"),
    ]
    for folder in dict.fromkeys(os.path.realpath(folder) for folder in libraries):
        # Other Pythons are installed here, each with its own packages; ours was listed above.
        paths += _children(folder, lambda name: not name.startswith("python"))
    return [path for path in dict.fromkeys(paths) if os.path.exists(path)]


def package_paths(own: str) -> list[str]:
    """Return the paths of all loaded top-level modules and of the shared libraries that wheels put beside
    them, except for the standard library and the package ``own``.
    """
    names = {name.partition(".")[0] for name in sys.modules} & sys.modules.keys()
    paths = []
    for name in sorted(names - sys.stdlib_module_names - {"__main__", own}):
        spec = sys.modules[name].__spec__
        if spec is None or (not spec.has_location and spec.submodule_search_locations is None):
            continue  # built in, or created in memory
        for location in list(spec.submodule_search_locations or ()) or [str(spec.origin)]:
            paths += [location, os.path.join(os.path.dirname(location), f"{name}.libs")]
    return [path for path in dict.fromkeys(paths) if os.path.exists(path)]


def standard_search_path() -> list[str]:
    """Return ``sys.path`` without folders of installed packages, so that importing one fails as not found."""
    stdlib = sysconfig.get_path("stdlib")
    own_names = (os.path.basename(stdlib), os.path.basename(stdlib).replace(".", "") + ".zip")
    kept = []
    for path in sys.path:
        parts = os.path.relpath(path, os.path.dirname(stdlib)).split(os.sep)
        if parts[0] in own_names and not set(parts) & set(_PACKAGE_FOLDERS):
            kept.append(path)
    return kept


def _children(folder: str, accepts: Callable[[str], bool]) -> list[str]:
    if not os.path.isdir(folder):
        return []
    return [os.path.join(folder, name) for name in sorted(os.listdir(folder)) if accepts(name)]


# --- Scratch files: a tmpfs of fixed size in a private mount namespace (``mount_namespaces(7)``). Only a
# file system counts all files of a process: a file that was removed and closed exists as long as one of its
# pages is mapped, and no folder or descriptor shows it. Needs CAP_SYS_ADMIN or user namespaces. ---


def may_mount() -> bool:
    """Whether this system has mount namespaces. Only a trial shows whether this process may create one."""
    return sys.platform == "linux"


def mount_scratch(folder: str, *, num_bytes: int, num_files: int) -> bool:
    """Mount an empty file system of ``num_bytes`` and ``num_files`` files and folders on ``folder``, visible
    to this process and its children; ``/dev/shm`` becomes an empty read-only folder.

    Returns False, without any change, if the kernel does not allow it. The process must have one thread.
    """
    options = f"size={num_bytes},nr_inodes={num_files + 1},mode=0700"  # one more for the root
    trial = os.fork()  # a failure half way, for example under AppArmor, cannot be undone
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
    """Undo :func:`mount_scratch`, so that the folder can be removed."""
    if sys.platform == "linux":
        _libc().umount2(os.fsencode(folder), _DETACH)


def _mount(folder: str, options: str) -> None:
    libc = _libc()
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
    if os.path.isdir("/dev/shm"):
        failed = libc.mount(b"outrider", b"/dev/shm", b"tmpfs", flags | _READ_ONLY, b"size=4096")
        _check(failed, "mount /dev/shm")


# --- Files: Landlock; resource limits and privileges ---


def landlock_abi() -> int:
    """Version of the kernel's Landlock interface; 0 or less if there is none."""
    return _libc().syscall(_CREATE_RULESET, None, 0, 1) if sys.platform == "linux" else 0


def read_ruleset(paths: Iterable[str]) -> int:
    """Create a Landlock ruleset (file descriptor) that allows reading only below ``paths``."""
    return _ruleset(_READING, [(path, _READ_FILE | _READ_DIR) for path in paths])


def write_ruleset(folder: str) -> int:
    """Create a Landlock ruleset that allows writing only to plain files directly in ``folder``."""
    abi = landlock_abi()
    handled = (_FIRST_RIGHTS | sum(right for since, right in _LATER_RIGHTS if abi >= since)) & ~_READING
    writing = (_WRITE_FILE | _REMOVE_FILE | _MAKE_REG | _TRUNCATE) & handled
    return _ruleset(handled, [(folder, writing), (os.devnull, (_WRITE_FILE | _TRUNCATE) & handled)])


def _ruleset(handled: int, grants: Iterable[tuple[str, int]]) -> int:
    libc = _libc()
    attributes = struct.pack("=Q", handled)
    ruleset = _check(libc.syscall(_CREATE_RULESET, attributes, 8, 0), "landlock_create_ruleset")
    for path, rights in grants:
        target = os.open(path, os.O_PATH | os.O_CLOEXEC)
        if not os.path.isdir(path):
            rights &= _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE  # the only rights that files can have
        failed = libc.syscall(_ADD_RULE, ruleset, 1, struct.pack("=Qi", rights, target), 0)
        os.close(target)
        _check(failed, f"landlock_add_rule for {path}")
    return ruleset


def restrict(ruleset: int) -> None:
    """Apply a ruleset to the calling process, in addition to earlier ones."""
    _forbid_new_privileges()
    _check(_libc().syscall(_RESTRICT_SELF, ruleset, 0), "landlock_restrict_self")


def set_limits(limits: Limits) -> None:
    """Set the resource limits of the calling process; under the filter it cannot raise them again."""
    ceilings = {
        resource.RLIMIT_CPU: (limits.cpu_seconds, limits.cpu_seconds + 1),
        resource.RLIMIT_FSIZE: (limits.disk_bytes, limits.disk_bytes),
        resource.RLIMIT_NOFILE: (limits.num_open_files, limits.num_open_files),
        resource.RLIMIT_NPROC: (0, 0),
        resource.RLIMIT_CORE: (0, 0),
    }
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            mapped = int(file.read().split()[0]) * resource.getpagesize()
        ceilings[resource.RLIMIT_AS] = (mapped + limits.memory_bytes,) * 2
    except FileNotFoundError:
        pass  # without /proc the mapped size is unknown, and there is no memory limit
    for name, ceiling in ceilings.items():
        resource.setrlimit(name, ceiling)


def die_with_parent() -> None:
    """Have the kernel kill this process when the thread that forked it ends."""
    if sys.platform == "linux":
        _check(_libc().prctl(_PR_SET_PDEATHSIG, 9, 0, 0, 0), "prctl(PR_SET_PDEATHSIG)")


def drop_capabilities() -> None:
    """Drop all capabilities for good, so that a worker of root has no more rights than another user's
    (``capabilities(7)``).
    """
    libc = _libc()
    for number in range(_MAX_CAPABILITIES):
        if libc.prctl(_PR_CAPBSET_DROP, number, 0, 0, 0) != 0:
            break  # no such capability, or no right to drop it: then there is nothing to inherit either
    libc.prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
    # 2 x (effective, permitted, inheritable)
    header, nothing = struct.pack("=Ii", _CAPABILITY_VERSION_3, 0), bytes(24)
    _check(libc.capset(header, nothing), "capset")


def _forbid_new_privileges() -> None:
    """Ignore set-user-id bits for this process; seccomp and Landlock both require it."""
    _check(_libc().prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl(PR_SET_NO_NEW_PRIVS)")


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _check(result: int, operation: str) -> int:
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{operation}: {os.strerror(error)}")
    return result
