# Owns: `ratoon bench`.
# Promises: a matrix that cannot be run is refused before a model is loaded.
# Never: measures; lab/bench.py does.
"""The command that measures."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ratoon.cli.errors import command
from ratoon.cli.options import (
    BirthTest,
    Device,
    Drafter,
    GpuMemory,
    Kernels,
    MaxModelLen,
    MaxTokens,
    Model,
    RunAhead,
    check_folder,
    given,
    option,
)
from ratoon.cli.pair import choose_kernels

_OF_A_SERVER = (
    *("url", "api_key", "served_model_name", "concurrency", "temperature", "prompts", "limit", "cut", "max_tokens"),
    *("repeats", "seed", "out", "again", "json"),
)
_ONLY_OF_A_SERVER = ("api_key", "served_model_name")


@command
def bench(
    context: typer.Context,
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
    url: Annotated[
        str | None, option(help="Measure an OpenAI-compatible server instead.", metavar="http://HOST:PORT/v1")
    ] = None,
    api_key: Annotated[str | None, option(help="Its key (default: OPENAI_API_KEY).")] = None,
    served_model_name: Annotated[str | None, option(help="Its model, where it has several.")] = None,
    out: Annotated[
        Path | None, option(help="Folder of records and report.html; a rerun goes on where the last one ended.")
    ] = None,
    again: Annotated[bool, option("--again", help="Measure again what --out holds already.")] = False,
    json: Annotated[Path | None, option("--json", help="Append the records to this file, one a line.")] = None,
    stats: Annotated[bool, option("--stats", help="Show each engine's memory plan.")] = False,
) -> None:
    """Measure methods against each other on the same prompts."""
    from ratoon.cli.show import fetch_bar, memory_plan

    if out:
        check_folder(out, "--out")
    _check_options(context, url)
    if url is not None:
        _bench_server(**{name: context.params[name] for name in _OF_A_SERVER})
        return
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
        kernels=kernels,
        engine=given(
            max_model_len=max_model_len,
            run_ahead=run_ahead,
            gpu_memory_utilization=gpu_memory_utilization,
            birth_test=birth_test,
        ),
    )
    if device != "auto" or kernels != "auto":
        choose_kernels(kernels, device)
    with fetch_bar() as progress:
        matrix.fetch(progress)
        matrix.fetch_model(progress)
    choose_kernels(kernels, device)
    run(matrix, json, **({"opened": memory_plan} if stats else {}), out=out, again=again)


def _check_options(context: typer.Context, url: str | None) -> None:
    """ValueError for an option that would be ignored."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    given = [name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"]
    if url is None and (wrong := [name for name in given if name in _ONLY_OF_A_SERVER]):
        raise ValueError(f"--{wrong[0].replace('_', '-')} needs --url")
    if url is not None and (wrong := [name for name in given if name not in _OF_A_SERVER]):
        names = ", ".join(f"--{name.replace('_', '-')}" for name in wrong)
        raise ValueError(f"with --url the server decides {names}: leave it out here")


def _bench_server(out: Path | None, again: bool, json: Path | None, api_key: str | None, **asked: Any) -> None:
    from ratoon.cli.show import fetch_bar
    from ratoon.core.settings import api_key as key_of_the_environment
    from ratoon.lab.endpoint import Question, run

    question = Question.parse(api_key=api_key or key_of_the_environment(), **asked)
    with fetch_bar() as progress:
        question.fetch(progress)
    run(question, json, out, again)
