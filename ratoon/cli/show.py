# Owns: what the commands show: progress bars, streamed text, trees, figures, the talk of `ratoon chat`.
# Promises: answers go to stdout, everything else to stderr; bars are drawn on terminals only.
# Never: decides what is run.
"""Output of the `ratoon` command."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ratoon.core.request import RequestOutput, SamplingParams
    from ratoon.core.tree import Tree
    from ratoon.models.wheel import Progress
    from ratoon.runtime.engine import Engine
    from ratoon.train.train import Event


@contextmanager
def fetch_bar() -> Iterator[Progress]:
    """A progress bar for downloads, on stderr; nothing where stderr is no terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        tasks: dict[str, Any] = {}

        def report(what: str, done_bytes: int, total_bytes: int | None) -> None:
            if what not in tasks:
                tasks[what] = bar.add_task(what, total=total_bytes)
            bar.update(tasks[what], completed=done_bytes, total=total_bytes)

        yield report


@contextmanager
def training_bar(total_s: float) -> Iterator[Callable[[Event], None]]:
    """Time gone and left, what is being done, the last loss; a line per stage where stderr is no terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    from ratoon.train.session import WRITE_SHARE

    console = Console(stderr=True)
    columns = (TextColumn("{task.description:40}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("loading", total=total_s)

        def report(event: Event) -> None:
            written_s = 0.0 if event.kind == "write" else WRITE_SHARE * total_s
            bar.update(task, completed=written_s + event.elapsed_s, description=_stage(event))
            if event.kind == "plan":
                parts = ", ".join(f"{part} {size / 1e9:.2f}" for part, size in event.values.items())
                console.print(f"memory plan in GB: {parts}")

        yield report


def _stage(event: Event) -> str:
    if event.kind == "write":
        return f"writing: {event.values['tokens']} tokens"
    loss = f", loss {event.values['loss']:.3f}" if "loss" in event.values else ""
    return f"training: step {event.step}{loss}"


def trained(record: dict[str, Any], folder: Path) -> str:
    """The held-out figures, and how to use what was trained."""
    held_out = record["held_out"]
    taus = ", ".join(f"{method} {tau:.2f}" for method, tau in held_out["tau"].items())
    return (
        f"{record['steps']} steps, loss {record['loss']}, tau on {held_out['samples']} held-out texts: {taus}\n"
        f"use it: ratoon generate --drafter {folder / 'int8'} ..."
    )


def encoded(engine: Engine, text: str | list[dict[str, str]]) -> list[int]:
    """Token ids of a raw text, or of messages through the chat template (their text alone where there is none)."""
    tokenizer = engine.tokenizer
    if isinstance(text, str):
        return tokenizer.encode(text)
    return tokenizer.encode_chat(text) if tokenizer.chat_template else tokenizer.encode(text[-1]["content"])


def streamed(engine: Engine, ids: list[int], params: SamplingParams, show_tree: bool = False) -> RequestOutput:
    """Prints the text as it comes, or each round's tree and then the text."""
    engine.trace_trees = show_tree
    output = None
    for event in engine.stream([ids], params):
        if show_tree and event.tree is not None:
            print("\n".join(_drawn(engine, event.tree, event.path)), end="\n\n")
        elif not show_tree:
            print(event.text, end="", flush=True)
        output = event.output or output
    assert output is not None, "a stream ends with its output"
    print(output.text if show_tree else "")
    return output


def _drawn(engine: Engine, tree: Tree, path: tuple[int, ...]) -> list[str]:
    from ratoon.core.tree import draw

    return draw(tree, path, lambda token: engine.tokenizer.decode([token], skip_special=False))


def stats(engine: Engine, output: RequestOutput) -> None:
    """Speed and acceptance of one answer, and the engine's settings and memory plan."""
    speed = len(output.token_ids) / output.decode_s if output.decode_s else float("nan")
    print(
        f"{len(output.token_ids)} tokens in {output.decode_s:.2f} s ({speed:.1f} tok/s), {output.rounds} rounds, "
        f"tau {output.tau:.2f}, first token after {1000 * output.ttft_s:.0f} ms, ended by {output.finish_reason}",
        file=sys.stderr,
    )
    print(engine.describe(), file=sys.stderr)


def memory_plan(engine: Engine) -> None:
    """What lies in the device's memory, one line each."""
    print(f"memory plan:\n{engine.memory.describe()}", file=sys.stderr)


def talk(engine: Engine, params: SamplingParams, system: str | None, with_stats: bool) -> None:
    """Questions from stdin until it ends; a turn that Ctrl-C cuts short is forgotten."""
    first = [{"role": "system", "content": system}] if system else []
    messages = list(first)
    while (line := _ask()) is not None:
        if line == "/reset":
            messages = list(first)
            continue
        if not line:
            continue
        question = {"role": "user", "content": line}
        try:
            output = streamed(engine, encoded(engine, [*messages, question]), params)
        except KeyboardInterrupt:
            print("\n(cut short; this turn is forgotten)")
            continue
        messages += [question, {"role": "assistant", "content": output.text}]
        if with_stats:
            stats(engine, output)


def _ask() -> str | None:
    """The next line, or None when the user leaves."""
    try:
        line = input("> " if sys.stdin.isatty() else "").strip()
    except EOFError:
        return None
    return None if line in ("/exit", "/quit") else line
