"""Hostile programs for the Python tool. Each prints PWNED after the forbidden action has really happened.

``@SECRET@`` is a file outside of the sandbox, ``@FOLDER@`` the folder of all scratch folders, ``@PORT@`` a
port with a listener, ``@PID@`` the process of the caller. Limits: 1.5 s, 4 MiB of files, 256 MiB of memory, 1
MiB of output.
"""

import os
from collections.abc import Mapping
from types import MappingProxyType

_READ = ("@SECRET@", "/etc/passwd", "/etc/hostname", "/etc/shadow", "/root/.bashrc", "/proc/1/cmdline",
         "/proc/self/environ", "/proc/self/maps", "/proc/self/mem", "/proc/self/cmdline",
         "/proc/@PID@/environ", "/proc/@PID@/cmdline", "/proc/@PID@/mem", "/proc/cpuinfo", "/proc/net/tcp",
         "/sys/kernel/uevent_seqnum", "/dev/mem", "/dev/kmsg", "../../../../../etc/passwd",
         "/proc/self/root/etc/passwd", "/proc/self/cwd/../../etc/passwd",
         "/dev/fd/0/../../etc/passwd")  # fmt: skip
_WRITE = ("@SECRET@", "../next-call", "/tmp/outrider-pwned", "/var/tmp/outrider-pwned",
          "/dev/shm/outrider-pwned", "/etc/outrider-pwned", "@FOLDER@/outrider-pwned", "/run/outrider-pwned",
          "/proc/self/oom_score_adj", "/proc/self/comm", "/sys/kernel/mm/ksm/run",
          "/proc/sys/kernel/hostname")  # fmt: skip
_LIST = (
    "/",
    "/etc",
    "/proc",
    "/proc/self/fd",
    "/proc/self/task",
    "/dev/shm",
    "@FOLDER@",
    "../..",
    "/root",
    "/tmp",
)
_OPEN_ITSELF = (
    "/proc/self/fd/0",
    "/proc/self/fd/1",
    "/proc/self/fd/2",
    "/dev/stdout",
    "/dev/stderr",
    "/dev/fd/1",
    "/dev/tty",
    "/dev/ptmx",
)

# Numbers and arguments of system calls on x86_64; other machines have other numbers.
_CALLS = {
    "fork": (57,), "vfork": (58,), "clone": (56, 17), "clone3": (435, 0, 0), "execve": (59, 0, 0, 0),
    "execveat": (322, -100, 0, 0, 0, 0), "socket": (41, 2, 1, 0), "socketpair": (53, 1, 1, 0, 0),
    "connect": (42, 1, 0, 0), "sendto": (44, 1, 0, 0, 0, 0, 0), "sendmsg": (46, 1, 0, 0),
    "recvfrom": (45, 1, 0, 0, 0, 0, 0), "recvmsg": (47, 1, 0, 0), "shutdown": (48, 1, 2),
    "ptrace": (101, 16, 1), "process_vm_readv": (310, 1, 0, 0, 0, 0),
    "process_vm_writev": (311, 1, 0, 0, 0, 0), "kill": (62, 1, 0), "tkill": (200, 1, 9),
    "tgkill": (234, 1, 1, 9), "rt_sigqueueinfo": (129, 1, 9, 0), "pidfd_open": (434, 1, 0),
    "pidfd_getfd": (438, 0, 0, 0), "pidfd_send_signal": (424, 0, 9, 0, 0), "prctl death signal": (157, 1, 0),
    "prctl dumpable": (157, 4, 0), "prctl seccomp": (157, 22, 2, 0), "seccomp": (317, 1, 0, 0),
    "memfd_create": (319, 0, 0), "shmget": (29, 0, 1 << 30, 512), "shmat": (30, 0, 0, 0),
    "mq_open": (240, 0, 66, 0, 0), "pipe": (22, 0), "pipe2": (293, 0, 0), "eventfd": (290, 0, 0),
    "timerfd": (283, 0, 0), "signalfd": (289, -1, 0, 8, 0), "epoll": (291, 0), "io_uring_setup": (425, 1, 0),
    "io_setup": (206, 1, 0), "unshare": (272, 1 << 28), "setns": (308, 0, 0), "mount": (165, 0, 0, 0, 0, 0),
    "umount2": (166, 0, 2), "move_mount": (429, 0, 0, 0, 0, 0), "open_tree": (428, -100, 0, 0),
    "fsopen": (430, 0, 0), "pivot_root": (155, 0, 0), "chroot": (161, 0), "bpf": (321, 0, 0, 0),
    "keyctl": (250, 0), "add_key": (248, 0, 0, 0, 0, 0), "prlimit64": (302, 0, 0, 0, 0),
    "setrlimit": (160, 9, 0), "setsid": (112,), "setpgid": (109, 0, 0), "setuid": (105, 0),
    "setresuid": (117, 0, 0, 0), "capset": (126, 0, 0), "inotify_init": (253,), "fanotify_init": (300, 0, 0),
    "mknod": (133, 0, 0, 0), "mkdir": (83, 0, 511), "link": (86, 0, 0), "symlink": (88, 0, 0),
    "chmod": (90, 0, 0), "chown": (92, 0, 0, 0), "utimensat": (280, 0, 0, 0, 0),
    "setxattr": (188, 0, 0, 0, 0, 0), "truncate": (76, 0, 0), "fallocate": (285, 0, 0, 0, 1),
    "copy_file_range": (326, 0, 0, 0, 0, 0, 0), "splice": (275, 0, 0, 0, 0, 0, 0),
    "sendfile": (40, 1, 0, 0, 1), "openat2": (437, 0, 0, 0, 0), "name_to_handle_at": (303, 0, 0, 0, 0, 0),
    "open_by_handle_at": (304, 0, 0, 0), "userfaultfd": (323, 0), "perf_event_open": (298, 0, 0, -1, -1, 0),
    "personality": (135, 0), "setpriority": (141, 0, 0, -20), "sched_setaffinity": (203, 0, 0, 0),
    "mlock": (149, 0, 0), "madvise hwpoison": (28, 0, 0, 100), "madvise mergeable": (28, 0, 0, 12),
    "madvise remove": (28, 0, 0, 9), "kexec_load": (246, 0, 0, 0, 0), "init_module": (175, 0, 0, 0),
    "reboot": (169, 0, 0, 0, 0), "syslog": (103, 3, 0, 0), "acct": (163, 0),
    "landlock_restrict_self": (446, 0, 0), "unknown to every kernel": (9999,),
    "fork of the x32 table": (0x40000000 + 57,),
}  # fmt: skip

_OTHERS = {
    "fork and stay": "import os, time\nif os.fork() == 0:\n    time.sleep(60)\nprint('PWNED')",
    "fork bomb": "import os\nfor _ in range(200):\n    if os.fork() == 0: os._exit(0)\nprint('PWNED')",
    "daemon": "import os\nif os.fork() == 0:\n    os.setsid(); os.fork()\nprint('PWNED')",
    "spawn": "import os\nos.posix_spawn('/bin/true', ['true'], {})\nprint('PWNED')",
    "multiprocessing": "import multiprocessing as m\np = m.Process(target=print)\np.start()\nprint('PWNED')",
    "subprocess": "import subprocess\nsubprocess.run(['id', '-u'], check=True)\nprint('PWNED')",
    "exec": "import os\nos.execv('/bin/echo', ['echo', 'PW' 'NED'])",
    "threads": (
        "import threading, time\nfor _ in range(10000):\n"
        "    threading.Thread(target=time.sleep, args=(9,)).start()\nprint('PWNED')"
    ),
    "subclasses": "w = [c for c in ().__class__.__base__.__subclasses__() if "
    "c.__name__ == '_wrap_close'][0]\n"
    "print('PWNED' if w.__init__.__globals__['system']('exit 7') == 7 << 8 else '')",
    "tcp": "import socket\nsocket.create_connection(('127.0.0.1', @PORT@), 2)\nprint('PWNED')",
    "udp": (
        "import socket\nsocket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', "
        "('127.0.0.1', @PORT@))\nprint('PWNED')"
    ),
    "unix socket": "import socket\nsocket.socket(socket.AF_UNIX)\nprint('PWNED')",
    "netlink": "import socket\nsocket.socket(socket.AF_NETLINK, socket.SOCK_RAW)\nprint('PWNED')",
    "vsock": "import socket\nsocket.socket(40, socket.SOCK_STREAM)\nprint('PWNED')",
    "socket from output": (
        "import socket\ns = socket.socket(fileno=1)\ns.connect(('127.0.0.1', @PORT@))\nprint('PWNED')"
    ),
    "descriptor passed": (
        "import array, socket\nsocket.socket(fileno=1).sendmsg([b'x'], [(1, 1, array.array('i', [0]))])\n"
        "print('PWNED')"
    ),
    "dns": (
        "import socket\nsocket.getaddrinfo('localhost', 80)\n"
        "socket.create_connection(('localhost', @PORT@))\nprint('PWNED')"
    ),
    "kill the asker": "import os\nos.kill(@PID@, 0)\nprint('PWNED')",
    "kill the supervisor": "import os\nos.kill(os.getppid(), 9)\nprint('PWNED')",
    "kill everyone": "import os\nos.kill(-1, 9)\nprint('PWNED')",
    "kill the group": "import os\nos.killpg(os.getpgid(os.getppid()), 9)\nprint('PWNED')",
    "signal by fcntl": "import fcntl\nfcntl.fcntl(1, fcntl.F_SETOWN, @PID@)\nprint('PWNED')",
    "signals for input": "import fcntl, os\nfcntl.fcntl(1, fcntl.F_SETFL, os.O_ASYNC)\nprint('PWNED')",
    "blocking output": "import fcntl, os\nfcntl.fcntl(1, fcntl.F_SETFL, os.O_NONBLOCK)\nprint('PWNED')",
    "raise limits": "import resource as r\nr.setrlimit(r.RLIMIT_AS, (-1, -1))\nprint('PWNED')",
    "nice": "import os\nos.nice(-5)\nprint('PWNED')",
    "symbolic link": "import os\nos.symlink('@SECRET@', 'x')\nprint('PWNED')",
    "hard link": "import os\nos.link('@SECRET@', 'x')\nprint('PWNED')",
    "rename in": "import os\nos.rename('@SECRET@', 'x')\nprint('PWNED')",
    "rename out": "import os\nopen('x', 'w').close()\nos.rename('x', '../x')\nprint('PWNED')",
    "rename the folder": "import os\nos.rename('.', '../other')\nprint('PWNED')",
    "remove the folder": "import os\nos.rmdir(os.getcwd())\nprint('PWNED')",
    "delete": "import os\nos.remove('@SECRET@')\nprint('PWNED')",
    "truncate": "import os\nos.truncate('@SECRET@', 0)\nprint('PWNED')",
    "truncate on reading": "import os\nos.open(os.__file__, os.O_RDONLY | os.O_TRUNC)\nprint('PWNED')",
    "change the mode": "import os\nos.chmod('@SECRET@', 0)\nprint('PWNED')",
    "change the owner": "import os\nos.chown('@SECRET@', 1, 1)\nprint('PWNED')",
    "change the time": "import os\nos.utime('@SECRET@', (0, 0))\nprint('PWNED')",
    "fifo": "import os\nos.mkfifo('x')\nprint('PWNED')",
    "device": "import os, stat\nos.mknod('x', stat.S_IFCHR | 0o600, os.makedev(1, 1))\nprint('PWNED')",
    "folder": "import os\nos.mkdir('x')\nprint('PWNED')",
    "walk up": "import os\nfd = os.open('.', os.O_RDONLY)\nos.chdir('/')\nprint('PWNED', os.listdir('etc'))",
    "installed package": "import pydantic\nprint('PWNED')",
    "own library": "import outrider\nprint('PWNED')",
    "answers on disk": "import site, os\nprint('PWNED', os.listdir(site.getsitepackages()[0]))",
    "environment": "import os\nprint('PWNED' if set(os.environ) - {'HOME', 'TMPDIR'} else '')",
    "environment of libc": (
        "import ctypes\ng = ctypes.CDLL(None).getenv\ng.restype = ctypes.c_char_p\n"
        "print('PWNED' if g(b'PATH') else '')"
    ),
    "inherited descriptors": (
        "import os\nfor n in range(3, 256):\n    try: os.fstat(n)\n    except OSError: continue\n"
        "    print('PWNED', n)"
    ),
    "frames": (
        "import sys\nf = sys._getframe()\nwhile f.f_back: f = f.f_back\n"
        "print('PWNED' if '@SECRET@' in str(f.f_locals) else '')"
    ),
    "objects": (
        "import gc\nprint('PWNED' if any('secret' in str(o) for o in gc.get_objects() if type(o) "
        "is dict and 'landlock' in o) else '')"
    ),
    "endless": "while True: pass",
    "sleep": "import time\ntime.sleep(600)",
    "ignores signals": (
        "import signal\nfor s in (1, 2, 15, 24, 14): signal.signal(s, signal.SIG_IGN)\nwhile True: pass"
    ),
    "blocks signals": (
        "import signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))\nwhile True: pass"
    ),
    "closes output": "import os\nos.close(1); os.close(2)\nwhile True: pass",
    "big number": "x = 9**9**9",
    "big factorial": "import math\nmath.factorial(10**9)",
    "regular expression": "import re\nre.match(r'(a+)+$', 'a' * 40 + 'b')",
    "big list": "x = [0] * 10**11\nprint('PWNED')",
    "memory": "x = bytearray(10 * 2**30)\nprint('PWNED')",
    "memory in pieces": "x = []\nwhile len(x) < 1000: x.append(bytearray(2**20))\nprint('PWNED')",
    "shared memory": "import mmap\nx = [mmap.mmap(-1, 2**24) for _ in range(100)]\nprint('PWNED')",
    "mapped memory": (
        "import mmap\nx = [mmap.mmap(-1, 2**24, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) for _ "
        "in range(100)]\nprint('PWNED')"
    ),
    "deep recursion": (
        "import sys\nsys.setrecursionlimit(10**9)\ndef f(n): return f(n + 1)\nf(0)\nprint('PWNED')"
    ),
    "deep objects": "x = ()\nfor _ in range(10**6): x = (x,)\nprint(repr(x))\nprint('PWNED')",
    "crash": "import ctypes\nctypes.string_at(0)\nprint('PWNED')",
    "abort": "import os\nos.abort()",
    "output": "while True: print('A' * 2**20)",
    "error output": "import sys\nwhile True: sys.stderr.write('A' * 2**16)",
    "one big line": "print('A' * 10**8)",
    "many files": "for i in range(10**6): open(str(i), 'w').close()\nprint('PWNED')",
    "big file": "f = open('big', 'wb')\nfor _ in range(200): f.write(bytes(2**20))\nprint('PWNED')",
    "several files": "for i in range(20): open(str(i), 'wb').write(bytes(2**20))\nprint('PWNED')",
    "unlinked files": (
        "import os\nk = []\nfor i in range(20):\n    k.append(open('x', 'w+b', 0))\n"
        "    k[-1].write(bytes(2**20))\n    os.remove('x')\nprint('PWNED')"
    ),
    "mapped files": "import mmap, os\nk = []\nfor i in range(20):\n    f = open('x', 'w+b', 0)\n"
    "    f.write(bytes(2**20))\n    k.append(mmap.mmap(f.fileno(), 4096))\n"
    "    os.remove('x')\n    f.close()\nprint('PWNED')",
    "written by mapping": "import mmap, os\nk = []\nfor i in range(20):\n    f = open(str(i), 'w+b', 0)\n"
    "    f.truncate(2**20)\n    k.append(mmap.mmap(f.fileno(), 2**20))\n"
    "    k[-1][:] = bytes([1]) * 2**20\nprint('PWNED')",
    "own pipe, stolen": (
        "import os\nos.read(os.open('/proc/self/fd/1', os.O_RDONLY | os.O_NONBLOCK), 9)\nprint('PWNED')"
    ),
    "own output, read": "import os\nprint('PWNED' if os.read(1, 9) else '')",
    "exit at once": "import os\nos._exit(0)",
    "odd exit": "import os\nos._exit(120)",
    "exit without output": "import os\nos.close(1)\nos.close(2)\nos._exit(13)",
    "locks of others": "import fcntl\nfcntl.flock(open('@SECRET@'), fcntl.LOCK_EX)\nprint('PWNED')",
    "terminal": "import fcntl\nfcntl.ioctl(0, 0x5412, b'x')\nprint('PWNED')",
    "audit hooks": "import sys\nsys.addaudithook(lambda *a: None)\nopen('@SECRET@').read()\nprint('PWNED')",
    "imports by path": (
        "import importlib.util as u\ns = u.spec_from_file_location('x', '@SECRET@')\nu.module_from_spec(s)\n"
        "s.loader.exec_module(None)\nprint('PWNED')"
    ),
    "library by path": (
        "import ctypes\nopen('x.so', 'wb').write(bytes(100))\nctypes.CDLL('./x.so')\nprint('PWNED')"
    ),
    "database elsewhere": (
        "import sqlite3\nsqlite3.connect('@FOLDER@/x.db').execute('create table t (x)')\nprint('PWNED')"
    ),
    "database extension": (
        "import sqlite3\nc = sqlite3.connect(':memory:')\nc.enable_load_extension(True)\n"
        "c.load_extension('@SECRET@')\nprint('PWNED')"
    ),
}


def _programs() -> dict[str, str]:
    programs = {f"read {path}": f"print('PWNED' if open({path!r}, 'rb').read(4) else '')" for path in _READ}
    programs |= {
        f"write {path}": (
            f"open({path!r}, 'r+' if {path.startswith(('/proc', '/sys'))} else 'w').write('1')\n"
            "print('PWNED')"
        )
        for path in _WRITE
    }
    programs |= {f"list {path}": f"import os\nprint('PWNED', os.listdir({path!r}))" for path in _LIST}
    programs |= {
        f"open {path}": f"import os\nprint('PWNED', os.open({path!r}, os.O_RDONLY | os.O_NONBLOCK))"
        for path in _OPEN_ITSELF[1:]
    }
    if os.uname().machine == "x86_64":
        code = (
            "import ctypes\nprint('PWNED' if ctypes.CDLL(None, use_errno=True).syscall{} != -1 "
            "or ctypes.get_errno() != 1 else '')"
        )
        programs |= {
            f"call {name}": code.format(call if len(call) > 1 else f"({call[0]})")
            for name, call in _CALLS.items()
        }
    return programs | _OTHERS


PROGRAMS: Mapping[str, str] = MappingProxyType(_programs())
"""Name and code."""
