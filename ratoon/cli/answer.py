# Owns: the commands that answer: generate, chat, demo.
# Promises: answers go to stdout, everything else to stderr; the engine is closed, whatever happens.
# Never: computes.
"""Commands that answer."""

from __future__ import annotations

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
    logit_bias_of,
    option,
    prompt_of,
)
from ratoon.cli.pair import open_engine

if TYPE_CHECKING:
    from ratoon.runtime.engine import Engine


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
    engine = open_engine(
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
    engine = open_engine(
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
        # Each method runs the same prompts: none may find what another has left.
        choice |= {"topk_cap": topk_cap, "enable_prefix_caching": False}
        return open_engine(model, **choice)

    run(engine_for, budget_of(budget), topk_cap, max_tokens)
