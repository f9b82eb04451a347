# Owns: the commands and their options (frozen by a test).
# Promises: `ratoon --help` needs no torch: whatever is heavy is imported inside the command that needs it.
# Never: computes; a command reads its options, calls one function below and shows what comes back.
"""The `ratoon` command."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ratoon.cli.errors import command
from ratoon.cli.options import (
    BirthTest,
    Budget,
    Device,
    Drafter,
    Dtype,
    FrequencyPenalty,
    GpuMemory,
    Kernels,
    LogitBias,
    MaxModelLen,
    MaxTokens,
    Method,
    MinP,
    Mode,
    Model,
    PresencePenalty,
    RepetitionPenalty,
    RunAhead,
    Seed,
    Stats,
    Stop,
    Temperature,
    TopK,
    TopkCap,
    TopP,
    budget_of,
    check_folder,
    given,
    logit_bias_of,
    option,
    prompt_of,
)

if TYPE_CHECKING:
    from ratoon.lab.bars import Report
    from ratoon.runtime.engine import Engine

app = typer.Typer(
    name="ratoon",
    help="DFlash drafting and DDTree verification: the same tokens, sooner.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # rich costs 50 ms that --help does not need
    pretty_exceptions_enable=False,
)


def _use_kernels(kernels: str, device: str) -> None:
    """Checks the device and chooses who computes on it."""
    from ratoon.core.settings import interprets_kernels
    from ratoon.ops.launch import use_kernels
    from ratoon.runtime.setup import choose_device

    if choose_device(device).type == "cpu" and kernels == "triton" and not interprets_kernels():
        raise ValueError(
            "--kernels triton needs a GPU (or TRITON_INTERPRET=1, which runs kernels on the CPU, very slowly)"
        )
    use_kernels(kernels)  # pyright: ignore[reportArgumentType]


def _engine(model: str, kernels: str = "auto", progress: Report | None = None, **settings: Any) -> Engine:
    """An engine, its models fetched first. Plain decoding gets no drafter: its context would be kept for nothing.

    progress: who shows the captures; None for a bar of their own.
    """
    from ratoon.cli.show import fetch_bar
    from ratoon.lab.bars import bar
    from ratoon.models.hub import resolve

    settings = given(**settings)
    if settings.get("method") == "ar":
        settings["drafter"] = "none"
    if settings.get("device", "auto") != "auto" or kernels != "auto":
        _use_kernels(kernels, settings["device"])
    with fetch_bar() as report:
        for name in (model, *({settings["drafter"]} - {"auto", "none"})):
            resolve(name, report)
    from ratoon.runtime.engine import Engine

    _use_kernels(kernels, settings["device"])
    if progress:
        engine = Engine(model, progress=progress, **settings)
    else:
        with bar() as shown:
            engine = Engine(model, progress=shown.report, **settings)
    if settings["drafter"] == "auto" and engine.drafter is None:
        print(f"no drafter is known for {model}: decoding autoregressively (see `ratoon train`)", file=sys.stderr)
    return engine


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
    method: Method = None,
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
    run_ahead: RunAhead = None,
    gpu_memory_utilization: GpuMemory = None,
    birth_test: BirthTest = "quick",
    kernels: Kernels = "auto",
    show_tree: Annotated[bool, option("--show-tree", help="Draw each round's tree with the accepted path.")] = False,
    stats: Stats = False,
) -> None:
    """Answer one prompt, streaming."""
    from ratoon.cli.show import encoded, streamed
    from ratoon.cli.show import stats as show_stats
    from ratoon.core.request import SamplingParams

    text = prompt_of(prompt)
    params = SamplingParams(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        logit_bias=logit_bias_of(logit_bias),
        seed=seed,
        stop=tuple(stop or ()),
        max_tokens=max_tokens,
        ignore_eos=ignore_eos,
    )
    engine = _engine(
        model,
        kernels,
        drafter=drafter,
        method=method,
        budget=budget_of(budget),
        topk_cap=topk_cap,
        dtype=dtype,
        device=device,
        mode=mode,
        max_rows=1,
        max_model_len=max_model_len,
        run_ahead=run_ahead,
        gpu_memory_utilization=gpu_memory_utilization,
        birth_test=birth_test,
    )
    try:
        ids = encoded(engine, [{"role": "user", "content": text}] if chat_template else text)
        output = streamed(engine, ids, params, show_tree)
        if stats:
            show_stats(engine, output)
    finally:
        engine.close()


@app.command()
@command
def chat(
    model: Model = "smollm2",
    drafter: Drafter = "auto",
    method: Method = None,
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
    run_ahead: RunAhead = None,
    gpu_memory_utilization: GpuMemory = None,
    birth_test: BirthTest = "quick",
    kernels: Kernels = "auto",
    stats: Stats = False,
) -> None:
    """Talk with the model. /reset forgets, /exit or Ctrl-D leaves, Ctrl-C cuts an answer short."""
    from ratoon.cli.show import talk
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
        kernels,
        drafter=drafter,
        method=method,
        budget=budget_of(budget),
        topk_cap=topk_cap,
        dtype=dtype,
        device=device,
        mode=mode,
        max_rows=1,
        max_model_len=max_model_len,
        run_ahead=run_ahead,
        gpu_memory_utilization=gpu_memory_utilization,
        birth_test=birth_test,
    )
    try:
        talk(engine, params, system, stats)
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

    if drafter == "none":
        raise ValueError("--drafter none leaves the demo nothing to show: name a drafter, or train one")

    def engine_for(**settings: Any) -> Engine:
        choice = {"drafter": drafter, "dtype": dtype, "device": device, "mode": mode, "max_rows": 1, **settings}
        choice["topk_cap"] = topk_cap
        return _engine(model, **choice)

    run(engine_for, budget_of(budget), topk_cap, max_tokens)


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
    prompts: Annotated[
        str | None, option(help="humaneval (default), mtbench, FILE.jsonl, or random:LENGTH (token ids).")
    ] = None,
    limit: Annotated[int | None, option(help="Only the first prompts of the set.")] = None,
    cut: Annotated[bool, option("--cut/--uncut", help="End an answer at its prompt's stop strings, or not.")] = True,
    max_tokens: MaxTokens = 256,
    repeats: Annotated[int, option(help="Each cell this many times; the fastest is reported.")] = 1,
    seed: Annotated[int, option(help="Seed of sampled cells.")] = 0,
    random_weights: Annotated[
        Path | None, option(help="config.json of a target: random weights of that shape.", metavar="CONFIG")
    ] = None,
    drafter_config: Annotated[
        Path | None, option(help="config.json of a drafter for --random-weights.", metavar="CONFIG")
    ] = None,
    simulate: Annotated[bool, option("--simulate", help="Acceptance by a table, for random weights.")] = False,
    simulate_tau: Annotated[
        float | None, option(help="Acceptance with this mean, for random weights and chains.", metavar="X")
    ] = None,
    max_model_len: MaxModelLen = None,
    run_ahead: RunAhead = None,
    gpu_memory_utilization: GpuMemory = None,
    birth_test: BirthTest = "quick",
    kernels: Kernels = "auto",
    json: Annotated[Path | None, option("--json", help="Append the records to this file, one a line.")] = None,
    stats: Annotated[bool, option("--stats", help="Show each engine's memory plan.")] = False,
) -> None:
    """Measure methods against each other on the same prompts."""
    from ratoon.cli.show import fetch_bar, memory_plan
    from ratoon.lab.bench import run
    from ratoon.lab.matrix import Matrix

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
        cut=cut,
        max_tokens=max_tokens,
        repeats=repeats,
        seed=seed,
        random_weights=random_weights,
        drafter_config=drafter_config,
        simulate=simulate,
        simulate_tau=simulate_tau,
        engine=given(
            max_model_len=max_model_len,
            run_ahead=run_ahead,
            gpu_memory_utilization=gpu_memory_utilization,
            birth_test=birth_test,
        ),
    )
    if device != "auto" or kernels != "auto":
        _use_kernels(kernels, device)
    with fetch_bar() as progress:
        matrix.fetch(progress)
        matrix.fetch_model(progress)
    _use_kernels(kernels, device)
    run(matrix, json, **({"opened": memory_plan} if stats else {}))


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
    from ratoon.cli.show import fetch_bar, trained, training_bar
    from ratoon.models.hub import resolve
    from ratoon.train.prompts import read_prompts

    check_folder(resume or out, "--resume" if resume else "--out")
    if prompts is not None and resume is None:
        read_prompts(prompts)
    import torch

    from ratoon.runtime.setup import choose_device
    from ratoon.train.session import fitting_recipe, teach

    where = choose_device(device)
    kind = torch.bfloat16 if dtype == "bfloat16" or (dtype == "auto" and where.type == "cuda") else torch.float32
    changes = {"minutes": minutes, "block_size": block_size, "layers": layers, "lr": lr, "seed": seed}
    recipe = fitting_recipe(where, **changes, mask_token_id=mask_token_id)
    with fetch_bar() as progress:
        path = resolve(model, progress)
    with training_bar(60 * minutes) as report:
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
    print(trained(record, resume or out))


@app.command()
@command
def pull(
    model: Annotated[str, typer.Argument(help="smollm2 or a hub id, owner/name.")],
    revision: Annotated[str | None, option(help="Branch, tag or commit (default: main).")] = None,
) -> None:
    """Fetch a model or a drafter. Resumes where it stopped; takes no code."""
    from ratoon.cli.show import fetch_bar
    from ratoon.models.hub import pull as fetch_model

    with fetch_bar() as progress:
        path = fetch_model(model, revision, progress)
    print(path)


def main() -> None:
    """Entry point of the `ratoon` command."""
    app()
