# Owns: tests of lab/sandbox.py and lab/jail.py: programs that mean harm, each in a real sandbox.
# Promises: every attack has a sign that would show its success, beside the verdict.
# Never: needs rights: where user namespaces are missing, limits alone are tested, and that isolation is refused.
from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from ratoon.lab import sandbox as sandbox_module
from ratoon.lab.sandbox import Judged, Limits, Sandbox

# The wall limit leaves room for a busy machine: what is meant to end, ends by processor time.
LIMITS = Limits(cpu_s=1, wall_s=60.0)
REFUSAL = Sandbox().run("", "").cause
ISOLATED = pytest.param(True, id="isolated", marks=pytest.mark.skipif(bool(REFUSAL), reason=f"no sandbox: {REFUSAL}"))
needs_isolation = pytest.mark.skipif(bool(REFUSAL), reason=f"no sandbox: {REFUSAL}")
both = pytest.mark.parametrize("isolated", [ISOLATED, pytest.param(False, id="limits alone")])
RIGHT = "def f():\n    return 1"


def run(program: str, tests: str = "assert f() == 1", isolated: bool = True, limits: Limits = LIMITS) -> Judged:
    return Sandbox(isolated, limits).run(program, tests)


@both
def test_right_and_wrong_programs_are_told_apart(isolated: bool) -> None:
    assert run(RIGHT, isolated=isolated) == Judged(True)
    assert run("def f():\n    return 2", "f()\nassert f() == 1", isolated) == Judged(
        False, "AssertionError: assert f() == 1"
    )
    assert run("def f(:", isolated=isolated).cause.startswith("SyntaxError")
    assert run("def f(): return g()", isolated=isolated).cause == "NameError: name 'g' is not defined: assert f() == 1"


@both
def test_a_program_may_use_the_standard_library_and_files_of_its_own(isolated: bool) -> None:
    libraries = "import collections, ctypes, decimal, hashlib, heapq, math, random, re, typing, zlib\n"
    files = "import tempfile\nopen('a', 'w').write('x')\nassert open('a').read() == 'x'\ntempfile.TemporaryFile()\n"
    assert run(f"{libraries}{files}{RIGHT}", isolated=isolated) == Judged(True)


@both
@pytest.mark.parametrize(
    ("program", "cause"),
    [
        ("while True: pass", "used up its 1 s of processor time"),
        ("x = bytearray(10 << 30)", "MemoryError"),
        ("for _ in range(100): print('x' * (1 << 20))", "OSError: [Errno 27] File too large"),
        ("open('big', 'w').write('x' * (100 << 20))", "OSError: [Errno 27] File too large"),
        ("import os; os._exit(0)", "left before its tests were done (exit code 0)"),
        ("import os; os._exit(7)", "left before its tests were done (exit code 7)"),
        ("import sys; sys.exit()", "SystemExit"),
        ("import sys; sys.exit(0)", "SystemExit: 0"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "killed by SIGSEGV"),
        ("class E(Exception):\n    def __str__(self): raise SystemExit(0)\nraise E", None),
        ("input()", "EOFError: EOF when reading a line"),
    ],
)
def test_what_ends_badly_fails_by_name(program: str, cause: str | None, isolated: bool) -> None:
    judged = run(program, "pass", isolated)
    assert not judged.passed and (cause is None or judged.cause == cause), judged


@both
def test_leaving_early_inside_of_a_test_is_no_success(isolated: bool) -> None:
    assert not run("import os\ndef f(): os._exit(0)", isolated=isolated).passed
    assert run("import sys\ndef f(): sys.exit(0)", isolated=isolated).cause == "SystemExit: 0: assert f() == 1"


@both
def test_success_cannot_be_claimed_without_the_token(isolated: bool) -> None:
    """Not by words in every open file, and not by a copy of the program that runs to the end beside it."""
    claim = "import os\nfor n in range(3, 64):\n    try: os.write(n, b'0' * 32)\n    except OSError: pass\nos._exit(0)"
    judged = run(claim, "pass", isolated)
    assert not judged.passed and "\n" not in judged.cause
    copy = "import os, time\nif os.fork():\n    time.sleep(0.5)\n    os._exit(0)"
    assert not run(copy, "pass", isolated).passed


@both
def test_sleep_ends_at_the_wall_limit(isolated: bool) -> None:
    begun = time.monotonic()
    judged = run("import time; time.sleep(1000)", "pass", isolated, Limits(wall_s=1.0))
    assert judged == Judged(False, "not done after 1 s") and time.monotonic() - begun < 100


@pytest.fixture
def left_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[int]]:
    """The processes of this test's sandboxes, told from those of others by a jail that lies elsewhere."""
    monkeypatch.setattr(sandbox_module, "JAIL", shutil.copy(sandbox_module.JAIL, tmp_path))

    def found() -> list[int]:
        numbers = []
        for file in Path("/proc").glob("[0-9]*/cmdline"):
            with suppress(OSError):
                numbers += [int(file.parent.name)] * (os.fsencode(sandbox_module.JAIL) in file.read_bytes())
        return numbers

    return found


def test_the_search_for_processes_finds_them(left_over: Callable[[], list[int]]) -> None:
    command = [sys.executable, "-c", "print(flush=True); input()", str(sandbox_module.JAIL)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout and other.stdout.readline() and left_over() == [other.pid]
        other.communicate("\n")


@needs_isolation
@pytest.mark.parametrize("caught", [False, True], ids=["plain", "stubborn"])
def test_a_fork_bomb_is_bounded_and_gone(caught: bool, left_over: Callable[[], list[int]]) -> None:
    bomb = "import os\nwhile True:\n    try: os.fork()\n    except OSError: "
    judged = run(bomb + ("pass" if caught else "raise"), "pass", limits=Limits(cpu_s=1, wall_s=3.0))
    assert not judged.passed
    assert left_over() == []


@needs_isolation
def test_a_child_that_leaves_its_session_does_not_outlive_the_program(left_over: Callable[[], list[int]]) -> None:
    orphan = "import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(1000)\n"
    assert run(orphan + RIGHT) == Judged(False, "left processes running behind it")
    waiting = run(f"{orphan}time.sleep(1000)", limits=Limits(wall_s=1.0))
    assert waiting.cause == "not done after 1 s"
    assert left_over() == []


@both
def test_who_kills_its_parent_fails(isolated: bool) -> None:
    assert run(f"import os\nos.kill(os.getppid(), 9)\n{RIGHT}", isolated=isolated).cause == "killed by SIGKILL"


@needs_isolation
def test_process_1_cannot_be_killed_or_read() -> None:
    """Whatever signal comes: what follows is judged by its tests, or has failed."""
    assert run(f"import os\nos.kill(1, 9)\n{RIGHT}") == Judged(True)
    shots = "import os\nfor number in range(1, 32):\n    if number != 17: os.kill(1, number)\n"
    assert not run(f"{shots}def f():\n    return 2").passed
    for group in (0, -1):
        assert run(f"import os\nos.kill({group}, 9)", "pass").cause == "killed by SIGKILL"
    attach = "import ctypes\nraise ValueError(ctypes.CDLL(None).ptrace(16, 1, 0, 0))"
    assert run(attach).cause == "ValueError: -1"


@needs_isolation
def test_nothing_is_written_outside_of_the_scratch_folder(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    for place in (tmp_path / "evil", Path("/evil"), Path("/usr/evil"), Path(sys.base_prefix) / "evil"):
        judged = run(f"open({str(place)!r}, 'w').write('x')", "pass")
        assert judged.cause.startswith(("OSError: [Errno 30] Read-only", "FileNotFoundError")), judged
        assert not place.exists()


@needs_isolation
def test_nothing_of_the_user_is_seen(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("x")
    tmp_path.chmod(0o755)
    secret.chmod(0o644)
    assert run(f"open({str(secret)!r}).read()").cause.startswith("FileNotFoundError")
    seen = run("import os\nraise ValueError(os.getuid(), os.getpid() < 5, sorted(os.listdir('/tmp')))").cause
    assert seen == "ValueError: (65534, True, [])"


@needs_isolation
def test_no_socket_reaches_anyone() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.2)
        call = f"import socket\nsocket.create_connection({server.getsockname()!r}, 5).send(b'x')"
        assert run(call, "pass").cause == "OSError: [Errno 101] Network is unreachable"
        with pytest.raises(TimeoutError):
            server.accept()


@both
def test_the_environment_is_empty(isolated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RATOON_SECRET", "x")
    assert run("import os\nraise ValueError(dict(os.environ))", isolated=isolated).cause == "ValueError: {}"


@needs_isolation
def test_no_process_shows_its_environment() -> None:
    assert run("import os\nopen(f'/proc/{os.getppid()}/environ').read()").cause.startswith("FileNotFoundError")
    mounted = "import ctypes\nraise ValueError(ctypes.CDLL(None).mount(b'none', b'/tmp', b'proc', 0, None))"
    assert run(mounted).cause == "ValueError: -1"
    nested = "import ctypes\nraise ValueError(ctypes.CDLL(None).unshare(0x10000000))"
    assert run(nested).cause == "ValueError: -1", "no namespace of its own, where it would have rights"


@both
def test_no_folder_is_left(isolated: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    run(f"open('a', 'w').write('x')\n{RIGHT}", isolated=isolated)
    run("import time; time.sleep(9)", isolated=isolated, limits=Limits(wall_s=0.5))
    assert list(tmp_path.iterdir()) == []


def test_where_nothing_can_be_isolated_it_is_refused_unless_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A jail whose kernel refuses every namespace."""
    broken = sandbox_module.JAIL.read_text().replace('call("unshare", ', 'call("unshare", -1 | ')
    (tmp_path / "jail.py").write_text(broken)
    monkeypatch.setattr(sandbox_module, "JAIL", tmp_path / "jail.py")
    with pytest.raises(ValueError, match=r"cannot be isolated .*unshare: Invalid argument.*--unsafe-exec"):
        Sandbox.open(unsafe=False)
    unsafe = Sandbox.open(unsafe=True)
    assert not unsafe.isolated and unsafe.run(RIGHT, "assert f() == 1").passed


@needs_isolation
def test_the_safe_way_is_taken_where_there_is_one() -> None:
    assert Sandbox.open(unsafe=True).isolated
