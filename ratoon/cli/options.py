# Owns: the options that commands share, what their texts mean, and what can be refused before a model is loaded.
# Promises: a bad value is named with its option; nothing here takes longer than reading it.
# Never: imports torch.
"""Options of the `ratoon` command."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

if TYPE_CHECKING:
    from ratoon.core.request import Budget as BudgetValue

MethodName = Literal["ar", "chain", "tree"]
DtypeName = Literal["auto", "bfloat16", "float32"]
DeviceName = Literal["auto", "cpu", "cuda"]
ModeName = Literal["auto", "eager", "static", "graph", "staged"]
BirthName = Literal["off", "quick", "full"]
KernelsName = Literal["auto", "torch", "triton"]
option = typer.Option

Model = Annotated[str, option("--model", "-m", help="smollm2, a directory, a .gguf file or a pulled hub id.")]
Drafter = Annotated[str, option(help="auto (known pair), a directory or hub id, or none.")]
Method = Annotated[
    MethodName | None,
    option(help="ar: one token a round; chain: a DFlash chain; tree: DDTree. Default: tree if it can."),
]
Budget = Annotated[str, option(help="Drafted nodes per round, or auto. 0 is autoregressive.", metavar="N|auto")]
TopkCap = Annotated[int, option(help="Candidates per position of the tree; 0 = uncapped.")]
MaxTokens = Annotated[int, option(help="Longest answer, in tokens.")]
Dtype = Annotated[DtypeName, option(help="auto: bfloat16 on a GPU; on a CPU the faster, probed.")]
Device = Annotated[DeviceName, option(help="Where to compute.")]
Mode = Annotated[ModeName, option(help="How a round is run; graph is emulated on a CPU.")]
MaxModelLen = Annotated[int | None, option(help="Longest prompt plus answer (default: the model's).")]
RunAhead = Annotated[int | None, option(help="Rounds launched before the oldest is read (default: the engine's).")]
GpuMemory = Annotated[
    float | None, option("--gpu-memory-utilization", help="Share of the GPU's memory to use (default: the engine's).")
]
BirthTest = Annotated[BirthName, option(help="How much of the captured graphs is tested before they serve.")]
Kernels = Annotated[KernelsName, option(help="Who computes: auto is Triton on a GPU, torch on a CPU.")]
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
Stats = Annotated[bool, option("--stats", help="Show speed, acceptance, settings and the memory plan.")]


def budget_of(text: str) -> BudgetValue:
    """'auto', or a number of nodes."""
    from ratoon.core.request import check_budget

    if text == "auto":
        return "auto"
    try:
        number = int(text)
    except ValueError:
        raise ValueError(f"--budget must be 'auto' or a whole number (0 is autoregressive), got '{text}'") from None
    check_budget(number, "--budget")
    return number


def logit_bias_of(entries: list[str] | None) -> dict[int, float]:
    """Token ids with what is added to their logits."""
    bias: dict[int, float] = {}
    for entry in entries or ():
        token, _, value = entry.partition("=")
        try:
            bias[int(token)] = float(value)
        except ValueError:
            raise ValueError(f"--logit-bias must be ID=BIAS, for example 198=-100, got '{entry}'") from None
    return bias


def prompt_of(text: str) -> str:
    """The prompt itself; '-' reads it from standard input."""
    if text == "-":
        text = sys.stdin.buffer.read().decode("utf-8")
    elif any("\udc80" <= character <= "\udcff" for character in text):
        raise ValueError("the prompt is not UTF-8 text: convert it, for example with iconv")
    if not text.strip():
        raise ValueError("the prompt is empty: give at least one word")
    return text


def given(**settings: Any) -> dict[str, Any]:
    """The engine settings that were given (None: the engine's own), checked as far as that needs no model."""
    from ratoon.core.request import check_topk_cap

    settings = {name: value for name, value in settings.items() if value is not None}
    check_topk_cap(settings.get("topk_cap"), "--topk-cap")
    for name, least in (("max_model_len", 2), ("run_ahead", 0)):
        if settings.get(name, least) < least:
            raise ValueError(f"--{name.replace('_', '-')} must be at least {least}, got {settings[name]}")
    if not 0 < settings.get("gpu_memory_utilization", 1.0) <= 1:
        share = settings["gpu_memory_utilization"]
        raise ValueError(f"--gpu-memory-utilization must be above 0 and at most 1, got {share:g}")
    _check_method(settings)
    return settings


def _check_method(settings: Mapping[str, Any]) -> None:
    method = settings.get("method", "ar")
    if method != "ar" and settings.get("drafter") == "none":
        raise ValueError(f"--method {method} needs a drafter, and --drafter none leaves it none: use --method ar")


def check_folder(path: Path, name: str) -> None:
    """ValueError unless a folder is or can be there."""
    there = next(place for place in (path, *path.absolute().parents) if place.exists())
    if not there.is_dir():
        raise ValueError(f"{name} must be a folder, but {there} is a file")
