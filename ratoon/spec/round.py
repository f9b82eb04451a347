# Owns: the round: draft and build | verify | accept and commit, cut at the two points where a graph may be cut.
# Promises: AR, chain and tree are this one function; only commit moves a row; no host read unless the shape is live.
# Never: allocates state, picks sizes, or knows a request.
"""One round over packed places (METHOD sections 1 to 3).

R: rows, T: places, B: block, L: drafted depths, M: nodes, D: L + 1 path places, H: hidden, X: taps * H, S: seats.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from ratoon.models.decoder import Decoder
from ratoon.models.dflash import DFlash, visible
from ratoon.ops.attention import Layout, additive, block_layout, move, packed_layout, slots, tree_mask
from ratoon.ops.sample import Draw, count_tokens, sample_places
from ratoon.ops.tree import (
    Places,
    TreeBatch,
    build_trees,
    frontier,
    no_trees,
    pack,
    rank_candidates,
    share_places,
    walk,
)
from ratoon.spec.paged import PagedAttend
from ratoon.spec.state import Limits, RoundShape, SeatState


@dataclass(frozen=True)
class Drafted:
    """What draft and build hand to verify: the places, and the probability mass of each row's tree, float32 [R, Q],
    at the sizes of `Limits.forecast`: expected accepted nodes, for the budget's forecast."""

    places: Places
    mass_RQ: Tensor


@dataclass(frozen=True)
class Verified:
    """Hidden after the final norm [T, H], and the taps [T, X] (None without a drafter)."""

    hidden_TH: Tensor
    taps_TX: Tensor | None


@dataclass(frozen=True)
class RoundResult:
    """Per row. emitted, accepted int64 [R]; tokens, runner_up, edge_token int64 [R, D] (-1 past the emitted ones);
    gap, top_logit, edge_gap float32 [R, D]; done, bad bool [R]: `bad` says that the target gave a NaN."""

    emitted_R: Tensor
    accepted_R: Tensor
    done_R: Tensor
    bad_R: Tensor
    tokens_RD: Tensor
    runner_up_RD: Tensor
    edge_token_RD: Tensor
    gap_RD: Tensor
    top_logit_RD: Tensor
    edge_gap_RD: Tensor


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
    ) -> None:
        self.target, self.drafter, self.state, self.limits = target, drafter, state, limits
        self.cache, self.draft_cache = cache, draft_cache
        self.tap_ids = drafter.config.target_layer_ids if drafter else ()

    # ---- prefill ----------------------------------------------------------------------------------------------

    def prefill(self, seat_R: Tensor, ids_RN: Tensor, base_R: Tensor, context: int) -> None:
        """Target K/V and draft context K/V of N prompt tokens per row from position base_R on (METHOD section 1).

        Rows shorter than N are padded by the caller and write past their end: scratch that a round overwrites.
        context: slots to read, at least base + N.
        """
        width = ids_RN.shape[1]
        position_RN = base_R[:, None] + torch.arange(width, device=ids_RN.device)
        layout = block_layout(base_R, self._pages(seat_R, context), self.limits.page_size, width)
        seen_RNC = torch.arange(context, device=ids_RN.device) <= position_RN[:, :, None]
        attend = self._attend(self.cache, layout, seen_RNC, self.target.config.num_heads)
        _, taps_TX = self.target(ids_RN.flatten(), position_RN.flatten(), attend, self.tap_ids)
        if self.drafter is not None:
            assert taps_TX is not None
            self._store_context(taps_TX, position_RN.flatten(), layout.slot_T)

    # ---- draft and build --------------------------------------------------------------------------------------

    def draft_build(self, seat_R: Tensor, shape: RoundShape) -> Drafted:
        """Draft trees of all rows, packed into the shape's places."""
        state = self.state
        anchor_R = state.anchor_S[seat_R]
        if shape.block and shape.nodes:
            trees = self._draft(seat_R, anchor_R, shape)
        else:
            trees = no_trees(shape.rows, 0, anchor_R.device)
        count_R = share_places(trees.score, trees.depth, trees.num_nodes, shape.places)
        places = int(count_R.sum()) + shape.rows if shape.live else shape.places
        return Drafted(pack(trees, count_R, anchor_R, places), forecast_mass(trees, self.limits.forecast))

    def _draft(self, seat_R: Tensor, anchor_R: Tensor, shape: RoundShape) -> TreeBatch:
        assert self.drafter is not None and self.draft_cache is not None
        config, block = self.drafter.config, shape.block
        start_R = self.state.start_S[seat_R]
        context = self._context(start_R, block, shape.live)
        layout = self._block_layout(seat_R, start_R, context, block, shape)
        position_RB = start_R[:, None] + torch.arange(block, device=start_R.device)
        attend = PagedAttend(self.draft_cache, layout, self._block_bias(position_RB, context), self.limits.page_size)
        x_TH = self.drafter.block_embeddings(self.target.embed.weight, anchor_R, block)
        hidden = self.drafter(x_TH, position_RB.flatten(), attend).view(shape.rows, block, -1)
        if not config.anchor_first:
            hidden = hidden[:, 1:]
        logits = self.drafter.logits(hidden.flatten(0, 1), self.target.logits)
        token_NK, logprob_NK = rank_candidates(logits, min(self.limits.max_ranks, shape.nodes))
        as_rows = (shape.rows, hidden.shape[1], -1)
        budget_R = torch.where(self.state.done_S[seat_R], 0, self.state.budget_S[seat_R].clamp(max=shape.nodes))
        cap_R = self.state.topk_cap_S[seat_R]
        return build_trees(logprob_NK.view(as_rows), token_NK.view(as_rows), budget_R, cap_R, shape.nodes)

    def _block_bias(self, position_RB: Tensor, context: int) -> list[Tensor]:
        """Additive masks of the draft layers; layers of one kind share theirs."""
        assert self.drafter is not None
        config = self.drafter.config
        key_C = torch.arange(context, device=position_RB.device)
        inside_R1C = (key_C <= position_RB[:, -1:]).unsqueeze(1)
        group, dtype = config.num_heads // config.num_kv_heads, self.target.embed.weight.dtype
        kinds = list(zip(config.windows, config.causal, strict=True))
        bias = {
            kind: additive(visible(position_RB.unsqueeze(2), key_C, *kind) & inside_R1C, group, dtype)
            for kind in dict.fromkeys(kinds)
        }
        return [bias[kind] for kind in kinds]

    # ---- verify -----------------------------------------------------------------------------------------------

    def verify(self, seat_R: Tensor, places: Places, shape: RoundShape) -> Verified:
        """One target pass over all places; their K/V go to scratch slots from the rows' start on."""
        start_R = self.state.start_S[seat_R]
        width = min(shape.nodes, places.token.shape[0] - shape.rows) + 1
        context = self._context(start_R, width, shape.live)
        layout = self._verify_layout(seat_R, places, start_R, context, width, shape)
        seen_RNC = tree_mask(layout, places.bits, start_R, context)
        attend = self._attend(self.cache, layout, seen_RNC, self.target.config.num_heads)
        row_T = places.row_of.clamp(max=shape.rows - 1)
        base_T = torch.where(places.row_of < shape.rows, start_R[row_T], 0)
        hidden_TH, taps_TX = self.target(places.token, base_T + places.depth, attend, self.tap_ids)
        return Verified(hidden_TH, taps_TX)

    def _verify_layout(
        self, seat_R: Tensor, places: Places, start_R: Tensor, context: int, width: int, shape: RoundShape
    ) -> Layout:
        if places.token.shape[0] == shape.rows * width and (width == 1 or (shape.live and shape.rows == 1)):
            return self._block_layout(seat_R, start_R, context, width, shape)
        page_RP, page_size = self._pages(seat_R, context), self.limits.page_size
        return packed_layout(places.row_start, places.row_of, places.local, start_R, page_RP, page_size, width)

    def _block_layout(self, seat_R: Tensor, start_R: Tensor, context: int, width: int, shape: RoundShape) -> Layout:
        exact = shape.live and shape.rows == 1
        page_RP, first_slot = self._pages(seat_R, context), None
        if exact:
            pages = page_RP[0].tolist()
            if pages == list(range(pages[0], pages[0] + len(pages))):
                first_slot = pages[0] * self.limits.page_size
        return block_layout(start_R, page_RP, self.limits.page_size, width, exact, first_slot)

    # ---- accept and commit ------------------------------------------------------------------------------------

    def accept_commit(self, seat_R: Tensor, drafted: Places, verified: Verified, shape: RoundShape) -> RoundResult:
        """Draws at every place, walks the trees, cuts at stop and limit, moves K/V, taps and rows."""
        depth_limit = min(shape.nodes, self._depths(shape.block))
        choice = self._choose(seat_R, drafted, verified.hidden_TH, depth_limit, shape)
        accepted_R, path_RD, _ = walk(drafted, choice.token_T, depth_limit)
        # An accepted node's token is what its parent drew, so the draws along the path are the emitted tokens.
        token_RD = choice.token_T[path_RD]
        emitted_R, done_R = self._cut(seat_R, token_RD, accepted_R)
        self._commit_cache(seat_R, drafted, verified.taps_TX, path_RD, emitted_R, shape)
        result = self._result(choice, drafted, verified, token_RD, path_RD, emitted_R, accepted_R, done_R)
        self._commit_rows(seat_R, result)
        return result

    def _choose(self, seat_R: Tensor, places: Places, hidden_TH: Tensor, depth_limit: int, shape: RoundShape) -> Draw:
        row_T = places.row_of.clamp(max=shape.rows - 1)
        seat_T = torch.where(places.row_of < shape.rows, seat_R[row_T], 0)
        position_T = self.state.start_S[seat_T] + places.depth + 1
        rounds_off = hidden_TH.dtype != torch.float32 and not hidden_TH.is_cuda
        return sample_places(
            hidden_TH,
            self.target.logits,
            self.state.sampler,
            seat_T,
            position_T,
            _history(places, depth_limit),
            shape.sampler,  # pyright: ignore[reportArgumentType]
            self.limits.sample_group,
            rescore=self.target.rescore if rounds_off else None,
            # Distances to filter edges serve to judge near-ties against plain decoding, so only that pays for them.
            edges=shape.nodes == 0,
        )

    def _cut(self, seat_R: Tensor, token_RD: Tensor, accepted_R: Tensor) -> tuple[Tensor, Tensor]:
        """(emitted, done): a stop token is the last one emitted, nothing goes past the limit, a done row emits none."""
        state = self.state
        width = token_RD.shape[1]
        step_D = torch.arange(width, device=token_RD.device)
        stops_RD = (token_RD[:, :, None] == state.stop_id_SE[seat_R][:, None, :]).any(-1)
        first_stop_R = torch.where(stops_RD, step_D, width).amin(1)
        room_R = state.limit_S[seat_R] - 1 - state.start_S[seat_R]
        emitted_R = torch.minimum(torch.minimum(first_stop_R, accepted_R) + 1, room_R).clamp(min=0)
        emitted_R = torch.where(state.done_S[seat_R], 0, emitted_R)
        done_R = state.done_S[seat_R] | (first_stop_R < emitted_R) | (emitted_R >= room_R)
        return emitted_R, done_R

    def _commit_cache(
        self,
        seat_R: Tensor,
        places: Places,
        taps_TX: Tensor | None,
        path_RD: Tensor,
        emitted_R: Tensor,
        shape: RoundShape,
    ) -> None:
        """The first `emitted` path places become the row's slots start .., in target and draft cache."""
        if not shape.nodes and taps_TX is None:
            return  # the root is where it belongs already
        width = path_RD.shape[1]
        if shape.live:
            width = max(int(emitted_R.max()), 1)
        path_RD = path_RD[:, :width]
        start_R1 = self.state.start_S[seat_R].unsqueeze(1)
        step_D = torch.arange(width, device=path_RD.device)
        page_RP, page_size = self.state.page_table_SP[seat_R], self.limits.page_size
        row_N = torch.arange(shape.rows, device=path_RD.device).repeat_interleave(width)
        kept_N = (step_D < emitted_R[:, None]).flatten()
        position_N = (start_R1 + step_D).flatten()
        target_N = torch.where(kept_N, slots(page_RP, row_N, position_N, page_size), 0)
        if shape.nodes:
            scattered_N = (start_R1 + places.local[path_RD]).flatten()
            source_N = torch.where(kept_N, slots(page_RP, row_N, scattered_N, page_size), 0)
            if not shape.live or bool((source_N != target_N).any()):
                move(self.cache, source_N, target_N)
        if taps_TX is not None:
            self._store_context(taps_TX[path_RD.flatten()], position_N, target_N)

    def _store_context(self, taps_NX: Tensor, position_N: Tensor, slot_N: Tensor) -> None:
        """Taps through fc, hidden_norm and every draft layer's K/V projection, into the given slots."""
        assert self.drafter is not None and self.draft_cache is not None
        k, v = self.drafter.context_kv(self.drafter.context_feature(taps_NX), position_N)
        self.draft_cache.index_copy_(1, slot_N, torch.stack((k, v), dim=2))

    @staticmethod
    def _result(
        choice: Draw,
        places: Places,
        verified: Verified,
        token_RD: Tensor,
        path_RD: Tensor,
        emitted_R: Tensor,
        accepted_R: Tensor,
        done_R: Tensor,
    ) -> RoundResult:
        step_D = torch.arange(path_RD.shape[1], device=path_RD.device)
        kept_RD = step_D < emitted_R[:, None]
        bad_T = ~torch.isfinite(verified.hidden_TH).all(dim=1)
        return RoundResult(
            emitted_R=emitted_R,
            # A cut at a stop or at the limit keeps the drafted nodes before it, and its last token counts as drawn.
            accepted_R=torch.minimum(accepted_R, (emitted_R - 1).clamp(min=0)),
            done_R=done_R,
            bad_R=bad_T[path_RD].any(1),
            tokens_RD=torch.where(kept_RD, token_RD, -1),
            runner_up_RD=torch.where(kept_RD, choice.runner_up_T[path_RD], -1),
            edge_token_RD=torch.where(kept_RD, choice.edge_token_T[path_RD], -1),
            gap_RD=choice.gap_T[path_RD],
            top_logit_RD=choice.top_logit_T[path_RD],
            edge_gap_RD=choice.edge_gap_T[path_RD],
        )

    def _commit_rows(self, seat_R: Tensor, result: RoundResult) -> None:
        """start, anchor, done and the token counts. The dummy seat emits nothing and is done already."""
        state = self.state
        count_tokens(state.sampler, seat_R, result.tokens_RD)
        emitted_R = result.emitted_R
        last_R = result.tokens_RD.gather(1, (emitted_R - 1).clamp(min=0).unsqueeze(1)).squeeze(1)
        anchor_R = torch.where(emitted_R > 0, last_R, state.anchor_S[seat_R])
        state.start_S.index_copy_(0, seat_R, state.start_S[seat_R] + emitted_R)
        state.anchor_S.index_copy_(0, seat_R, anchor_R)
        state.done_S.index_copy_(0, seat_R, result.done_R)
        state.round_number.add_(1)

    def constants(self, shape: RoundShape) -> dict[str, Tensor]:
        """Index tables that a round of this shape reads; made here, so that no capture makes them."""
        depths = self._depths(shape.block)
        ranks = min(self.limits.max_ranks, shape.nodes, self.target.config.vocab_size)
        if not min(depths, shape.nodes):
            return {}
        tables = frontier(shape.nodes, depths, ranks, self.state.start_S.device)
        named = {field.name: getattr(tables, field.name) for field in fields(tables)}
        return {
            f"frontier.{shape.nodes}x{depths}x{ranks}.{name}": value
            for name, value in named.items()
            if isinstance(value, Tensor)
        }

    def _depths(self, block: int) -> int:
        """Deepest node that a block of this length can draft."""
        if not block or self.drafter is None:
            return 0
        return block if self.drafter.config.anchor_first else block - 1

    # ---- shared -----------------------------------------------------------------------------------------------

    def _context(self, start_R: Tensor, width: int, live: bool) -> int:
        """Slots that a pass reads: the engine's most, or in a live round just enough for its longest row."""
        if not live:
            return self.limits.context
        return int(start_R.max()) + width

    def _pages(self, seat_R: Tensor, context: int) -> Tensor:
        return self.state.page_table_SP[seat_R, : -(-context // self.limits.page_size)]

    def _attend(self, cache: Tensor, layout: Layout, seen_RNC: Tensor, num_heads: int) -> PagedAttend:
        bias = additive(seen_RNC, num_heads // cache.shape[3], cache.dtype)
        return PagedAttend(cache, layout, [bias] * cache.shape[0], self.limits.page_size)


def forecast_mass(trees: TreeBatch, sizes: tuple[tuple[int, int], ...]) -> Tensor:
    """Sum of path probabilities of each row's best `nodes` nodes that a block of `block` can reach, [R, Q]."""
    probability_RM = trees.score.exp()
    columns: list[Tensor] = []
    for block, nodes in sizes:
        reach_RM = trees.depth < block
        first_RM = reach_RM & (reach_RM.cumsum(1) <= nodes)
        columns.append(torch.where(first_RM, probability_RM, 0).sum(1))
    return torch.stack(columns, dim=1) if columns else probability_RM.new_zeros(len(probability_RM), 0)


def _history(places: Places, depth_limit: int) -> Tensor:
    """Tokens of the drafted nodes from each place up to its root, int64 [T, max(depth_limit, 1)], -1 pads."""
    steps, node_T = [], torch.arange(places.token.shape[0], device=places.token.device)
    for _ in range(max(depth_limit, 1)):
        steps.append(torch.where(places.depth[node_T] > 0, places.token[node_T], -1))
        node_T = places.parent[node_T]
    return torch.stack(steps, dim=1)
