# Owns: one step of plain decoding on a CPU against the bare matrix products of that step.
# Promises: steps and products take turns in one process; medians over at least 100 pairs.
# Never: drafts, or counts prefill.
"""`python -m benchmarks.cpu_step [--model smollm2 | --random-weights CONFIG] [--dtypes float32,bfloat16] [--pairs 120]`

A step is everything between two events of `Engine.stream` at one row; its products are `F.linear` on the same
weights, the head included.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

from ratoon.core.request import SamplingParams
from ratoon.models.decoder import Decoder
from ratoon.models.hub import resolve
from ratoon.models.layers import Layer
from ratoon.models.random import random_decoder, target_shape
from ratoon.models.weights import load_model
from ratoon.runtime.engine import Engine

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
WARM_UP = 10


@dataclass(frozen=True)
class Pairs:
    """Medians in milliseconds, and of the ratio of each pair."""

    step_ms: float
    products_ms: float
    ratio: float
    num: int


def measure(target: Decoder, num: int, prompt_len: int = 110) -> Pairs:
    """`num` pairs of a step and its products, after a warm-up."""
    run = products(target)
    engine = Engine.from_parts(target, method="ar", max_rows=1, mode="eager")
    prompt = [(7 * i) % target.config.vocab_size for i in range(prompt_len)]
    params = SamplingParams(max_tokens=num + WARM_UP + 2, ignore_eos=True)
    steps, bare = [], []
    with engine:
        stream = engine.stream([prompt], params)
        next(stream)
        for _ in range(num + WARM_UP):
            steps.append(_ms(lambda: next(stream)))
            bare.append(_ms(run))
        stream.close()
    steps, bare = steps[WARM_UP:], bare[WARM_UP:]
    ratios = [step / product for step, product in zip(steps, bare, strict=True)]
    return Pairs(statistics.median(steps), statistics.median(bare), statistics.median(ratios), num)


def products(target: Decoder) -> Callable[[], None]:
    """A function that makes the products of one step."""
    weights = []
    for layer in target.layers:
        assert isinstance(layer, Layer)
        attention, mlp = layer.self_attn, layer.mlp
        weights += [module.weight for module in (attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj)]
    weights.append(target.head_weight)
    inputs = {w.shape[1]: torch.randn(1, w.shape[1]).to(w.dtype) for w in weights}

    def run() -> None:
        with torch.inference_mode():
            for weight in weights:
                F.linear(inputs[weight.shape[1]], weight)

    return run


def _ms(run: Callable[[], object]) -> float:
    begun = time.perf_counter()
    run()
    return 1e3 * (time.perf_counter() - begun)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="smollm2, a directory or a .gguf file; default: random weights")
    parser.add_argument("--random-weights", default=str(Path(__file__).parent / "configs" / "smollm2-135m.json"))
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--pairs", type=int, default=120)
    given = parser.parse_args()
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {given.model or given.random_weights}")
    for name in given.dtypes.split(","):
        if given.model:
            target = load_model(resolve(given.model), DTYPES[name], "cpu")
        else:
            target = random_decoder(target_shape(given.random_weights), DTYPES[name], "cpu")
        found = measure(target, given.pairs)
        print(
            f"{name}: step {found.step_ms:.2f} ms, products {found.products_ms:.2f} ms, "
            f"ratio of medians {found.step_ms / found.products_ms:.3f}, median ratio {found.ratio:.3f}, n={found.num}"
        )


if __name__ == "__main__":
    main()
