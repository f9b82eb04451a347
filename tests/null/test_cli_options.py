# Owns: the frozen list of commands and options.
# Promises: an option that is added, renamed, dropped or given another default shows up here and in review.
# Never: runs a command's body.
"""`ratoon`'s options against tests/data/cli_options.txt, and how soon --help is there.

After a change that is meant, write the new table with: python tests/null/test_cli_options.py
"""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from ratoon.cli import app

TABLE = Path(__file__).parents[1] / "data" / "cli_options.txt"


def options() -> list[str]:
    """One line per parameter: command, names, default."""
    group: Any = typer.main.get_command(app)
    lines = []
    for name, parameters in [("ratoon", group.params), *((n, c.params) for n, c in group.commands.items())]:
        for parameter in parameters:
            names = "/".join([*parameter.opts, *parameter.secondary_opts])
            default = "required" if parameter.required else repr(parameter.default)
            lines.append(f"{name:9} {names:24} {default}")
    return lines


def test_options_are_the_frozen_ones() -> None:
    assert options() == TABLE.read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize(
    ("command", "names"),
    [
        ("generate", "--drafter --method --budget --topk-cap --show-tree --stats"),
        ("generate", "--temperature --top-k --top-p --min-p --logit-bias --seed --stop"),
        ("generate", "--repetition-penalty --presence-penalty --frequency-penalty"),
        ("generate", "--max-tokens --ignore-eos --dtype --mode"),
        ("bench", "--methods --budgets --topk-caps --concurrency --graphs --dtype --temperature --prompts"),
        ("bench", "--max-tokens --repeats --json"),
        ("train", "--model --prompts --minutes --resume"),
    ],
)
def test_names_that_others_rely_on(command: str, names: str) -> None:
    present = {word for line in options() if line.split()[0] == command for word in line.split()[1].split("/")}
    assert set(names.split()) <= present


def test_help_needs_less_than_300_ms_of_processor_time() -> None:
    best = min(_help_s() for _ in range(3))
    assert best < 0.3, f"ratoon --help took {1000 * best:.0f} ms"


def _help_s() -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-m", "ratoon.cli", "--help"], capture_output=True, text=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert "generate" in done.stdout
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


if __name__ == "__main__":
    TABLE.write_text("\n".join(options()) + "\n", encoding="utf-8")
