# Owns: what a round should have done, recomputed from its own inputs by dense passes and the tree's numpy oracle.
# Promises: shares no page table, mask, slot, tree operation or commit with the round that it judges.
# Never: reads a cache beyond the committed positions.
"""The reference of one round. T: places of a row, P: committed positions, S = P + T, B: block, L: layers, H: hidden,
K, D: K/V heads, head dim, V: vocabulary."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ratoon.core.request import batch_sampler_kind, near_tie_bound
from ratoon.core.tree import Tree
from ratoon.lab.bisect.observe import Observation
from ratoon.lab.bisect.side import WRONG_PAGES, Side, Stepped
from ratoon.lab.doctor.reference import mask_of
from ratoon.models.dflash import DFlash
from ratoon.models.layers import Heads, Rotary
from ratoon.ops.launch import use_kernels
from ratoon.ops.penalties import penalise
from ratoon.ops.sample import Draw, draw
from ratoon.runtime.rows import Row
from ratoon.spec.ddtree import accept, ancestor_bits, build_tree, rank_candidates


class Dense:
    """`Attend` over committed K/V [L, P, 2, K, D] and the pass's own: seen[layer] is bool [T, S]."""

    def __init__(self, committed: Tensor, seen: Sequence[Tensor], rotary: Rotary) -> None:
        self._committed, self._seen, self._rotary = committed, seen, rotary
        self.qkv: list[Tensor] = []
        self.out: list[Tensor] = []
        self.kv: list[Tensor] = []

    def begin(self, rotary: Rotary, position_T: Tensor, dtype: torch.dtype) -> None:
        self._cos_sin = self._rotary(position_T, dtype)

    def __call__(self, layer: int, qkv_TX: Tensor, heads: Heads) -> Tensor:
        self.qkv.append(qkv_TX.clone())
        q_TND, k_TKD, v_TKD = heads.split(qkv_TX, *self._cos_sin)
        self.kv.append(torch.stack((k_TKD, v_TKD), dim=1))
        k_SKD, v_SKD = (torch.cat((self._committed[layer][:, which], own)) for which, own in ((0, k_TKD), (1, v_TKD)))
        group = heads.num_heads // heads.num_kv_heads
        q, k, v = (x.transpose(0, 1).float() for x in (q_TND, k_SKD, v_SKD))
        seen_TS = self._seen[layer].to(q.device)
        out = F.scaled_dot_product_attention(
            q, k.repeat_interleave(group, 0), v.repeat_interleave(group, 0), attn_mask=seen_TS
        )  # fmt: skip
        self.out.append(out.transpose(0, 1).flatten(1).to(qkv_TX.dtype))
        return self.out[-1]


@dataclass(frozen=True)
class Verified:
    """A row's dense tree pass: hidden [T, H], taps [T, X], and the attention that was used."""

    hidden: Tensor
    taps: Tensor | None
    dense: Dense


def _rotary(config: Any, device: torch.device) -> Rotary:
    return Rotary(config.rope, config.head_dim).to(device)


@contextmanager
def _without_kernels() -> Iterator[None]:
    """What judges a kernel must not be computed by one."""
    use_kernels("torch")
    try:
        with torch.inference_mode():
            yield
    finally:
        use_kernels("auto")


@_without_kernels()
def prefilled(side: Side) -> tuple[Observation, Observation]:
    """(wanted, found) K/V of all prompts, before the first round."""
    want, got = Observation(), Observation()
    drafter, device = side.runner.round.drafter, side.runner.device
    parts: dict[str, list[tuple[Tensor, Tensor]]] = {name: [] for name in side.caches}
    for row in side.rows:
        count = len(row.prompt) - 1
        if not count:
            continue
        seen_PP = torch.ones(count, count, dtype=torch.bool).tril()
        done = _target_pass(side, list(row.prompt[:-1]), torch.arange(count, device=device), seen_PP, None)
        parts["cache"].append((torch.stack(done.dense.kv), side.kv("cache", row, count)))
        if drafter is not None and done.taps is not None:
            kv = _draft_context(drafter, done.taps, torch.arange(count, device=device))
            parts["draft_cache"].append((kv, side.kv("draft_cache", row, count)))
    for name, pairs in parts.items():
        for layer in range(side.runner.table[name].shape[0] if pairs else 0):
            for record, which in ((want, 0), (got, 1)):
                whole = torch.cat([pair[which][layer] for pair in pairs])
                record.add("prefill", f"keys and values of {name}", whole, layer)
    return want, got


@_without_kernels()
def expected(side: Side, stepped: Stepped) -> Observation:
    """What the observed round should have recorded. Rows are judged one by one and laid side by side."""
    parts = [_Row(side, stepped, number).expected() for number in range(len(stepped.rows))]
    whole = Observation()
    for key in parts[0].ordered():
        values = [part.values[key] for part in parts if key in part.values]
        whole.add(key[0], key[1], torch.cat(values), key[2])
    return whole


def _target_pass(side: Side, ids: list[int], position_T: Tensor, seen_TS: Tensor, committed: Tensor | None) -> Verified:
    target, drafter, device = side.runner.round.target, side.runner.round.drafter, side.runner.device
    config = target.config
    if committed is None:
        shape = (config.num_layers, 0, 2, config.num_kv_heads, config.head_dim)
        committed = torch.zeros(shape, dtype=target.embed.weight.dtype, device=device)
    dense = Dense(committed, [seen_TS] * config.num_layers, _rotary(config, device))
    taps = drafter.config.target_layer_ids if drafter is not None else ()
    hidden, taps_TX = target.forward(torch.tensor(ids, device=device), position_T, dense, taps)
    return Verified(hidden, taps_TX, dense)


def _draft_context(drafter: DFlash, taps_NX: Tensor, position_N: Tensor) -> Tensor:
    """[L, N, 2, K, D]."""
    keys, values = drafter.context_kv(drafter.context_feature(taps_NX), position_N)
    return torch.stack((keys, values), dim=2)


class _Row:
    """One row of a round: its places, and what each stage should have made of them."""

    def __init__(self, side: Side, stepped: Stepped, number: int) -> None:
        self.side, self.stepped, self.number = side, stepped, number
        self.row: Row = stepped.rows[number]
        self.tokens = stepped.before.tokens[number]
        self.start, self.device = len(self.tokens) - 1, side.runner.device
        begin, end = stepped.places.row_start[number : number + 2].tolist()
        self.at = slice(begin, end)
        self.begin, self.count = begin, end - begin
        self.want = Observation()

    def expected(self) -> Observation:
        self._seat()
        if self.stepped.shape.block and self.stepped.seen.get("draft", "input") is not None:
            self._draft()
            self._build()
        tree = self._mask()
        verified = self._verify(tree)
        path = self._accept(tree, verified)
        self._commit(path, verified)
        return self.want

    def _own(self, stage: str, operation: str) -> Tensor | None:
        """This row's places of what was recorded."""
        value = self.stepped.seen.get(stage, operation)
        return None if value is None else value[self.at]

    def _seat(self) -> None:
        self.want.add("seat", WRONG_PAGES, torch.tensor([0]))

    # ---- draft and build --------------------------------------------------------------------------------------

    def _draft(self) -> None:
        drafter, block = self.side.runner.round.drafter, self.stepped.shape.block
        assert drafter is not None
        config, embed = drafter.config, self.side.runner.round.target.embed.weight
        mask_H = embed[config.mask_token_id] if drafter.mask_embedding is None else drafter.mask_embedding
        x_BH = torch.stack([embed[self.tokens[-1]], *[mask_H.to(embed.dtype)] * (block - 1)])
        x_BH = x_BH * config.input_embedding_scale
        kinds = zip(config.windows, config.causal, strict=True)
        seen = [mask_of(self.start, block, *kind) for kind in kinds]
        committed = self.stepped.before.kv["draft_cache"][self.number]
        dense = Dense(committed, seen, _rotary(config, self.device))
        position_B = torch.arange(self.start, self.start + block, device=self.device)
        hidden = DFlash.forward(drafter, x_BH.clone(), position_B, dense)
        self.want.add("draft", "input", x_BH)
        self.want.add("draft", "position", position_B)
        self._add_layers("draft", dense)
        self.want.add("draft", "hidden", hidden)

    def _add_layers(self, stage: str, dense: Dense) -> None:
        for layer, (qkv, out) in enumerate(zip(dense.qkv, dense.out, strict=True)):
            self.want.add(stage, "qkv product", qkv, layer)
            self.want.add(stage, "attention", out, layer)

    def _build(self) -> None:
        """Candidates of the recorded logits, and the best tree of the recorded candidates."""
        seen, depths = self.stepped.seen, self.side.runner.round.depths(self.stepped.shape.block)
        own = slice(self.number * depths, (self.number + 1) * depths)
        logits, token, logprob = (
            seen.values[key][own]
            for key in (
                ("draft", "logits", None),
                ("build", "candidate token", None),
                ("build", "candidate log-probability", None),
            )
        )
        ranked, scored = rank_candidates(logits.float().cpu().numpy(), token.shape[1])
        self.want.add("build", "candidate token", torch.from_numpy(ranked).to(token))
        self.want.add("build", "candidate log-probability", torch.from_numpy(scored).to(logprob))
        budget = min(self.row.budget, self.stepped.shape.nodes)
        tree = build_tree(logprob.cpu().numpy(), token.cpu().numpy(), budget, self.row.topk_cap)
        # Where rows share too few places a row gets the first of its nodes.
        shared = self.stepped.shape.places < len(self.stepped.rows) * (self.stepped.shape.nodes + 1)
        count = min(tree.num_nodes, self.count - 1) if shared else tree.num_nodes
        for name, root, first in (("token", self.tokens[-1], 0), ("parent", self.begin, self.begin), ("depth", 0, 0)):
            nodes = torch.from_numpy(getattr(tree, name)[:count]) + first
            self.want.add("build", name, torch.cat((torch.tensor([root]), nodes)))

    # ---- mask and verify --------------------------------------------------------------------------------------

    def _mask(self) -> Tree:
        """The packed tree as it is; bits, positions and slots as they should be for it."""
        places = self.stepped.places
        token, parent, depth = (getattr(places, name)[self.at].numpy() for name in ("token", "parent", "depth"))
        parent = parent - self.begin
        tree = Tree(token[1:], parent[1:], depth[1:], np.zeros_like(token[1:]), np.zeros(len(token) - 1, np.float32))
        bits = ancestor_bits(tree.parent)
        width = self.stepped.seen.values["mask", "ancestor bits", None].shape[1]
        padded = np.zeros((len(bits), width), dtype=np.int64)
        padded[:, : bits.shape[1]] = bits
        self.want.add("mask", "ancestor bits", torch.from_numpy(padded))
        self.want.add("mask", "position", self.start + torch.from_numpy(depth).to(self.device))
        slots = self.side.slots(self.row, self.start + self.count)[self.start :]
        self.want.add("mask", "slot", slots)
        return tree

    def _verify(self, tree: Tree) -> Verified:
        count, start = self.count, self.start
        own = torch.eye(count, dtype=torch.bool)
        for node, parent in enumerate(tree.parent.tolist(), start=1):
            own[node] |= own[parent]
        seen_TS = torch.cat((torch.ones(count, start, dtype=torch.bool), own), dim=1)
        ids = [int(self.stepped.places.token[self.at][0]), *tree.token.tolist()]
        position_T = start + torch.tensor([0, *tree.depth.tolist()], device=self.device)
        verified = _target_pass(self.side, ids, position_T, seen_TS, self.stepped.before.kv["cache"][self.number])
        self._add_layers("verify", verified.dense)
        self.want.add("verify", "hidden", verified.hidden)
        if verified.taps is not None:
            self.want.add("verify", "taps", verified.taps)
        return verified

    # ---- accept and commit ------------------------------------------------------------------------------------

    def _accept(self, tree: Tree, verified: Verified) -> list[int]:
        """Draws of the dense pass, except where they are undecided; the walk over what was drawn; its cut."""
        drawn = self._draws(tree, verified)
        found = self._own("accept", "draw")
        token_T = drawn.token_T
        if found is not None:
            token_T = torch.where(self._undecided(drawn), found, token_T)
            self.want.add("accept", "draw", token_T)
        path, _ = accept(tree, (token_T if found is None else found).tolist())
        tokens = [int((token_T if found is None else found)[node]) for node in path]
        if found is None and bool(self._undecided(drawn)[path].any()):
            tokens = list(
                self.stepped.emitted[self.number]
            )  # a graph's draws are not recorded: nothing to hold against
        else:
            tokens = self._cut(tokens)
        self.want.add("accept", "number of tokens", torch.tensor([len(tokens)]))
        self.want.add("accept", "tokens", torch.tensor(tokens, dtype=torch.int64))
        limit = min(len(self.row.prompt) + self.row.params.max_tokens, self.side.runner.limits.max_model_len)
        ended = self.start + len(tokens) + 1 >= limit or (bool(tokens) and tokens[-1] in self.row.stop_ids)
        self.want.add("commit", "start", torch.tensor([self.start + len(tokens)]))
        self.want.add("commit", "anchor", torch.tensor([tokens[-1] if tokens else self.tokens[-1]]))
        self.want.add("commit", "done", torch.tensor([ended]))
        return path[: len(tokens)]

    def _draws(self, tree: Tree, verified: Verified) -> Draw:
        runner = self.side.runner
        seat_T = torch.full((self.count,), self.row.seat, device=self.device)
        position_T = self.start + 1 + torch.tensor([0, *tree.depth.tolist()], device=self.device)
        history = np.full((self.count, max(int(tree.depth.max(initial=0)), 1)), -1, dtype=np.int64)
        for node, (parent, token) in enumerate(zip(tree.parent.tolist(), tree.token.tolist(), strict=True), start=1):
            history[node, 0], history[node, 1:] = token, history[parent, :-1]
        state = replace(runner.state.sampler, output_count_SV=self.stepped.before.counts)
        hidden = verified.hidden
        logits = F.linear(hidden.float(), runner.round.target.head_weight.float())
        logits = penalise(logits, state, seat_T, torch.from_numpy(history).to(self.device))
        kind = batch_sampler_kind([self.row.kind])
        return draw(logits, state, seat_T, position_T, "argmax" if kind == "argmax" else "general")

    def _undecided(self, drawn: Draw) -> Tensor:
        dtype = self.side.engine.dtype
        bound = torch.tensor([near_tie_bound(float(top), dtype) for top in drawn.top_logit_T], device=self.device)
        return torch.minimum(drawn.gap_T, drawn.edge_gap_T) <= bound

    def _cut(self, tokens: list[int]) -> list[int]:
        limit = min(len(self.row.prompt) + self.row.params.max_tokens, self.side.runner.limits.max_model_len)
        tokens = tokens[: limit - 1 - self.start]
        stops = [index for index, token in enumerate(tokens) if token in self.row.stop_ids]
        return tokens[: stops[0] + 1] if stops else tokens

    def _commit(self, path: list[int], verified: Verified) -> None:
        before = self.stepped.before.kv
        fresh = {"cache": torch.stack(verified.dense.kv)[:, path]}
        drafter = self.side.runner.round.drafter
        if drafter is not None and verified.taps is not None:
            position_N = torch.arange(self.start, self.start + len(path), device=self.device)
            fresh["draft_cache"] = _draft_context(drafter, verified.taps[path], position_N)
        for name, new in fresh.items():
            whole = torch.cat((before[name][self.number], new), dim=1)
            for layer in range(len(whole)):
                self.want.add("commit", f"keys and values of {name}", whole[layer], layer)
