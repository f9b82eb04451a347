# Owns: the house rules that a reader of the source can check: rooms, torch-free files, headers, names.
# Promises: a file that breaks one is named with the line.
# Never: imports the package into this process (a child process does, to see what comes along).
"""The rooms of docs/ARCHITECTURE.md, enforced."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "ratoon"
FILES = sorted(PACKAGE.rglob("*.py"))
LEVEL = {"core": 0, "ops": 1, "models": 2, "spec": 3, "runtime": 4, "train": 5, "lab": 5, "server": 5, "cli": 6}
QUIET = ("core", "ops", "models", "spec", "runtime")
TORCH_FREE = (
    *("spec/ddtree.py", "spec/budget.py", "spec/acceptance.py", "runtime/pages.py", "runtime/scheduler.py"),
    *("lab/plan.py", "lab/planned.py", "lab/predicted.py", "lab/doctor/examine.py", "lab/doctor/machine.py"),
)
BANNED = ("utils", "helpers", "common", "manager", "base", "misc")


def room_of(path: Path) -> str:
    """'cli' for cli.py, '' for the package's own __init__.py, else the directory below ratoon/."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return "" if parts == ("__init__",) else parts[0]


def imports(source: str) -> Iterator[tuple[int, str]]:
    """(line, dotted module) of every import, those for types and those through import_module included."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            yield node.lineno, module
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names if module == "ratoon")
        elif isinstance(node, ast.Call) and "import_module" in ast.unparse(node.func):
            for argument in node.args[:1]:
                if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                    yield node.lineno, argument.value


def wrong_imports(source: str, room: str) -> list[str]:
    """Imports of `source` that go sideways or up from `room`."""
    found = []
    for line, module in imports(source):
        if module.startswith("."):
            found.append(f"line {line}: relative import {module}")
        parts = module.split(".")
        target = parts[1] if parts[0] == "ratoon" and len(parts) > 1 else room
        if target in LEVEL and target != room and LEVEL[target] >= LEVEL[room]:
            found.append(f"line {line}: {room} imports {module}")
    return found


@pytest.mark.parametrize(
    ("room", "source", "wrong"),
    [
        ("models", "from ratoon.core.config import ModelConfig", False),
        ("models", "from ratoon.models.layers import MLP", False),
        ("models", "from ratoon.spec import round", True),
        ("lab", "import ratoon.train.train", True),
        ("core", "def f():\n    from ratoon import ops", True),
        ("spec", "if TYPE_CHECKING:\n    from ratoon.runtime.kv import Pool", True),
        ("ops", "import_module('ratoon.models.hub')", True),
        ("ops", "from .fused import rotary", True),
    ],
)
def test_the_rule_itself_tells_up_from_down(room: str, source: str, wrong: bool) -> None:
    assert bool(wrong_imports(source, room)) is wrong


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_go_strictly_down(path: Path) -> None:
    room = room_of(path)
    if room:
        assert room in LEVEL, f"{room} is no room of this house"
        assert wrong_imports(path.read_text(encoding="utf-8"), room) == []


def test_torch_free_files_import_no_torch() -> None:
    free = [path for path in FILES if room_of(path) == "core"] + [PACKAGE / name for name in TORCH_FREE]
    modules = [
        ".".join(("ratoon", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__")
        for path in free
        if path.is_file()
    ]
    script = "import importlib, sys\n" + "\n".join(
        f"importlib.import_module({module!r}); assert 'torch' not in sys.modules, {module!r}" for module in modules
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr[-500:]


@pytest.mark.parametrize("statement", ["import ratoon", "import ratoon.cli", "import ratoon.models.hub"])
def test_quick_modules_import_no_torch(statement: str) -> None:
    script = f"{statement}\nimport sys; sys.exit('torch' in sys.modules or 'huggingface_hub' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=False).returncode == 0


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_a_file_opens_with_owns_promises_never(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    if path.name == "__init__.py" and not lines:
        return
    opening = [line[:1] and line.split(":")[0] for line in lines[:3]]
    assert opening == ["# Owns", "# Promises", "# Never"]


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_house_style(path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    assert path.stem not in BANNED, "a function lives where its noun lives"
    for word in ("TO" + "DO", "FIX" + "ME"):
        assert word not in source
    tree = ast.parse(source)
    if room_of(path) in QUIET:
        called = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)]
        assert [n.lineno for n in called if isinstance(n.func, ast.Name) and n.func.id == "print"] == []
    if path not in (PACKAGE / "core" / "settings.py", PACKAGE / "lab" / "jail.py"):  # the jail empties it
        reads = [n.lineno for n in ast.walk(tree) if isinstance(n, ast.Attribute) and n.attr in ("environ", "getenv")]
        assert reads == [], "one file reads the environment: core/settings.py"
