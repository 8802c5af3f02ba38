"""The seccomp filter, run by a small interpreter of BPF; its numbers agree with those of libseccomp."""

import ctypes
import ctypes.util
import errno
import os
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.tools.python import sandbox
from outrider.tools.python.sandbox import ALLOWED, AUDIT_ARCH, filter_program

ALLOW, KILL, DENY, NO_TERMINAL = 0x7FFF0000, 0x80000000, 0x50000 | errno.EPERM, 0x50000 | errno.ENOTTY
FCNTL, IOCTL, OPENAT = (
    {"x86_64": 72, "aarch64": 25},
    {"x86_64": 16, "aarch64": 29},
    {"x86_64": 257, "aarch64": 56},
)
MADVISE = {"x86_64": 28, "aarch64": 233}


def run_filter(program: bytes, number: int, arch: int, args: tuple[int, ...] = ()) -> int:
    """Interpret the program on one struct seccomp_data, as linux/filter.h defines its four instructions."""
    data = struct.pack("=IIQ6Q", number, arch, 0, *args, *[0] * (6 - len(args)))
    index, accumulator = 0, 0
    while True:
        code, if_true, if_false, value = struct.unpack_from("=HBBI", program, 8 * index)
        index += 1
        if code == 0x20:
            (accumulator,) = struct.unpack_from("=I", data, value)
        elif code == 0x54:
            accumulator &= value
        elif code == 0x15:
            index += if_true if accumulator == value else if_false
        else:
            assert code == 0x06
            return int(value)


@pytest.mark.parametrize("machine", AUDIT_ARCH)
def test_exactly_the_named_calls_pass(machine: str) -> None:
    program, arch = filter_program(machine), AUDIT_ARCH[machine]
    column = list(AUDIT_ARCH).index(machine)
    allowed = {numbers[column] for numbers in ALLOWED.values()} - {-1}
    opening = {2, 257} if machine == "x86_64" else {56}
    for number in [*range(600), 0x40000000 + 57, 2**32 - 1]:
        action = run_filter(program, number, arch)
        if number == IOCTL[machine]:
            assert action == NO_TERMINAL
        else:
            assert (action == ALLOW) == (number in allowed | opening | {FCNTL[machine], MADVISE[machine]}), (
                number
            )
            assert action in (ALLOW, DENY)


@given(st.sampled_from(sorted(AUDIT_ARCH)), st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1))
def test_another_architecture_is_killed(machine: str, number: int, arch: int) -> None:
    if arch != AUDIT_ARCH[machine]:
        assert run_filter(filter_program(machine), number, arch) == KILL


@given(st.sampled_from(sorted(AUDIT_ARCH)), st.integers(0, 2**64 - 1))
def test_opening_for_reading_must_not_truncate(machine: str, flags: int) -> None:
    action = run_filter(filter_program(machine), OPENAT[machine], AUDIT_ARCH[machine], (0, 0, flags))
    hidden = flags & os.O_TRUNC and flags & 3 == os.O_RDONLY
    assert action == (DENY if hidden else ALLOW)


@given(st.sampled_from(sorted(AUDIT_ARCH)), st.integers(0, 1100))
def test_file_control_cannot_send_signals(machine: str, command: int) -> None:
    action = run_filter(filter_program(machine), FCNTL[machine], AUDIT_ARCH[machine], (1, command))
    assert action == (ALLOW if command in (0, 1, 2, 3, 1030) else DENY)


@given(st.sampled_from(sorted(AUDIT_ARCH)), st.integers(0, 110))
def test_only_an_allocators_advice_about_memory_passes(machine: str, advice: int) -> None:
    action = run_filter(filter_program(machine), MADVISE[machine], AUDIT_ARCH[machine], (0, 4096, advice))
    assert action == (ALLOW if advice in (0, 1, 2, 3, 4, 8, 14, 15, 16, 17) else DENY)


@pytest.mark.parametrize("machine", AUDIT_ARCH)
def test_numbers_agree_with_libseccomp(machine: str) -> None:
    library = ctypes.util.find_library("seccomp")
    if not library:
        pytest.skip("libseccomp is not installed")
    resolve = ctypes.CDLL(library).seccomp_syscall_resolve_name_arch
    column = list(AUDIT_ARCH).index(machine)
    others = {
        "fcntl": FCNTL[machine],
        "ioctl": IOCTL[machine],
        "openat": OPENAT[machine],
        "madvise": MADVISE[machine],
    }
    for name, number in ({name: numbers[column] for name, numbers in ALLOWED.items()} | others).items():
        reference = resolve(ctypes.c_uint32(AUDIT_ARCH[machine]), name.encode())
        assert number == reference or (number == -1 and reference < 0), name


def test_problems_name_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "landlock_abi", lambda: -1)
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    first, second = sandbox.problems()
    assert first.startswith("Landlock")
    assert "riscv64" in second


def test_probing_does_not_lock_the_caller() -> None:
    sandbox.problems()
    with open("/proc/self/status", encoding="ascii") as file:
        lines = dict(line.split(":\t", 1) for line in file.read().splitlines() if ":\t" in line)
    first = Path("/proc/1/status").read_text(encoding="ascii")
    assert lines["NoNewPrivs"] == first.split("NoNewPrivs:\t")[1][:1]
