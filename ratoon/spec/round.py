# Owns: the round: draft and build | verify | accept and commit, cut at the two points where a graph may be cut.
# Promises: AR, chain and tree are this one function; only commit moves a row; no host read unless the shape is live.
# Never: allocates state, picks sizes, or knows a request.
"""One round over packed places (METHOD sections 1 to 3).

R: rows, T: places, B: block, L: drafted depths, M: nodes, D: L + 1 path places, H: hidden, X: taps * H, S: seats.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from ratoon.models.decoder import Decoder
from ratoon.models.dflash import DFlash
from ratoon.ops.accept import AcceptedRows, Ring, accept_rows, finite_rows
from ratoon.ops.attention import move
from ratoon.ops.sample import Draw, count_tokens, greedy_places, sample_places
from ratoon.ops.simulate import force
from ratoon.ops.tree import (
    Places,
    TreeBatch,
    build_trees,
    forecast_mass,
    frontier,
    history,
    no_trees,
    pack,
    rank_candidates,
    share_places,
)
from ratoon.spec.passes import Passes
from ratoon.spec.simulate import Simulation
from ratoon.spec.state import Limits, RoundShape, SeatState


@dataclass(frozen=True)
class Drafted:
    """What draft and build hand to verify: the places, and the probability mass of each row's tree, float32 [R, Q],
    at the sizes of `Limits.forecast`: expected accepted nodes, for the budget's forecast.

    truth_RL int64 [R + 1, L + 1]: the tokens that are true under simulated acceptance (spec/simulate.py)."""

    places: Places
    mass_RQ: Tensor
    truth_RL: Tensor | None = None


@dataclass(frozen=True)
class Verified:
    """Hidden after the final norm [T, H], and the taps [T, X] (None without a drafter)."""

    hidden_TH: Tensor
    taps_TX: Tensor | None


class Round:
    """Stage functions over one engine's networks, state and caches.

    cache [layers, S, 2, K, D] is the target's, draft_cache the drafter's context in the same slots (None without).
    """

    def __init__(
        self,
        target: Decoder,
        drafter: DFlash | None,
        state: SeatState,
        cache: Tensor,
        draft_cache: Tensor | None,
        limits: Limits,
        simulation: Simulation | None = None,
    ) -> None:
        self.target, self.drafter, self.state, self.limits = target, drafter, state, limits
        self.cache, self.draft_cache, self.simulation = cache, draft_cache, simulation
        self.tap_ids = drafter.config.target_layer_ids if drafter else ()
        group = target.config.num_heads // target.config.num_kv_heads
        self.passes = Passes(state, limits, group, drafter.config if drafter else None)

    # ---- prefill ----------------------------------------------------------------------------------------------

    def prefill(self, seat_R: Tensor, ids_RN: Tensor, base_R: Tensor, context: int) -> None:
        """Target K/V and draft context K/V of N prompt tokens per row from position base_R on (METHOD section 1).

        Rows shorter than N are padded by the caller and write past their end: scratch that a round overwrites.
        context: slots to read, at least base + N.
        """
        chunk = self.passes.chunk(self.cache, seat_R, base_R, ids_RN.shape[1], context)
        _, taps_TX = self.target(ids_RN.flatten(), chunk.position_T, chunk.attend, self.tap_ids)
        if taps_TX is not None:
            self._store_context(taps_TX, chunk.position_T, chunk.slot_T)

    # ---- draft and build --------------------------------------------------------------------------------------

    def draft_build(self, seat_R: Tensor, shape: RoundShape, out: Places | None = None) -> Drafted:
        """Draft trees of all rows, packed into the shape's places (into the tensors of `out` where given)."""
        anchor_R, truth_RL = self.state.anchor_S[seat_R], None
        if shape.block and shape.nodes:
            trees, truth_RL = self._draft(seat_R, anchor_R, shape)
        else:
            trees = no_trees(shape.rows, 0, anchor_R.device)
        count_R = share_places(trees.score, trees.depth, trees.num_nodes, shape.places)
        places = int(count_R.sum()) + shape.rows if shape.live else shape.places
        packed = pack(trees, count_R, anchor_R, places, out)
        return Drafted(packed, forecast_mass(trees, self.limits.forecast), truth_RL)

    def _draft(self, seat_R: Tensor, anchor_R: Tensor, shape: RoundShape) -> tuple[TreeBatch, Tensor | None]:
        assert self.drafter is not None and self.draft_cache is not None
        state = self.state
        block = self.passes.block(self.draft_cache, seat_R, shape)
        x_TH = self.drafter.block_embeddings(self.target.embed.weight, anchor_R, shape.block)
        hidden = self.drafter(x_TH, block.position_T, block.attend).view(shape.rows, shape.block, -1)
        hidden = hidden[:, self.drafter.config.first_prediction :]
        logits = self.drafter.logits(hidden.flatten(0, 1), self.target.logits)
        token_NK, logprob_NK = rank_candidates(logits, min(self.limits.max_ranks, shape.nodes))
        as_rows = (shape.rows, hidden.shape[1], -1)
        token_RLK, logprob_RLK, truth_RL = token_NK.view(as_rows), logprob_NK.view(as_rows), None
        if self.simulation:
            truth_RL = self.simulation.truth(seat_R, state.start_S, state.sampler.seed_S, token_RLK)
            logprob_RLK = self.simulation.logprobs(logprob_RLK)
        budget_R = torch.where(state.done_S[seat_R], 0, state.budget_S[seat_R].clamp(max=shape.nodes))
        return build_trees(logprob_RLK, token_RLK, budget_R, state.topk_cap_S[seat_R], shape.nodes), truth_RL

    # ---- verify -----------------------------------------------------------------------------------------------

    def verify(self, seat_R: Tensor, places: Places, shape: RoundShape) -> Verified:
        """One target pass over all places; their K/V go to scratch slots from the rows' start on."""
        seen = self.passes.verify(self.cache, seat_R, places, shape)
        return Verified(*self.target(places.token, seen.position_T, seen.attend, self.tap_ids))

    # ---- accept and commit ------------------------------------------------------------------------------------

    def accept_commit(
        self, seat_R: Tensor, drafted: Drafted, verified: Verified, shape: RoundShape, ring: Ring | None = None
    ) -> AcceptedRows:
        """Draws at every place, walks the trees, cuts at stop and limit, moves K/V, taps and rows."""
        places = drafted.places
        depth_limit = min(shape.nodes, self.depths(shape.block))
        draw = self._draw(seat_R, places, verified.hidden_TH, depth_limit, shape)
        if drafted.truth_RL is not None:
            draw = replace(draw, token_T=force(draw.token_T, places, drafted.truth_RL))
        finite_T, page_size = finite_rows(verified.hidden_TH), self.limits.page_size
        rows = accept_rows(
            places, draw, finite_T, drafted.mass_RQ, self.state, seat_R, depth_limit, page_size, ring
        )  # fmt: skip
        self._commit_cache(rows, verified.taps_TX, shape)
        count_tokens(self.state.sampler, seat_R, rows.tokens_RD)
        return rows

    def _draw(self, seat_R: Tensor, places: Places, hidden_TH: Tensor, depth_limit: int, shape: RoundShape) -> Draw:
        rounds_off = hidden_TH.dtype != torch.float32 and not hidden_TH.is_cuda
        logits, rescore = self.target.logits, self.target.rescore if rounds_off else None
        if shape.sampler == "argmax":
            return greedy_places(hidden_TH, logits, self.limits.sample_group, rescore)
        row_T = places.row_of.clamp(max=shape.rows - 1)
        seat_T = torch.where(places.row_of < shape.rows, seat_R[row_T], 0)
        position_T = self.state.start_S[seat_T] + places.depth + 1
        return sample_places(
            hidden_TH,
            logits,
            self.state.sampler,
            seat_T,
            position_T,
            history(places, depth_limit),
            shape.sampler,  # pyright: ignore[reportArgumentType]
            self.limits.sample_group,
            rescore=rescore,
            # Distances to filter edges serve to judge near-ties against plain decoding, so only that pays for them.
            edges=shape.nodes == 0 and self.limits.edges,
        )

    def _commit_cache(self, rows: AcceptedRows, taps_TX: Tensor | None, shape: RoundShape) -> None:
        """K/V and taps of the emitted path, to the row's slots from start on, in target and draft cache."""
        if not shape.nodes and taps_TX is None:
            return  # the root is where it belongs already
        width = rows.path_RD.shape[1]
        if shape.live:
            width = max(int(rows.emitted_R.max()), 1)
        source_RD, target_RD = rows.source_RD[:, :width], rows.target_RD[:, :width]
        if shape.nodes and not (shape.live and torch.equal(source_RD, target_RD)):
            move(self.cache, source_RD, target_RD)
        if taps_TX is not None:
            path_N = rows.path_RD[:, :width].flatten()
            self._store_context(taps_TX[path_N], rows.position_RD[:, :width].flatten(), target_RD.flatten())

    def _store_context(self, taps_NX: Tensor, position_N: Tensor, slot_N: Tensor) -> None:
        assert self.drafter is not None and self.draft_cache is not None
        self.drafter.store_context(taps_NX, position_N, slot_N, self.draft_cache)

    # ---- sizes ------------------------------------------------------------------------------------------------

    def constants(self, shape: RoundShape) -> dict[str, Tensor]:
        """Index tables that a round of this shape reads; made here, so that no capture makes them."""
        named = self.simulation.constants() if self.simulation else {}
        depths = self.depths(shape.block)
        ranks = min(self.limits.max_ranks, shape.nodes, self.target.config.vocab_size)
        if not min(depths, shape.nodes):
            return named
        tables = frontier(shape.nodes, depths, ranks, self.state.start_S.device)
        for field in fields(tables):
            value = getattr(tables, field.name)
            if isinstance(value, Tensor):
                named[f"frontier.{shape.nodes}x{depths}x{ranks}.{field.name}"] = value
        return named

    def depths(self, block: int) -> int:
        """Deepest node that a block of this length can draft."""
        if not block or self.drafter is None:
            return 0
        return block if self.drafter.config.anchor_first else block - 1
