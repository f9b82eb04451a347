# Owns: the commands, their options (frozen by a test) and the one place where an error becomes a line and an exit code.
# Promises: `ratoon --help` needs no torch: whatever is heavy is imported inside the command that needs it.
# Never: computes; a command reads its options, calls one function below and shows what comes back.
"""The `ratoon` command. Exit codes: 0 done, 1 failed while running, 2 bad input, 130 interrupted."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

import typer

if TYPE_CHECKING:
    from ratoon.core.request import RequestOutput, SamplingParams
    from ratoon.core.tree import Tree
    from ratoon.models.wheel import Progress
    from ratoon.runtime.engine import Engine
    from ratoon.train.train import Event

app = typer.Typer(
    name="ratoon",
    help="DFlash drafting and DDTree verification: the same tokens, sooner.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # rich costs 50 ms that --help does not need
    pretty_exceptions_enable=False,
)

MethodName = Literal["ar", "chain", "tree"]
DtypeName = Literal["auto", "bfloat16", "float32"]
DeviceName = Literal["auto", "cpu", "cuda"]
ModeName = Literal["auto", "eager", "static", "graph", "staged"]
option = typer.Option

Model = Annotated[str, option("--model", "-m", help="smollm2, a directory, a .gguf file or a pulled hub id.")]
Drafter = Annotated[str, option(help="auto (known pair), a directory or hub id, or none.")]
Method = Annotated[MethodName, option(help="ar: one token a round; chain: a DFlash chain; tree: DDTree.")]
Budget = Annotated[str, option(help="Drafted nodes per round, or auto. 0 is autoregressive.", metavar="N|auto")]
TopkCap = Annotated[int, option(help="Candidates per position of the tree; 0 = uncapped.")]
MaxTokens = Annotated[int, option(help="Longest answer, in tokens.")]
Dtype = Annotated[DtypeName, option(help="auto: bfloat16 on a GPU; on a CPU the faster, probed.")]
Device = Annotated[DeviceName, option(help="Where to compute.")]
Mode = Annotated[ModeName, option(help="How a round is run; graph is emulated on a CPU.")]
MaxModelLen = Annotated[int | None, option(help="Longest prompt plus answer (default: the model's).")]
Temperature = Annotated[float, option(help="0 is greedy.")]
TopK = Annotated[int, option(help="Keep the K most likely tokens; 0 = off.")]
TopP = Annotated[float, option(help="Keep the smallest set of this total probability; 1 = off.")]
MinP = Annotated[float, option(help="Keep tokens of at least this share of the likeliest; 0 = off.")]
RepetitionPenalty = Annotated[float, option(help="Over prompt and answer; 1 = off.")]
PresencePenalty = Annotated[float, option(help="Over the answer; 0 = off.")]
FrequencyPenalty = Annotated[float, option(help="Over the answer, per occurrence; 0 = off.")]
LogitBias = Annotated[list[str] | None, option(help="Repeatable: token id and what to add.", metavar="ID=BIAS")]
Seed = Annotated[int | None, option(help="The same seed gives the same text with every method.")]
Stop = Annotated[list[str] | None, option(help="Repeatable: end before this text.")]
Stats = Annotated[bool, option("--stats", help="Show speed and acceptance.")]


# -- errors -----------------------------------------------------------------------------------------------------------


def _leave(message: str, code: int) -> NoReturn:
    sys.stdout.flush()
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    raise typer.Exit(code)


def _describe(error: BaseException) -> str:
    if isinstance(error, UnicodeDecodeError):
        return f"the input is not UTF-8 text (byte {error.start}): convert it, for example with iconv"
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    return str(error) or type(error).__name__


def command(function: Callable[..., None]) -> Callable[..., None]:
    """The error boundary of a command: one line on stderr and an exit code. RATOON_TRACEBACK=1 shows the traceback."""

    @functools.wraps(function)
    def bounded(*args: Any, **kwargs: Any) -> None:
        from ratoon.core.settings import wants_traceback

        try:
            function(*args, **kwargs)
            sys.stdout.flush()
        except KeyboardInterrupt:
            print("\ninterrupted", file=sys.stderr)
            raise typer.Exit(130) from None
        except BrokenPipeError:  # `ratoon generate ... | head`: the reader has seen enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(1) from None
        except (ValueError, FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
            if wants_traceback():
                raise
            _leave(_describe(error), 2)
        except (OSError, RuntimeError, MemoryError, ImportError) as error:
            if wants_traceback():
                raise
            _leave(_describe(error), 1)

    return bounded


# -- what options mean ------------------------------------------------------------------------------------------------


def _budget(text: str) -> int | Literal["auto"]:
    if text == "auto":
        return "auto"
    try:
        number = int(text)
    except ValueError:
        number = -1
    if number < 0:
        raise ValueError(f"--budget must be 'auto' or a whole number from 0 (0 is autoregressive), got '{text}'")
    return number


def _logit_bias(entries: list[str] | None) -> dict[int, float]:
    bias: dict[int, float] = {}
    for entry in entries or ():
        token, _, value = entry.partition("=")
        try:
            bias[int(token)] = float(value)
        except ValueError:
            raise ValueError(f"--logit-bias must be ID=BIAS, for example 198=-100, got '{entry}'") from None
    return bias


def _prompt(text: str) -> str:
    """The prompt itself; '-' reads it from standard input."""
    if text == "-":
        text = sys.stdin.buffer.read().decode("utf-8")
    elif any("\udc80" <= character <= "\udcff" for character in text):
        raise ValueError("the prompt is not UTF-8 text: convert it, for example with iconv")
    if not text.strip():
        raise ValueError("the prompt is empty: give at least one word")
    return text


@contextmanager
def _progress() -> Iterator[Progress]:
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
def _training_bar(total_s: float) -> Iterator[Callable[[Event], None]]:
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


def _engine(model: str, **settings: Any) -> Engine:
    """An engine, its model fetched first. Plain decoding gets no drafter: its context would be kept for nothing."""
    from ratoon.models.hub import resolve

    with _progress() as progress:
        resolve(model, progress)
    from ratoon.runtime.engine import Engine

    if settings.get("method") == "ar":
        settings["drafter"] = "none"
    engine = Engine(model, **settings)
    if settings["drafter"] == "auto" and engine.drafter is None:
        print(f"no drafter is known for {model}: decoding autoregressively (see `ratoon train`)", file=sys.stderr)
    return engine


# -- commands ---------------------------------------------------------------------------------------------------------


def _version(wanted: bool) -> None:
    if wanted:
        from ratoon import __version__

        print(f"ratoon {__version__}")
        raise typer.Exit


@app.callback()
def top(
    version: Annotated[bool, option("--version", callback=_version, is_eager=True, help="Show the version.")] = False,
) -> None:
    """DFlash drafting and DDTree verification: the same tokens, sooner."""


@app.command()
@command
def generate(
    prompt: Annotated[str, typer.Argument(help="The prompt; '-' reads standard input.")],
    model: Model = "smollm2",
    drafter: Drafter = "auto",
    method: Method = "tree",
    budget: Budget = "auto",
    topk_cap: TopkCap = 16,
    temperature: Temperature = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    min_p: MinP = 0.0,
    repetition_penalty: RepetitionPenalty = 1.0,
    presence_penalty: PresencePenalty = 0.0,
    frequency_penalty: FrequencyPenalty = 0.0,
    logit_bias: LogitBias = None,
    seed: Seed = None,
    stop: Stop = None,
    max_tokens: MaxTokens = 256,
    ignore_eos: Annotated[bool, option("--ignore-eos", help="Go on after the model's end token.")] = False,
    chat_template: Annotated[
        bool, option("--chat/--raw", help="Through the model's chat template if it has one, or as it stands.")
    ] = True,
    dtype: Dtype = "auto",
    device: Device = "auto",
    mode: Mode = "auto",
    max_model_len: MaxModelLen = None,
    show_tree: Annotated[bool, option("--show-tree", help="Draw each round's tree with the accepted path.")] = False,
    stats: Stats = False,
) -> None:
    """Answer one prompt, streaming."""
    from ratoon.core.request import SamplingParams

    text = _prompt(prompt)
    params = SamplingParams(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        logit_bias=_logit_bias(logit_bias),
        seed=seed,
        stop=tuple(stop or ()),
        max_tokens=max_tokens,
        ignore_eos=ignore_eos,
    )
    engine = _engine(
        model,
        drafter=drafter,
        method=method,
        budget=_budget(budget),
        topk_cap=topk_cap,
        dtype=dtype,
        device=device,
        mode=mode,
        max_rows=1,
        max_model_len=max_model_len,
    )
    try:
        ids = _encode(engine, [{"role": "user", "content": text}] if chat_template else text)
        output = _stream(engine, ids, params, show_tree)
        if stats:
            _show_stats(engine, output)
    finally:
        engine.close()


@app.command()
@command
def chat(
    model: Model = "smollm2",
    drafter: Drafter = "auto",
    method: Method = "tree",
    budget: Budget = "auto",
    topk_cap: TopkCap = 16,
    system: Annotated[str | None, option(help="System message.")] = None,
    temperature: Temperature = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    min_p: MinP = 0.0,
    repetition_penalty: RepetitionPenalty = 1.0,
    seed: Seed = None,
    max_tokens: MaxTokens = 512,
    dtype: Dtype = "auto",
    device: Device = "auto",
    mode: Mode = "auto",
    max_model_len: MaxModelLen = None,
    stats: Stats = False,
) -> None:
    """Talk with the model. /reset forgets, /exit or Ctrl-D leaves, Ctrl-C cuts an answer short."""
    from ratoon.core.request import SamplingParams

    params = SamplingParams(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
        max_tokens=max_tokens,
    )
    engine = _engine(
        model,
        drafter=drafter,
        method=method,
        budget=_budget(budget),
        topk_cap=topk_cap,
        dtype=dtype,
        device=device,
        mode=mode,
        max_rows=1,
        max_model_len=max_model_len,
    )
    try:
        _converse(engine, params, system, stats)
    finally:
        engine.close()


@app.command()
@command
def demo(
    model: Model = "smollm2",
    drafter: Drafter = "auto",
    budget: Budget = "auto",
    topk_cap: TopkCap = 16,
    max_tokens: MaxTokens = 96,
    dtype: Dtype = "auto",
    device: Device = "auto",
    mode: Mode = "auto",
) -> None:
    """Two code prompts and one chat prompt: plain, draft chain, draft tree; speed-up, tau, tokens equal or not."""
    from ratoon.lab.demo import run

    def engine_for(**settings: Any) -> Engine:
        choice = {"drafter": drafter, "dtype": dtype, "device": device, "mode": mode, "max_rows": 1, **settings}
        choice["topk_cap"] = topk_cap
        return _engine(model, **choice)

    run(engine_for, _budget(budget), topk_cap, max_tokens)


@app.command()
@command
def bench(
    model: Model = "smollm2",
    drafter: Drafter = "auto",
    methods: Annotated[str, option(help="Of ar, chain, tree.", metavar="A,B")] = "ar,chain,tree",
    budgets: Annotated[str, option(help="Drafted nodes per round, or auto.", metavar="N,M")] = "auto",
    topk_caps: Annotated[str, option(help="Candidates per position; 0 = uncapped.", metavar="N,M")] = "16",
    concurrency: Annotated[str, option(help="Rows decoded together.", metavar="N,M")] = "1",
    graphs: Annotated[str, option(help="Of on, off; auto is the engine's own choice.", metavar="on,off")] = "auto",
    dtype: Annotated[str, option(help="Of bfloat16, float32; auto is the engine's choice.", metavar="A,B")] = "auto",
    device: Device = "auto",
    temperature: Annotated[str, option(help="0 is greedy.", metavar="X,Y")] = "0",
    prompts: Annotated[str, option(help="humaneval, mtbench or FILE.jsonl.")] = "humaneval",
    limit: Annotated[int | None, option(help="Only the first prompts of the set.")] = None,
    max_tokens: MaxTokens = 256,
    repeats: Annotated[int, option(help="Each cell this many times; the fastest is reported.")] = 1,
    seed: Annotated[int, option(help="Seed of sampled cells.")] = 0,
    json: Annotated[Path | None, option("--json", help="Append the records to this file, one a line.")] = None,
) -> None:
    """Measure methods against each other on the same prompts."""
    from ratoon.lab.bench import Matrix, run

    matrix = Matrix.parse(
        model=model,
        drafter=drafter,
        methods=methods,
        budgets=budgets,
        topk_caps=topk_caps,
        concurrency=concurrency,
        graphs=graphs,
        dtype=dtype,
        device=device,
        temperature=temperature,
        prompts=prompts,
        limit=limit,
        max_tokens=max_tokens,
        repeats=repeats,
        seed=seed,
    )
    with _progress() as progress:
        matrix.fetch(progress)
    run(matrix, json)


@app.command()
@command
def train(
    model: Model = "smollm2",
    out: Annotated[Path, option(help="Folder of the session: text, checkpoints, bf16/ and int8/.")] = Path("drafter"),
    prompts: Annotated[Path | None, option(help="FILE.jsonl to answer; without it the model asks itself.")] = None,
    minutes: Annotated[float, option(help="For all of it: writing text, training.")] = 10.0,
    resume: Annotated[Path | None, option(help="Folder of an earlier session, continued in place.")] = None,
    block_size: Annotated[int, option(help="Tokens of a draft block, the anchor included.")] = 16,
    layers: Annotated[int, option(help="Layers of the drafter.")] = 5,
    lr: Annotated[float, option(help="Peak learning rate.")] = 2e-3,
    mask_token_id: Annotated[int | None, option(help="Default: an unused special token.")] = None,
    seed: Annotated[int, option(help="Of text, initialisation and anchors.")] = 0,
    dtype: Dtype = "auto",
    device: Device = "auto",
) -> None:
    """Train a drafter for a model on what the model itself writes."""
    with _progress() as progress:
        from ratoon.models.hub import resolve

        path = resolve(model, progress)
    import torch

    from ratoon.runtime.setup import choose_device
    from ratoon.train.session import fitting_recipe, teach

    where = choose_device(device)
    kind = torch.bfloat16 if dtype == "bfloat16" or (dtype == "auto" and where.type == "cuda") else torch.float32
    changes = {"minutes": minutes, "block_size": block_size, "layers": layers, "lr": lr, "seed": seed}
    recipe = fitting_recipe(where, **changes, mask_token_id=mask_token_id)
    with _training_bar(60 * minutes) as report:
        record = teach(
            path,
            resume or out,
            recipe,
            device=where,
            dtype=kind,
            prompts=prompts,
            resume=resume,
            provenance={"target": model},
            report=report,
        )
    print(_trained(record, resume or out))


@app.command()
@command
def pull(
    model: Annotated[str, typer.Argument(help="smollm2 or a hub id, owner/name.")],
    revision: Annotated[str | None, option(help="Branch, tag or commit (default: main).")] = None,
) -> None:
    """Fetch a model or a drafter. Resumes where it stopped; takes no code."""
    from ratoon.models.hub import pull as fetch_model

    with _progress() as progress:
        path = fetch_model(model, revision, progress)
    print(path)


# -- showing ----------------------------------------------------------------------------------------------------------


def _encode(engine: Engine, text: str | list[dict[str, str]]) -> list[int]:
    """Token ids of a raw text, or of messages through the chat template (their text alone where there is none)."""
    tokenizer = engine.tokenizer
    if isinstance(text, str):
        return tokenizer.encode(text)
    return tokenizer.encode_chat(text) if tokenizer.chat_template else tokenizer.encode(text[-1]["content"])


def _stream(engine: Engine, ids: list[int], params: SamplingParams, show_tree: bool = False) -> RequestOutput:
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


def _show_stats(engine: Engine, output: RequestOutput) -> None:
    speed = len(output.token_ids) / output.decode_s if output.decode_s else float("nan")
    print(
        f"{len(output.token_ids)} tokens in {output.decode_s:.2f} s ({speed:.1f} tok/s), {output.rounds} rounds, "
        f"tau {output.tau:.2f}, first token after {1000 * output.ttft_s:.0f} ms, ended by {output.finish_reason}",
        file=sys.stderr,
    )
    print(engine.describe(), file=sys.stderr)


def _trained(record: dict[str, Any], folder: Path) -> str:
    """The held-out figures, and how to use what was trained."""
    held_out = record["held_out"]
    taus = ", ".join(f"{method} {tau:.2f}" for method, tau in held_out["tau"].items())
    return (
        f"{record['steps']} steps, loss {record['loss']}, tau on {held_out['samples']} held-out texts: {taus}\n"
        f"use it: ratoon generate --drafter {folder / 'int8'} ..."
    )


def _converse(engine: Engine, params: SamplingParams, system: str | None, stats: bool) -> None:
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
            output = _stream(engine, _encode(engine, [*messages, question]), params)
        except KeyboardInterrupt:
            print("\n(cut short; this turn is forgotten)")
            continue
        messages += [question, {"role": "assistant", "content": output.text}]
        if stats:
            _show_stats(engine, output)


def _ask() -> str | None:
    """The next line, or None when the user leaves."""
    try:
        line = input("> " if sys.stdin.isatty() else "").strip()
    except EOFError:
        return None
    return None if line in ("/exit", "/quit") else line


def main() -> None:
    """Entry point of the `ratoon` command."""
    app()


if __name__ == "__main__":
    main()
