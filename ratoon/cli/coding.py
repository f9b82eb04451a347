# Owns: `ratoon eval`.
# Promises: what cannot be run safely is refused before a model loads; exit code 1 where tokens differ beyond near-ties.
# Never: judges; lab/evaluate.py does.
"""The command that asks for programs and runs them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from ratoon.cli.errors import command
from ratoon.cli.options import Device, Drafter, Dtype, Kernels, MaxTokens, Mode, Model, Temperature, option
from ratoon.cli.pair import choose_kernels

ProblemSet = Literal["five", "humaneval"]


@command
def evaluate(
    model: Model = "smollm2",
    drafter: Drafter = "auto",
    methods: Annotated[str, option(help="Of ar, chain, tree.", metavar="A,B")] = "ar,chain,tree",
    budgets: Annotated[str, option(help="Drafted nodes per round, or auto.", metavar="N,M")] = "auto",
    topk_caps: Annotated[str, option(help="Candidates per position; 0 = uncapped.", metavar="N,M")] = "16",
    problems: Annotated[ProblemSet, option(help="five small ones asked in chat, or HumanEval (pass@1).")] = "five",
    limit: Annotated[int | None, option(help="Only the first problems of the set.")] = None,
    max_tokens: MaxTokens = 256,
    temperature: Temperature = 0.0,
    seed: Annotated[int, option(help="Seed of sampled answers.")] = 0,
    concurrency: Annotated[int, option(help="Rows decoded together.")] = 1,
    dtype: Dtype = "auto",
    device: Device = "auto",
    mode: Mode = "auto",
    kernels: Kernels = "auto",
    json: Annotated[Path | None, option("--json", help="Append the records to this file, one a line.")] = None,
    samples: Annotated[
        Path | None, option(help="Append each prompt, completion and judgement to this file.", metavar="FILE.jsonl")
    ] = None,
    unsafe_exec: Annotated[
        bool, option("--unsafe-exec", help="Where programs cannot be isolated, run them with limits alone.")
    ] = False,
) -> None:
    """Coding problems: what passes, how fast, and whether the methods write the same tokens."""
    from ratoon.cli.show import fetch_bar
    from ratoon.lab.coding import load_problems
    from ratoon.lab.evaluate import run
    from ratoon.lab.matrix import Matrix
    from ratoon.lab.sandbox import Sandbox

    matrix = Matrix.parse(
        model=model, drafter=drafter, methods=methods, budgets=budgets, topk_caps=topk_caps,
        concurrency=str(concurrency), graphs="auto", dtype=dtype, device=device, temperature=str(temperature),
        prompts=problems, limit=limit, max_tokens=max_tokens, repeats=1, seed=seed, cut=True, random_weights=None,
        drafter_config=None, simulate=False, simulate_tau=None, kernels=kernels, engine={"mode": mode},
    )  # fmt: skip
    asked, sandbox = load_problems(problems, limit), Sandbox.open(unsafe_exec)
    if not sandbox.isolated:
        print("programs run with limits alone: they can read and write what you can", file=sys.stderr)
    if device != "auto" or kernels != "auto":
        choose_kernels(kernels, device)
    with fetch_bar() as progress:
        matrix.fetch_model(progress)
    choose_kernels(kernels, device)
    records = run(matrix, asked, sandbox, json, samples)
    if any(row["mismatched_prompts"] for row in records):
        print("a method's tokens differ from plain decoding's: `ratoon bisect` names the culprit", file=sys.stderr)
        raise typer.Exit(1)
