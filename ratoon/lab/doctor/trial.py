# Owns: one prompt and one draft pass through an idle engine's real round, and what was heard on the way.
# Promises: the borrowed seat and pages come back scrubbed; what the engine computes is heard, never changed.
# Never: judges.
"""Observing a pair. P: prompt places before the anchor, B: block, X: taps wide, H: hidden, L: draft layers,
K, D: K/V heads, head dim, N: heads, S: context and block places."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor

from ratoon.core.drafter import DrafterConfig
from ratoon.core.request import SamplingParams
from ratoon.models.decoder import Decoder
from ratoon.models.dflash import DFlash
from ratoon.models.layers import Layer
from ratoon.runtime.runner import Runner
from ratoon.spec.state import RoundShape

PROMPT_LEN = 24
SEAT = 1


@dataclass(frozen=True)
class Trial:
    """ids: the prompt, anchor last. taps_PX: what the drafter was given; context: its K/V [L, P, 2, K, D] in the cache;
    x_BH, position_B, hidden_BH: input, positions and output of the draft pass."""

    ids: tuple[int, ...]
    taps_PX: Tensor
    context: Tensor
    x_BH: Tensor
    position_B: Tensor
    hidden_BH: Tensor


@dataclass(frozen=True)
class Pair:
    """An idle engine's runner, and its drafter's config as the checkpoint (not the engine) says it.

    What was observed is kept: make a new Pair after a change. `Pair(engine.runner, DrafterConfig.from_hf(...))`.
    """

    runner: Runner
    expected: DrafterConfig

    @property
    def target(self) -> Decoder:
        return self.runner.round.target

    @property
    def drafter(self) -> DFlash:
        """ValueError for an engine that has none."""
        if self.runner.round.drafter is None:
            raise ValueError("this engine has no drafter: there is no pair to check")
        return self.runner.round.drafter

    @property
    def tolerance(self) -> float:
        """Largest relative error that rounding explains."""
        return 1e-3 if self.target.embed.weight.dtype == torch.float32 else 0.1

    @cached_property
    def trial(self) -> Trial:
        """One prefill and one draft pass."""
        with torch.inference_mode():
            return _try(self)


@contextmanager
def borrowed(runner: Runner, ids: Sequence[int], nodes: int) -> Iterator[tuple[Tensor, Tensor]]:
    """A seat at the end of a prompt, on pages in descending order: (seat [1], the slot of every position)."""
    limits = runner.limits
    assert bool(runner.state.done_S.all()), "the doctor needs an idle engine"
    count = min(-(-(len(ids) + limits.scratch) // limits.page_size), limits.pages_per_row)
    pages = [limits.num_pages - 1 - i for i in range(count)]
    try:
        runner.join(
            SEAT, ids, pages, SamplingParams(), (), 0, len(ids) + limits.scratch, nodes, max(limits.max_ranks, 1)
        )
        inside = torch.arange(limits.page_size)
        slots = (torch.tensor(pages)[:, None] * limits.page_size + inside).flatten()
        yield torch.tensor([SEAT], device=runner.device), slots.to(runner.device)
    finally:
        runner.table.reset("state", "kv", "scratch", "output")
        runner.settle()


def some_ids(runner: Runner, length: int) -> tuple[int, ...]:
    """Token ids of no meaning, the same every time."""
    vocab = runner.round.target.config.vocab_size
    return tuple((7919 * i + 13) % vocab for i in range(1, length + 1))


def block_shape(runner: Runner) -> RoundShape:
    """A draft round of one row, as this mode runs it."""
    nodes = min(runner.limits.max_nodes, 15)
    return RoundShape(1, nodes + 1, runner.limits.max_block, nodes, "argmax", live=runner.mode == "eager")


def _try(pair: Pair) -> Trial:
    runner, shape = pair.runner, block_shape(pair.runner)
    ids = some_ids(runner, min(PROMPT_LEN, runner.limits.max_model_len - 1))
    last, given, passes = len(ids) - 1, [], []
    with borrowed(runner, ids, shape.nodes) as (seat_R, slots), _heard(pair.drafter, given, passes):
        prompt_1P = torch.tensor([ids[:last]], device=runner.device)
        runner.round.prefill(seat_R, prompt_1P, torch.zeros_like(seat_R), last)
        context = runner.table["draft_cache"][:, slots[:last]].clone()
        runner.round.draft_build(seat_R, shape)
    (x_BH, position_B, hidden_BH) = passes[0]
    return Trial(ids, torch.cat(given)[:last], context, x_BH, position_B, hidden_BH)


@contextmanager
def _heard(drafter: Any, given: list[Tensor], passes: list[tuple[Tensor, ...]]) -> Iterator[None]:
    """Copies of the taps that go into the drafter's context, and of its passes' input, positions and output."""
    healthy, own = drafter.store_context, "store_context" in vars(drafter)

    def store_context(taps_NX: Tensor, *rest: Any) -> None:
        given.append(taps_NX.clone())
        healthy(taps_NX, *rest)

    def before(_: object, args: tuple[Any, ...]) -> None:
        passes.append((args[0].clone(), args[1].clone()))

    def after(_: object, args: object, output: Tensor) -> None:
        passes[-1] += (output.clone(),)

    hooks = (drafter.register_forward_pre_hook(before), drafter.register_forward_hook(after))
    drafter.store_context = store_context
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        if own:
            drafter.store_context = healthy
        else:
            del drafter.store_context


def seen_keys(pair: Pair, start: int) -> Tensor:
    """bool [L, B, N, S]: which keys each head of each draft layer attends to, for a block at `start`.

    Found by attending: with queries of zero every visible key weighs the same, so a value that only one key has shows
    whether it was seen. D keys are asked about at a time, one per channel.
    """
    runner, drafter, config = pair.runner, pair.drafter, pair.drafter.config
    shape, dim, rows = block_shape(runner), config.head_dim, []
    with torch.inference_mode(), borrowed(runner, some_ids(runner, start + 1), shape.nodes) as (seat_R, slots):
        cache = runner.table["draft_cache"]
        block = runner.round.passes.block(runner.round.draft_cache, seat_R, shape)  # pyright: ignore[reportArgumentType]
        block.attend.begin(drafter.rotary, block.position_T, cache.dtype)
        for index, layer in enumerate(drafter.layers):
            heads = cast(Layer, layer).self_attn.heads
            parts = []
            for first in range(0, start + shape.block, dim):
                width = min(dim, start + shape.block - first)
                value_SD = torch.zeros(start + shape.block, dim, dtype=cache.dtype, device=cache.device)
                value_SD[first : first + width, :width] = torch.eye(width, dtype=cache.dtype, device=cache.device)
                cache[index, slots[:start], 1] = value_SD[:start, None].expand(-1, heads.num_kv_heads, -1)
                qkv = cache.new_zeros(shape.block, heads.num_heads + 2 * heads.num_kv_heads, dim)
                qkv[:, heads.num_heads + heads.num_kv_heads :] = value_SD[start:, None]
                out = block.attend(index, qkv.flatten(1), heads).view(shape.block, heads.num_heads, dim)
                parts.append(out[..., :width] > 0)
            rows.append(torch.cat(parts, dim=-1))
    return torch.stack(rows).cpu()
