# Owns: the promises of README.md and docs/: the Python example runs, commands parse, names and figures are real.
# Promises: a flag, file, make target or figure that is documented and does not exist fails here.
# Never: measures anything, or fetches what another test would not.
from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer

from ratoon.cli import app
from ratoon.core.tree import Tree, draw
from ratoon.models.hub import resolve

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
PAGES = [README, ROOT / "benchmarks" / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
GROUP: Any = typer.main.get_command(app)


def blocks(page: Path, *languages: str) -> list[str]:
    """Fenced code of a page in the given languages."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    return [text for language, text in found if language in languages]


def command_lines() -> list[str]:
    """Every documented `ratoon ...` line; of sessions only what is typed after the `$`."""
    lines = []
    for page in PAGES:
        lines += [line for text in blocks(page, "sh") for line in text.splitlines()]
        lines += [line[2:] for text in blocks(page, "console") for line in text.splitlines() if line.startswith("$ ")]
    return list(dict.fromkeys(line for line in lines if line.split("#")[0].split()[:1] == ["ratoon"]))


def known_options() -> set[str]:
    """What the command and the scripts of benchmarks/ take."""
    scripts = [path.read_text(encoding="utf-8") for path in (ROOT / "benchmarks").glob("*.py")]
    commands = [GROUP, *GROUP.commands.values()]
    names = {name for command in commands for parameter in command.params for name in parameter.opts}
    names |= {name for command in commands for parameter in command.params for name in parameter.secondary_opts}
    return names.union(*(re.findall(r'add_argument\("(--[\w-]+)"', text) for text in scripts))


def test_python_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = blocks(README, "python")
    shorter = example.replace("max_tokens=32", "max_tokens=4")
    assert shorter.count("max_tokens=4") == 2 and resolve("smollm2").is_file()
    exec(compile(shorter, str(README), "exec"), {})
    printed = capsys.readouterr().out.splitlines()
    assert [line.split()[-3:-1] for line in printed[:2]] == [["length", "tau"]] * 2
    assert len(printed) >= 3 and printed[2], "the streamed text"


def test_there_are_command_lines_to_check() -> None:
    commands = {line.split()[1] for line in command_lines()}
    assert commands >= {"generate", "chat", "demo", "bench", "train", "pull"}


@pytest.mark.parametrize("line", command_lines())
def test_command_lines_parse(line: str) -> None:
    name, *arguments = shlex.split(line, comments=True)[1:]
    assert name in GROUP.commands, f"no command '{name}'"
    # Parses and checks every value, and runs nothing.
    GROUP.commands[name].make_context(name, arguments)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_flags_in_running_text_exist(page: Path) -> None:
    prose = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    code = " ".join(re.findall(r"`([^`]+)`", prose))
    mentioned = set(re.findall(r"(?<!\S)--[a-z][a-z-]+", code))
    assert mentioned <= known_options(), f"{page.name} names {sorted(mentioned - known_options())}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_files_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    links = [link.split("#")[0] for link in re.findall(r"\]\(([^)]+)\)", text) if not link.startswith("http")]
    assert all((page.parent / link).exists() for link in links), links
    rooms = "cli|core|ops|models|spec|runtime|train|lab|drafters"
    named = re.findall(rf"`(?:ratoon/)?((?:{rooms})/[\w./-]+\.(?:py|json|safetensors))`", text)
    missing = [name for name in named if not (ROOT / "ratoon" / name).exists()]
    assert not missing, f"{page.name} names {missing}"


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.M))
    used = set(re.findall(r"\bmake (\w+)\b(?=[^\n]*`|\s+#)", README.read_text(encoding="utf-8")))
    assert used >= {"demo", "test"} and used <= targets


def test_drafter_figures_are_those_of_its_provenance() -> None:
    provenance = json.loads((ROOT / "ratoon/drafters/smollm2-dflash/provenance.json").read_text(encoding="utf-8"))
    for label, kind in (("HumanEval, raw code", "code"), ("MT-Bench, chat", "chat")):
        figures = provenance["figures"][kind]
        row = f"| {label} | " + " | ".join(f"{figures[m]:.2f}" for m in ("chain-15", "tree-15", "tree-31", "tree-63"))
        assert row in README.read_text(encoding="utf-8"), row


def test_picture_is_what_draw_makes() -> None:
    """The tree of the first screen, put together again, draws as it stands there."""
    picture = next(text for text in blocks(README, "text") if "●" in text)
    words = ["", " self", ".", "is", "_", "empty", " return", "\n" + 11 * " ", "():", "):", "()):"]
    # (parent, word) of each node; siblings in drawing order.
    nodes = [(0, 1), (1, 2), (2, 3), (3, 4), (3, 2), (4, 5), (4, 3), (4, 7), (6, 6), (6, 8), (6, 9), (6, 10)]
    nodes += [(9, 7), (10, 7), (11, 7)]
    depth = [0]
    for parent, _ in nodes:
        depth.append(depth[parent] + 1)
    parents, tokens = (np.array(column) for column in zip(*nodes, strict=True))
    zeros = np.zeros(len(nodes))
    tree = Tree(tokens, parents, np.array(depth[1:]), zeros.astype(np.int64), zeros.astype(np.float32))
    assert draw(tree, (0, 1, 2, 3, 4, 6, 10, 14), words.__getitem__) == picture.splitlines()
