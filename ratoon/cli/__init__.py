# Owns: the list of commands (their options are frozen by a test).
# Promises: `ratoon --help` needs no torch: whatever is heavy is imported inside the command that needs it.
# Never: computes; a command reads its options, calls one function below and shows what comes back.
"""The `ratoon` command."""

from __future__ import annotations

from typing import Annotated

import typer

from ratoon.cli.answer import chat, demo, generate
from ratoon.cli.bisect import bisect
from ratoon.cli.coding import evaluate
from ratoon.cli.doctor import doctor
from ratoon.cli.measure import bench
from ratoon.cli.models import pull, train
from ratoon.cli.plan import plan

app = typer.Typer(
    name="ratoon",
    help="DFlash drafting and DDTree verification: the same tokens, sooner.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # rich costs 50 ms that --help does not need
    pretty_exceptions_enable=False,
)


def _version(wanted: bool) -> None:
    if wanted:
        from ratoon import __version__

        print(f"ratoon {__version__}")
        raise typer.Exit


@app.callback()
def top(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """DFlash drafting and DDTree verification: the same tokens, sooner."""


for _function in (generate, chat, demo, bench, train, pull, doctor, bisect, plan):
    app.command()(_function)
app.command("eval")(evaluate)


def main() -> None:
    """Entry point of the `ratoon` command."""
    app()
