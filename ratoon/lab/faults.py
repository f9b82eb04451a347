# Owns: the failures known from this field, each as a change of the real engine that can be planted and taken out.
# Promises: an entry says where it hurts and who must name it; nothing of it stays after its context.
# Never: touches a check, a reference or an oracle: what judges is left alone.
"""Planted faults. T: places, R: rows, D: path places."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal
from unittest.mock import patch

import torch
from torch import Tensor, nn

from ratoon.models.dflash import DFlash
from ratoon.ops import accept as accept_module
from ratoon.runtime import runner as runner_module
from ratoon.runtime.pages import PagePool
from ratoon.runtime.runner import Runner
from ratoon.spec import passes as passes_module
from ratoon.spec import round as round_module
from ratoon.spec.passes import Passes
from ratoon.spec.round import Round

Namer = Literal["contract", "doctor", "bisect"]
Plant = Callable[[], AbstractContextManager[None]]


@dataclass(frozen=True)
class Fault:
    """field: its line in the catalogue of the field's failures (letter: graphs, drafter wiring, tree, sampling).

    named_by: who must name it, and `culprit` what must be in the name: a buffer or clause of the contract, a check of
    the doctor, the stage and operation of bisect.
    """

    name: str
    field: str
    named_by: Namer
    culprit: tuple[str, ...]
    plant: Plant


FAULTS: dict[str, Fault] = {}


def planted(name: str | None) -> AbstractContextManager[None]:
    """The engine with a fault of FAULTS (None: as it is). Engines made inside have it. ValueError for another name."""
    if name is None:
        return nullcontext()
    if name not in FAULTS:
        raise ValueError(f"no fault '{name}' can be planted: use one of {', '.join(FAULTS)}")
    return FAULTS[name].plant()


def _fault(field: str, named_by: Namer, *culprit: str) -> Callable[[Callable[[], Iterator[None]]], Plant]:
    """Registers a generator function under its name, words apart."""

    def register(function: Callable[[], Iterator[None]]) -> Plant:
        name, plant = function.__name__.replace("_", " "), contextmanager(function)
        FAULTS[name] = Fault(name, field, named_by, culprit, plant)
        return plant

    return register


@contextmanager
def _around(owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """owner.name replaced by make(owner.name)."""
    with patch.object(owner, name, make(getattr(owner, name))):
        yield


def _at_launch(number: int, change: Callable[[Runner], None]) -> AbstractContextManager[None]:
    """Something happens to a runner right before its launch of this number."""

    def make(healthy: Callable[..., Any]) -> Callable[..., Any]:
        def launch(runner: Runner, *args: Any) -> Any:
            if runner.num_launched == number:
                change(runner)
            return healthy(runner, *args)

        return launch

    return _around(Runner, "launch", make)


def _in_new_rounds(change: Callable[[Round], None]) -> AbstractContextManager[None]:
    """Something is wired wrongly in every round that is made."""

    def make(healthy: Callable[..., None]) -> Callable[..., None]:
        def init(round_: Round, *args: Any) -> None:
            healthy(round_, *args)
            if round_.drafter is not None:
                change(round_)

        return init

    return _around(Round, "__init__", make)


# ---- A: graphs ------------------------------------------------------------------------------------------------


@_fault("A1", "contract", "'round.seat'", "None")
def none_field() -> Iterator[None]:
    """The seats of a round are handed over as None."""

    def fill(runner: Runner, seats: Any, shape: Any) -> None:
        assert runner.graphs is not None, "only graphs have fields"
        runner.graphs.fill(runner.key_of(shape), {"round.seat": None})

    with patch.object(Runner, "fill", fill):
        yield


@_fault("A2", "contract", "'places.bits'", "sized for a smaller key")
def mask_of_budget_8() -> Iterator[None]:
    """Ancestor bits are allocated for budget 8, whatever the key needs."""

    def make(healthy: Callable[..., Any]) -> Callable[..., Any]:
        def declare(*args: Any) -> Any:
            table = healthy(*args)
            table.reallocate("places.bits", (9, table["places.bits"].shape[1]))
            return table

        return declare

    with _around(runner_module, "declare", make):
        yield


@_fault("A3", "contract", "round.seat", "stale rows")
def stale_rows() -> Iterator[None]:
    """After the first round the list of seats is not written any more."""

    def make(healthy: Callable[..., None]) -> Callable[..., None]:
        return lambda runner, *args: None if runner.num_launched else healthy(runner, *args)

    with _around(Runner, "fill", make):
        yield


@_fault("A4", "contract", "'target.norm.weight'")
def moved_buffer() -> Iterator[None]:
    """A weight is replaced after capture instead of being copied into."""

    def move(runner: Runner) -> None:
        norm = runner.round.target.norm
        norm.weight = nn.Parameter(norm.weight.clone(), requires_grad=False)

    with _at_launch(1, move):
        yield


@_fault("A5", "contract", "birth test", "frozen at capture")
def baked_length() -> Iterator[None]:
    """How far attention reads is a number that the host keeps of its longest row."""
    longest = [4]

    def make_join(healthy: Callable[..., None]) -> Callable[..., None]:
        def join(runner: Runner, seat: int, prompt: Any, pages: Any, params: Any, stop: Any, seed: int, limit: int,
                 *rest: Any, **named: Any) -> None:  # fmt: skip
            longest[0] = max(longest[0], limit + runner.limits.scratch)
            healthy(runner, seat, prompt, pages, params, stop, seed, limit, *rest, **named)

        return join

    def make_mask(healthy: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def tree_mask(layout: Any, bits: Tensor, base_R: Tensor, context: int) -> Tensor:
            return healthy(layout, bits, base_R, context) & (torch.arange(context, device=bits.device) < longest[0])

        return tree_mask

    with _around(Runner, "join", make_join), _around(passes_module, "tree_mask", make_mask):
        yield


@_fault("A9", "bisect", "seat", "pages that are 0")
def allocatable_page_0() -> Iterator[None]:
    """The pool hands out the dummy's page."""

    def make(healthy: Callable[..., None]) -> Callable[..., None]:
        def init(pool: PagePool, num_pages: int) -> None:
            healthy(pool, num_pages)
            pool._free.insert(0, 0)

        return init

    with _around(PagePool, "__init__", make):
        yield


@_fault("A2", "contract", "reallocated", "'verify.hidden'")
def grown_scratch() -> Iterator[None]:
    """A hand-over buffer grows after capture."""

    def grow(runner: Runner) -> None:
        rows, width = runner.table["verify.hidden"].shape
        runner.table.reallocate("verify.hidden", (2 * rows, width))

    with _at_launch(1, grow):
        yield


@_fault("A7", "bisect", "commit", "SIGSEGV")
def illegal_access() -> Iterator[None]:
    """The kernel that moves committed K/V dies."""

    def move(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGSEGV)

    with patch.object(round_module, "move", move):
        yield


@_fault("A10", "bisect", "draft", "no end within")
def hanging_build() -> Iterator[None]:
    """The tree is never finished."""

    def build_trees(*_: Any) -> None:
        while True:
            time.sleep(1)

    with patch.object(round_module, "build_trees", build_trees):
        yield


# ---- B: drafter wiring ----------------------------------------------------------------------------------------


@_fault("B", "doctor", "taps")
def tap_off_by_one() -> Iterator[None]:
    """The first tap comes from a neighbouring layer (never from the last, which is refused)."""

    def shift(round_: Round) -> None:
        last = round_.target.config.num_layers - 2
        first, *rest = list(round_.tap_ids)
        round_.tap_ids = (first + 1 if first < last else first - 1, *rest)

    with _in_new_rounds(shift):
        yield


@_fault("B", "doctor", "masks")
def sliding_run_as_full() -> Iterator[None]:
    """Windows of the draft layers are ignored (or, where there are none, made)."""

    def widen(round_: Round) -> None:
        config = round_.passes.drafter
        assert config is not None
        windows = tuple(None if window else 3 for window in config.windows)
        round_.passes.drafter = replace(config, windows=windows)

    with _in_new_rounds(widen):
        yield


@_fault("B", "doctor", "masks")
def wrong_causality() -> Iterator[None]:
    """Bidirectional draft layers run causal, and the reverse."""

    def turn(round_: Round) -> None:
        config = round_.passes.drafter
        assert config is not None
        round_.passes.drafter = replace(config, causal=tuple(not flag for flag in config.causal))

    with _in_new_rounds(turn):
        yield


def _input_rows(spoil: Callable[[Tensor], None]) -> AbstractContextManager[None]:
    """The draft block [R, B, H] is changed before the drafter sees it."""

    def make(healthy: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def block_embeddings(drafter: DFlash, weight: Tensor, anchor_R: Tensor, block_size: int) -> Tensor:
            x_TH = healthy(drafter, weight, anchor_R, block_size).clone()
            spoil(x_TH.view(-1, block_size, x_TH.shape[1]))
            return x_TH

        return block_embeddings

    return _around(DFlash, "block_embeddings", make)


@_fault("B", "doctor", "anchor")
def missing_anchor() -> Iterator[None]:
    """Slot 0 of the block is a mask like the others."""

    def spoil(x_RBH: Tensor) -> None:
        x_RBH[:, 0] = x_RBH[:, 1]

    with _input_rows(spoil):
        yield


@_fault("B", "doctor", "mask row")
def zero_mask_row() -> Iterator[None]:
    """The mask's embedding is zero."""

    def spoil(x_RBH: Tensor) -> None:
        x_RBH[:, 1:] = 0

    with _input_rows(spoil):
        yield


@_fault("B", "doctor", "rope")
def wrong_rope_amplitude() -> Iterator[None]:
    """The amplitude of the draft rotary is lost (or, where it is 1, made up)."""

    def lose(round_: Round) -> None:
        assert round_.drafter is not None
        rotary = round_.drafter.rotary
        rotary.rope = replace(rotary.rope, amplitude=1.0 if rotary.rope.amplitude != 1.0 else 1.25)

    with _in_new_rounds(lose):
        yield


@_fault("B", "doctor", "pair")
def wrong_pair() -> Iterator[None]:
    """A drafter that was made for a deeper target."""

    def swap(round_: Round) -> None:
        drafter: Any = round_.drafter
        drafter.config = replace(drafter.config, num_target_layers=round_.target.config.num_layers + 1)

    with _in_new_rounds(swap):
        yield


# ---- C: tree --------------------------------------------------------------------------------------------------


@_fault("C", "bisect", "commit", "keys and values of cache")
def scattered_accept_as_prefix() -> Iterator[None]:
    """Commit takes the first places of the tree for the accepted ones."""

    def make(healthy: Callable[..., Any]) -> Callable[..., Any]:
        def _move_slots(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
            _, target_RD, position_RD = healthy(*args)
            return target_RD, target_RD, position_RD

        return _move_slots

    with _around(accept_module, "_move_slots", make):
        yield


@_fault("C", "bisect", "build", "token")
def token_0_as_padding() -> Iterator[None]:
    """A candidate with token id 0 counts as no candidate."""

    def make(healthy: Callable[..., Any]) -> Callable[..., Any]:
        def build_trees(logprob_RLK: Tensor, token_RLK: Tensor, *args: Any) -> Any:
            return healthy(logprob_RLK.masked_fill(token_RLK == 0, -torch.inf), token_RLK, *args)

        return build_trees

    with _around(round_module, "build_trees", make):
        yield


@_fault("C", "bisect", "mask", "position")
def sibling_rope() -> Iterator[None]:
    """Every node is rotated to a position of its own, siblings too."""

    def make(healthy: Callable[..., Any]) -> Callable[..., Any]:
        def verify(passes: Passes, cache: Tensor, seat_R: Tensor, places: Any, shape: Any) -> Any:
            made = healthy(passes, cache, seat_R, places, shape)
            own_T = torch.where(places.row_of < shape.rows, places.local - places.depth, 0)
            return replace(made, position_T=made.position_T + own_T)

        return verify

    with _around(Passes, "verify", make):
        yield


# ---- D: sampling ----------------------------------------------------------------------------------------------


@_fault("D", "bisect", "accept", "draw")
def biased_sampling() -> Iterator[None]:
    """A drafted child is accepted with min(1, p/q), q = 1, and otherwise the draw stands: its mass counts twice."""

    def make(healthy: Callable[..., Any]) -> Callable[..., Any]:
        def _draw(round_: Round, seat_R: Tensor, places: Any, hidden_TH: Tensor, limit: int, shape: Any) -> Any:
            drawn = healthy(round_, seat_R, places, hidden_TH, limit, shape)
            if shape.sampler == "argmax":
                return drawn
            probability_TV = round_.target.logits(hidden_TH).softmax(-1)
            child_T = torch.arange(len(places.parent), device=places.parent.device)
            p_T = probability_TV[places.parent].gather(1, places.token.unsqueeze(1)).squeeze(1)
            start_T = round_.state.start_S[seat_R][places.row_of.clamp(max=shape.rows - 1)]
            coin_T = (torch.sin((start_T + child_T).float() * 12.9898) * 43758.5453).frac().abs()
            taken_T = (places.depth > 0) & (coin_T < p_T)
            parent_T = torch.where(taken_T, places.parent, len(child_T))
            token_T = torch.cat((drawn.token_T, drawn.token_T[:1])).index_copy(0, parent_T, places.token)
            return replace(drawn, token_T=token_T[:-1])

        return _draw

    with _around(Round, "_draw", make):
        yield
