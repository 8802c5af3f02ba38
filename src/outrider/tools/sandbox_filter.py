"""The system calls that model-written Python may use, as a seccomp filter program for x86_64 and aarch64.

An allow-list: a call that is not named here, also one that a future kernel adds, fails with EPERM. Left out
on purpose are all that start processes or threads, open sockets or pipes, send signals, or change an owner, a
mode, a time or an attribute of a file (Landlock does not cover those four). Numbers: Linux
``arch/x86/entry/syscalls/syscall_64.tbl`` and ``include/uapi/asm-generic/unistd.h``. Program format: classic
BPF, ``linux/seccomp.h`` and ``linux/filter.h``.
"""

import errno
import os
import struct
from collections.abc import Iterable, Mapping
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
