# Owns: the checks of an opened engine that serves: parameters, equality, acceptance, births, K/V integrity, memory.
# Promises: the engine is idle afterwards; figures come with how many rounds they are of.
# Never: calls a difference a near-tie that core/request.py does not.
"""Checks that run requests."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from ratoon.core.request import RequestOutput, SamplingParams, compare
from ratoon.lab.acceptance import accept_per_position, tau
from ratoon.lab.doctor.check import Check, judged, skipped
from ratoon.models.random import random_decoder, random_drafter
from ratoon.runtime.birth import check_births
from ratoon.runtime.engine import Engine
from ratoon.spec.state import RoundShape

NUM_TOKENS = 32
BUDGET = 15
TEXTS = (
    'def fibonacci(n):\n    """Return the n-th Fibonacci number."""\n',
    'def merge_sorted(a, b):\n    """Merge two sorted lists into one sorted list."""\n    result = []\n',
    'import math\n\n\ndef is_prime(n):\n    """Tell whether n is a prime number."""\n',
)
_HEALTHY, _SUSPECT = 0.85, 0.60
_BELOW_SHIPPED, _SUSPECT_SHARE = 0.85, 0.7
_Z = 2.6
"""Standard deviations of doubt: of a hundred healthy pairs at the bound one would be called suspect."""


@dataclass(frozen=True)
class Served:
    """Outputs of the same prompts by each method."""

    ar: list[RequestOutput]
    chain: list[RequestOutput]
    tree: list[RequestOutput]


def check_parameters(networks: Mapping[str, nn.Module | None]) -> Check:
    """Every parameter was filled: finite, and not zero throughout (the loader has counted the names)."""
    count, faults = 0, []
    for label, network in networks.items():
        for name, parameter in network.named_parameters() if network else ():
            count += 1
            if not bool(torch.isfinite(parameter).all()):
                faults.append(f"{label}.{name} holds a NaN or infinity")
            elif name.endswith("weight") and not bool(parameter.any()):
                faults.append(f"{label}.{name} is zero throughout")
    remedy = "fetch the checkpoint again; if it is whole, it was damaged when it was made"
    return judged("parameters", not faults, "; ".join(faults[:5]) or f"{count} filled", "finite, not zero", remedy)


def prompts_of(engine: Engine, quick: bool) -> list[list[int]]:
    """Three code prompts (one if quick) as token ids."""
    return [engine.tokenizer.encode(text) for text in TEXTS[: 1 if quick else None]]


def serve(engine: Engine, prompts: Sequence[Sequence[int]]) -> Served:
    """Plain decoding, a chain and a tree, greedy, one prompt at a time."""

    def run(**how: Any) -> list[RequestOutput]:
        params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, **how)
        return [engine.generate([list(prompt)], params)[0] for prompt in prompts]

    return Served(run(method="ar"), run(method="chain", budget=BUDGET), run(method="tree", budget=BUDGET))


def check_equality(served: Served, dtype: str) -> Check:
    """Speculative text is autoregressive text, near-ties counted."""
    counts, faults = {"identical": 0, "near_tie": 0, "mismatch": 0}, []
    for method, outputs in (("chain", served.chain), ("tree", served.tree)):
        for number, (ar, other) in enumerate(zip(served.ar, outputs, strict=True)):
            verdict = compare(ar, other, dtype)
            counts[verdict.verdict] += 1
            if verdict.verdict == "mismatch":
                faults.append(f"{method} differs from plain decoding at token {verdict.index} of prompt {number}")
    seen = f"{counts['identical']} texts identical, {counts['near_tie']} near-ties, {counts['mismatch']} different"
    return judged(
        "spec = ar",
        not faults,
        "; ".join([*faults, seen]),
        f"{NUM_TOKENS} tokens alike ({dtype}: near-ties within the bound)",
        "run `ratoon bisect`: it names the stage, layer and operation",
    )


def first_slot_figure(provenance: Mapping[str, Any]) -> float | None:
    """What the drafter's maker measured for the first drafted position, None where nothing is recorded."""
    figures = provenance.get("figures", {}).get("code", {})
    held_out = provenance.get("held_out", {}).get("accuracy") or [None]
    return figures.get("first_slot", held_out[0])


def check_acceptance(served: Served, provenance: Mapping[str, Any]) -> Check:
    """How often the first drafted token is right, against its band."""
    rounds = sum(len(output.accepted) for output in served.chain)
    first = (accept_per_position(served.chain) or [0.0])[0]
    figure = first_slot_figure(provenance)
    low, floor = (_HEALTHY, _SUSPECT) if figure is None else (_BELOW_SHIPPED * figure, _SUSPECT_SHARE * figure)
    doubt = _Z * math.sqrt(max(first * (1 - first), 1 / rounds) / rounds)
    status = "fail" if first + doubt < floor else "warn" if first + doubt < low else "ok"
    source = "what drafters of this kind reach" if figure is None else f"{figure:.2f} in its provenance"
    seen = f"{first:.2f} of {rounds} chain rounds, tau {tau(served.chain)} (tree {tau(served.tree)})"
    remedy = "" if status == "ok" else "see the wiring checks above; if they pass, the drafter is weak on this text"
    return Check("first slot", status, seen, f"from {low:.2f} ({source}), below {floor:.2f} suspect wiring", remedy)


def check_births_of(engine: Engine) -> Check:
    """The smallest captured graph replays to the bit what it computes without a graph."""
    runner = engine.runner
    if runner.graphs is not None and runner.shapes:
        shape = min(runner.shapes, key=lambda shape: (shape.places, shape.rows))
        replays = check_births(runner, [shape], "quick")
        runner.settle()
        seen = f"{replays} replays of {runner.key_of(shape)}"
    elif engine.device == "cpu":
        seen = f"a toy-size twin of the pair in the emulator ({_twin(engine)})"
    else:
        return skipped("birth test", f"mode {engine.mode} captures no graph")
    return Check("birth test", "ok", seen, "static, bit for bit")


def _twin(engine: Engine) -> str:
    """Captures and births a round of networks of the pair's kind that are small enough for a CPU."""
    round_ = engine.runner.round
    small = {"hidden_size": 32, "intermediate_size": 48, "head_dim": 8, "num_heads": 4, "num_kv_heads": 2}
    config = replace(round_.target.config, **small, num_layers=3, vocab_size=64, max_position=256, eos_ids=())
    target, drafter = random_decoder(config, torch.float32, "cpu"), None
    if round_.drafter is not None:
        own = round_.drafter.config
        ends = (0, -1)
        changed = replace(
            own, **small, num_layers=2, vocab_size=64, block_size=min(own.block_size, 8), target_layer_ids=(0, 1),
            mask_token_id=63, num_target_layers=3, windows=tuple(own.windows[i] and 5 for i in ends),
            causal=tuple(own.causal[i] for i in ends),
        )  # fmt: skip
        drafter = random_drafter(changed, torch.float32, "cpu")
    nodes = 7 if drafter else 0
    block = drafter.config.block_size if drafter else 0
    shape = RoundShape(1, nodes + 1, block, nodes, "argmax")
    options: dict[str, Any] = {"budget": nodes, "max_rows": 2, "max_model_len": 64, "shapes": (shape,)}
    Engine.from_parts(target, drafter, mode="graph", birth_test="quick", **options).close()
    return f"hidden 32, 3 layers, {nodes + 1} places"


def check_cache(engine: Engine) -> Check:
    """After the runs: every page is free again, page 0 finite, and no guard was written over."""
    scheduler, table = engine._loop.scheduler, engine.runner.table
    scheduler.check()
    table.check_dummies()
    table.check_canaries()
    free, total = scheduler.cache.num_available, engine.limits.num_pages - 1
    seen = f"{free} of {total} pages free, page 0 finite, canaries intact"
    return judged("k/v", free == total, seen, "all pages free", "a request kept its pages: report this")


def check_memory(engine: Engine) -> Check:
    """Weights, caches and graphs fit into the device's memory."""
    total = engine.memory.total
    if engine.device == "cpu":
        room, share = _ram_bytes(), 1.0
    else:
        room, share = torch.cuda.mem_get_info()[1], engine.settings.gpu_memory_utilization
    return judged(
        "memory",
        total <= share * room,
        f"{total / 1e9:.2f} GB planned, of {room / 1e9:.1f} GB",
        f"at most {share:.0%}",
        "lower max_rows or max_model_len, or choose a smaller model",
    )


def _ram_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
