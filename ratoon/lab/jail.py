# Owns: the process in which a tested program runs: its namespaces, its limits, what it can see, how it reports.
# Promises: the token is written only when program and tests ran to their end; all that it started ends with it.
# Never: imports anything but the standard library: lab/sandbox.py starts it as a script of its own, before any package.
"""This process makes the namespaces. In them process 1 has a child, whose child runs the program.

The kernel is asked through libc: Python 3.11 has no `os.unshare`, and the `unshare` command can neither build the
small root folder before a root user becomes nobody nor set mounts read-only as a tree. The program sees the system's
libraries and the interpreter's, read-only, and a scratch folder in memory. It sees no /proc, so that there is nobody's
environment to read, and no /dev. A changed root forbids it user namespaces of its own.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

NEW_NS, NEW_IPC, NEW_UTS, NEW_USER, NEW_PID, NEW_NET = (
    0x00020000, 0x08000000, 0x04000000, 0x10000000, 0x20000000, 0x40000000,
)  # fmt: skip
MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC, MS_PRIVATE = 2, 4, 8, 0x1000, 0x4000, 1 << 18
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_NO_NEW_PRIVS = 1, 4, 38
MOUNT_SETATTR, AT_FDCWD, AT_RECURSIVE = 442, -100, 0x8000
MOUNT_ATTR_RDONLY_NOSUID_NODEV = 1 | 2 | 4
CAPABILITIES_VERSION = 0x20080522
NOBODY = 65534
LEFT_BEHIND = 125

Job = dict[str, Any]

_libc = ctypes.CDLL(None, use_errno=True)


def call(name: str, *arguments: Any) -> None:
    """A function of libc. OSError naming it where it fails."""
    if getattr(_libc, name)(*arguments) < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def mount(source: str, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    texts = [None if text is None else text.encode() for text in (source, target, kind)]
    call("mount", *texts, ctypes.c_ulong(flags), None if data is None else data.encode())


# ---- namespaces -------------------------------------------------------------------------------------------


def enter(root: str, job: Job) -> None:
    """New namespaces, and a root folder of our own. It is built as whoever we are: a root user's interpreter may lie
    where nobody may look, and an ordinary user may mount only inside of a user namespace."""
    rest = NEW_USER | NEW_PID | NEW_NET | NEW_IPC | NEW_UTS
    if os.geteuid() == 0:
        call("unshare", NEW_NS)
        build(root, job)
        become_nobody()
        call("unshare", rest)
        map_user(NOBODY, NOBODY)
    else:
        uid, gid = os.geteuid(), os.getegid()
        call("unshare", rest | NEW_NS)
        map_user(uid, gid)
        build(root, job)
    os.chroot(".")
    os.chdir("/tmp")


def become_nobody() -> None:
    """Limits on processes do not bind root, and its files are open to it even in a user namespace."""
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
    call("prctl", PR_SET_DUMPABLE, 1, 0, 0, 0)  # else /proc/self belongs to root, and no map can be written
    die_with_parent()  # a change of user has undone it


def map_user(uid: int, gid: int) -> None:
    for name, text in (("setgroups", "deny"), ("uid_map", f"{NOBODY} {uid} 1"), ("gid_map", f"{NOBODY} {gid} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def build(root: str, job: Job) -> None:
    """A folder in memory with what an interpreter reads; ends in it. All but the scratch folder is read-only."""
    mount("none", "/", None, MS_REC | MS_PRIVATE)
    mount("none", root, "tmpfs", MS_NOSUID | MS_NODEV, "mode=755,size=1m")
    os.chdir(root)
    os.mkdir("tmp")
    shown: list[str] = []
    for path in dict.fromkeys(("/usr", "/lib", "/lib64", sys.base_prefix, sys.base_exec_prefix)):
        if os.path.islink(path):
            os.symlink(os.readlink(path), f".{path}")
        elif os.path.isdir(path) and not any(os.path.commonpath((path, other)) == other for other in shown):
            os.makedirs(f".{path}", exist_ok=True)
            mount(path, f".{path}", None, MS_BIND | MS_REC)
            shown.append(path)
    attributes = (ctypes.c_uint64 * 4)(MOUNT_ATTR_RDONLY_NOSUID_NODEV)
    call("syscall", MOUNT_SETATTR, AT_FDCWD, b".", AT_RECURSIVE, attributes, ctypes.c_size_t(32))
    owner = NOBODY if os.geteuid() == 0 else os.geteuid()
    size = f"size={job['file_bytes']},nr_inodes=1k"
    mount("none", "tmp", "tmpfs", MS_NOSUID | MS_NODEV | MS_NOEXEC, f"mode=700,uid={owner},gid={owner},{size}")


def give_up_rights() -> None:
    """The rights that the user namespace gave, for good."""
    call("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    header, sets = (ctypes.c_uint32 * 2)(CAPABILITIES_VERSION, 0), (ctypes.c_uint32 * 6)()
    call("capset", header, sets)


def die_with_parent() -> None:
    call("prctl", PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


# ---- limits -----------------------------------------------------------------------------------------------


def limit(job: Job) -> None:
    """What each process may use. The soft limit of processor time comes with a signal that names the cause."""
    for kind, value in (
        (resource.RLIMIT_CPU, job["cpu_s"]),
        (resource.RLIMIT_AS, job["memory_bytes"]),
        (resource.RLIMIT_FSIZE, job["file_bytes"]),
        (resource.RLIMIT_NPROC, job["processes"]),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CORE, 0),
    ):
        hard = resource.getrlimit(kind)[1]
        most = value + (kind == resource.RLIMIT_CPU)
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (min(value, most), most))


# ---- the program ------------------------------------------------------------------------------------------


def judge(job: Job, token_fd: int, report_fd: int) -> int:
    """Runs program and tests. The token stays in its pipe until then: leaving early, in whatever way, reports none.

    (Code that searches its descriptors for the token can lie about itself. It can do nothing else.)
    """
    limit(job)
    judged, namespace = os.getpid(), {"__name__": "solution"}
    try:
        for name in ("program", "tests"):
            exec(compile(job[name], f"<{name}>", "exec"), namespace)
    except BaseException as error:  # noqa: BLE001  SystemExit is a failure like any other
        report = describe(error, job["tests"]).encode(errors="replace")
    else:
        report = os.read(token_fd, 64)
    if os.getpid() == judged:  # a program may have forked: its copies have no say
        os.write(report_fd, report)
    return 0


def describe(error: BaseException, tests: str) -> str:
    """One line: the error, and the line of the tests where it came up."""
    first = "".join(traceback.format_exception_only(error)).strip().splitlines()[-1][:200]
    places = [frame.lineno or 1 for frame in traceback.extract_tb(error.__traceback__) if frame.filename == "<tests>"]
    return f"{first}: {tests.splitlines()[places[-1] - 1].strip()[:200]}" if places else first


def attend(body: Callable[[], int], sweep: bool = False) -> int:
    """`body` in a child, which SIGTERM ends. Its exit code, 128 and the number of the signal that ended it, or
    LEFT_BEHIND. `sweep`: what is left of its session ends with it."""
    child = os.fork()
    if child == 0:
        try:
            os.setsid()
            die_with_parent()
            os._exit(body())
        except BaseException:  # noqa: BLE001  whatever it was must not go on in a copy of the caller
            traceback.print_exc()
        finally:
            os._exit(1)
    signal.signal(signal.SIGTERM, lambda *_: os.kill(child, signal.SIGKILL))
    while (ended := next_ended()) != child:
        os.waitpid(ended, 0)  # process 1 inherits what its descendants leave
    if sweep:
        os.killpg(child, signal.SIGKILL)  # before its number is free for another
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code:
        return code if code > 0 else 128 - code
    return LEFT_BEHIND if has_running_children() else 0


def next_ended() -> int:
    """Waits for a child to end and leaves it to be collected."""
    found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
    assert found is not None, "only a call that does not wait finds none"
    return found.si_pid


def has_running_children() -> bool:
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
        return True
    return False


def run_first(program: Callable[[], int]) -> int:
    """Process 1 of the namespace: out of the program's reach, and its end is the end of all that are in there.

    The program's parent is another one, which it may kill: that is seen here, and is a failure with a name.
    """
    give_up_rights()
    call("prctl", PR_SET_DUMPABLE, 0, 0, 0, 0)  # the same user's processes may otherwise write each other's memory
    return attend(lambda: attend(program))


def main() -> None:
    job, token_fd, report_fd = json.load(sys.stdin), int(sys.argv[1]), int(sys.argv[2])
    os.umask(0o022)
    os.environ.clear()  # the interpreter itself may have put a locale there
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # if memory ends, this goes and not the engine
    die_with_parent()
    program = partial(judge, job, token_fd, report_fd)
    if job["isolated"]:
        enter(job["scratch"], job)
        code = attend(lambda: run_first(program))
    else:
        os.chdir(job["scratch"])
        code = attend(program, sweep=True)
    os._exit(code)


if __name__ == "__main__":
    main()
