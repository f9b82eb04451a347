# Owns: what one round did, as named tensors in the order of its stages, and where two such records first differ.
# Promises: recording changes no value; a graph's replay is recorded by its buffers alone; padding is left out.
# Never: judges which of two records is right.
"""Observation of rounds. R: live rows, T: live places, B: block, H: hidden."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from ratoon.lab.bisect.outcome import STAGES, Difference
from ratoon.models.layers import Attend, Heads, Rotary
from ratoon.runtime.runner import Runner
from ratoon.spec import round as round_module

Key = tuple[str, str, int | None]
"""Stage, operation, layer."""
SCRATCH = "scratch keys and values"
"""K/V of places that no commit moved: their number is the round's, so they are compared from the last one back."""


_ENDS = ("hidden", "taps", "logits")


class Observation:
    """Named tensors of one round, in the order in which they were made."""

    def __init__(self) -> None:
        self.values: dict[Key, Tensor] = {}

    def add(self, stage: str, operation: str, value: Tensor, layer: int | None = None) -> None:
        self.values[stage, operation, layer] = value.detach().clone()

    def get(self, stage: str, operation: str, layer: int | None = None) -> Tensor | None:
        return self.values.get((stage, operation, layer))

    def trim(self, stage: str, count: int) -> None:
        """Keeps the first `count` places of what a stage recorded."""
        for key, value in self.values.items():
            if key[0] == stage:
                self.values[key] = value[:count]

    def ordered(self) -> list[Key]:
        """By stage; within one as recorded, but what a pass ends in after all of its layers."""
        return sorted(self.values, key=lambda key: (STAGES.index(key[0]), key[1] in _ENDS))


def compare(want: Observation, got: Observation, tolerance: float) -> Difference | None:
    """The first difference in stage order among what both recorded.

    tolerance: largest error of a real number, as a share of the largest expected one (0: to the bit).
    """
    for key in want.ordered():
        if key not in got.values:
            continue
        stage, operation, layer = key
        expected, found = want.values[key], got.values[key]
        if operation == SCRATCH:
            common = min(len(expected), len(found))
            expected, found = expected[len(expected) - common :], found[len(found) - common :]
        difference = _first(expected, found.to(expected.device), tolerance)
        if difference is not None:
            at, values, count = difference
            return Difference(stage, operation, at, *values, layer=layer, num_wrong=count)
    return None


def not_finite(seen: Observation) -> Difference | None:
    """The first NaN or infinity in stage order (the log-probability of an impossible candidate is -inf)."""
    for key in seen.ordered():
        value = seen.values[key]
        if value.is_floating_point() and key[0] != "build":
            wrong = (~torch.isfinite(value)).nonzero()
            if len(wrong):
                at = tuple(wrong[0].tolist())
                return Difference(
                    *key[:2], at, "a finite number", value[at].item(), layer=key[2], num_wrong=len(wrong)
                )  # fmt: skip
    return None


def _first(want: Tensor, got: Tensor, tolerance: float) -> tuple[tuple[int, ...], tuple[Any, Any], int] | None:
    """(coordinate, (expected, got), how many differ); sizes are compared first."""
    if want.shape != got.shape:
        return (), (f"size {list(want.shape)}", f"size {list(got.shape)}"), 1
    if not want.numel():
        return None
    if want.is_floating_point():
        want, got = want.float(), got.float()
        bound = tolerance * float(want.nan_to_num(0, 0, 0).abs().max())
        same = ((want - got).abs() <= bound) | (want == got) | (want.isnan() & got.isnan())
    else:
        same = want == got
    wrong = (~same).nonzero()
    if not len(wrong):
        return None
    at = tuple(wrong[0].tolist())
    return at, (want[at].item(), got[at].item()), len(wrong)


class Heard:
    """An `Attend` that is listened to: each layer's fused product, and what attention made of it."""

    def __init__(self, attend: Attend, stage: str, seen: Observation) -> None:
        self._attend, self._stage, self._seen = attend, stage, seen

    def begin(self, rotary: Rotary, position_T: Tensor, dtype: torch.dtype) -> None:
        self._seen.add(self._stage, "position", position_T)
        self._attend.begin(rotary, position_T, dtype)

    def __call__(self, layer: int, qkv_TX: Tensor, heads: Heads) -> Tensor:
        self._seen.add(self._stage, "qkv product", qkv_TX, layer)  # before it is rotated in place
        out = self._attend(layer, qkv_TX, heads)
        self._seen.add(self._stage, "attention", out, layer)
        return out


@contextmanager
def listening(runner: Runner, seen: Observation) -> Iterator[None]:
    """Records whatever stage functions run meanwhile. A captured graph runs none."""
    round_, passes = runner.round, runner.round.passes
    with ExitStack() as stack:
        for name, stage in (("verify", "verify"), ("block", "draft")):
            stack.enter_context(patch.object(passes, name, _heard_pass(getattr(passes, name), stage, seen)))
        for name, listen in (("rank_candidates", _heard_rank), ("accept_rows", _heard_accept)):
            stack.enter_context(patch.object(round_module, name, listen(getattr(round_module, name), seen)))
        stack.enter_context(_hooked(round_.target, "verify", seen))
        if round_.drafter is not None:
            stack.enter_context(_hooked(round_.drafter, "draft", seen))
        yield


def _heard_pass(healthy: Callable[..., Any], stage: str, seen: Observation) -> Callable[..., Any]:
    def heard(*args: Any) -> Any:
        made = healthy(*args)
        if stage == "verify":
            seen.add("mask", "position", made.position_T)
            seen.add("mask", "slot", made.slot_T)
        return replace(made, attend=Heard(made.attend, stage, seen))

    return heard


def _heard_rank(healthy: Callable[..., Any], seen: Observation) -> Callable[..., Any]:
    def heard(logits_NV: Tensor, k: int) -> Any:
        seen.add("draft", "logits", logits_NV)
        token_NK, logprob_NK = healthy(logits_NV, k)
        seen.add("build", "candidate token", token_NK)
        seen.add("build", "candidate log-probability", logprob_NK)
        return token_NK, logprob_NK

    return heard


def _heard_accept(healthy: Callable[..., Any], seen: Observation) -> Callable[..., Any]:
    def heard(places: Any, draw: Any, *args: Any) -> Any:
        seen.add("accept", "draw", draw.token_T)
        return healthy(places, draw, *args)

    return heard


@contextmanager
def _hooked(network: nn.Module, stage: str, seen: Observation) -> Iterator[None]:
    def before(_: object, args: tuple[Any, ...]) -> None:
        seen.add(stage, "input", args[0])

    def after(_: object, args: object, output: Any) -> None:
        hidden, taps = output if isinstance(output, tuple) else (output, None)
        seen.add(stage, "hidden", hidden)
        if taps is not None:
            seen.add(stage, "taps", taps)

    hooks = (network.register_forward_pre_hook(before), network.register_forward_hook(after))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
