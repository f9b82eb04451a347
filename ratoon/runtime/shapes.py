# Owns: which round shapes padded modes open at start-up, and the buckets that budget auto chooses among.
# Promises: plain decoding is always open, for every row count and sampler; on a GPU at most MAX_SHAPES.
# Never: measures (runtime/costs.py does), or decides a round's bucket.
"""Shapes of rounds. A bucket is (block, nodes per row), (0, 0) plain decoding."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import zip_longest

import numpy as np
import torch

from ratoon.core.config import ModelConfig
from ratoon.core.drafter import DrafterConfig
from ratoon.spec.budget import PLAIN, Bucket
from ratoon.spec.ddtree import build_tree
from ratoon.spec.simulate import AcceptanceTable
from ratoon.spec.state import Limits, RoundShape

MAX_SHAPES = 56
"""Round graphs captured by default; with those of prefill and joins 60."""

# More nodes than a block can use well are not worth a column of the forecast.
_SIZES = {2: (1, 2, 3), 4: (3, 5, 7, 11, 15), 8: (7, 11, 15, 23, 31, 47, 63), 16: (15, 23, 31, 47, 63)}
_SIZES_CPU = (3, 5, 7, 11, 15, 23, 31)
_CAPTURED_ON_CPU = (7, 31)
# How sure of itself a drafter may be: exponents on the published table of METHOD section 5, from strong to weak.
_STRENGTHS = (0.5, 1.0, 3.0)


@dataclass(frozen=True)
class Estimate:
    """What a round costs, in steps of plain decoding of one row, before anything was measured.

    draft_share: the drafter's weights and the head over the target's. Memory-bound up to about 128 places, then
    linear (products of an 8B target on an H200: 4.2 ms at 1 place, 4.8 at 128, 6.0 at 256, 2026-11).
    """

    draft_share: float

    @classmethod
    def of(cls, target: ModelConfig, drafter: DrafterConfig) -> Estimate:
        head = target.vocab_size * target.hidden_size
        return cls((_weights(drafter) + head) / (_weights(target) + head))

    def round(self, rows: int, bucket: Bucket) -> float:
        block, nodes = bucket
        draft = self.draft_share * _products(rows * block) if block else 0.0
        return draft + _products(rows * (nodes + 1))


def _weights(config: ModelConfig | DrafterConfig) -> int:
    attention = 2 * config.hidden_size * config.head_dim * (config.num_heads + config.num_kv_heads)
    return config.num_layers * (attention + 3 * config.hidden_size * config.intermediate_size)


def _products(places: int) -> float:
    return 1 + min(places, 128) / 1000 + max(places - 128, 0) / 200


@lru_cache(maxsize=64)
def _masses(depths: int, strength: float) -> tuple[float, ...]:
    """Expected accepted nodes of the best tree of 1, 2, ... nodes."""
    plain = AcceptanceTable()
    table = AcceptanceTable(tuple(p**strength for p in plain.first), tuple(p**strength for p in plain.total))
    logprob_LK = table.logprobs(depths, table.num_ranks)
    tree = build_tree(logprob_LK, np.zeros(logprob_LK.shape, dtype=np.int64), max(_SIZES[8]), topk_cap=0)
    return tuple(np.exp(tree.score.astype(np.float64)).cumsum().tolist())


def _gain(rows: int, bucket: Bucket, strength: float, estimate: Estimate) -> float:
    """Expected tokens per row and unit of cost."""
    block, nodes = bucket
    masses = _masses(block - 1, strength)
    return (1 + masses[min(nodes, len(masses)) - 1]) / estimate.round(rows, bucket)


def auto_buckets(config: DrafterConfig, device: torch.device) -> tuple[Bucket, ...]:
    """The (block, nodes) pairs that budget auto chooses among, smaller blocks first."""
    if device.type == "cpu":
        blocks = sorted({max(config.block_size // 2, 2), config.block_size})
        return tuple((block, nodes) for block in blocks for nodes in _SIZES_CPU)
    blocks = sorted({block for block in _SIZES if block < config.block_size} | {config.block_size})
    return tuple((block, nodes) for block in blocks for nodes in _sizes(block))


def _sizes(block: int) -> tuple[int, ...]:
    return next((sizes for most, sizes in _SIZES.items() if block <= most), _SIZES[16])


def row_counts(max_rows: int, device: torch.device) -> list[int]:
    """Powers of two and max_rows; on a CPU, where graphs serve as a test, one and max_rows."""
    if device.type == "cpu":
        return sorted({1, max_rows})
    return sorted({min(1 << power, max_rows) for power in range(max_rows.bit_length() + 1)})


def padded_shapes(
    limits: Limits, budget: int | None, device: torch.device, estimate: Estimate | None = None
) -> list[RoundShape]:
    """Shapes that padded modes open at start-up. budget: a fixed one, 0 for plain decoding alone, None for auto.

    Of auto's buckets, a row count gets those that the estimate favours for some strength of the drafter: large trees
    for few rows, small ones for many. Sampled rows get fewer shapes than greedy ones: plain decoding and the most
    favoured bucket, and the largest for one row and for all.
    """
    counts = row_counts(limits.max_rows, device)
    if budget is not None or device.type == "cpu" or estimate is None:
        fixed = [(limits.max_block, budget)] if budget and limits.max_nodes else []
        few = [bucket for bucket in limits.forecast if bucket[1] in _CAPTURED_ON_CPU]
        buckets = [PLAIN, *(few if budget is None else fixed)]
        return [_shape(limits, n, bucket, kind) for n in counts for bucket in buckets for kind in ("argmax", "general")]
    favoured = _favoured(limits, counts, estimate)
    shapes = []
    for rows, buckets in favoured.items():
        sampled = {PLAIN, *buckets[:1]}
        if rows in (1, limits.max_rows):
            sampled.add(max(buckets, key=lambda bucket: bucket[1]))
        shapes += [_shape(limits, rows, bucket, "argmax") for bucket in (PLAIN, *buckets)]
        shapes += [_shape(limits, rows, bucket, "general") for bucket in sorted(sampled)]
    return shapes


def _favoured(limits: Limits, counts: list[int], estimate: Estimate) -> dict[int, list[Bucket]]:
    """Auto's buckets for each row count, best first, as many as MAX_SHAPES leaves room for; small counts get more."""
    ranked = {rows: _ranked(limits, rows, estimate) for rows in counts}
    room = MAX_SHAPES - 3 * len(counts) - 2
    picked: dict[int, list[Bucket]] = {rows: [] for rows in counts}
    for column in zip_longest(*ranked.values()):
        for rows, bucket in zip(counts, column, strict=True):
            if room and bucket is not None:
                picked[rows].append(bucket)
                room -= 1
    return picked


def _ranked(limits: Limits, rows: int, estimate: Estimate) -> list[Bucket]:
    """Buckets by how near they come to the best one for some strength: first the best of the published table."""
    fitting = [bucket for bucket in limits.forecast if bucket[1] <= limits.max_nodes]
    best: dict[Bucket, float] = dict.fromkeys(fitting, 0.0)
    for strength in _STRENGTHS:
        gains = {bucket: _gain(rows, bucket, strength, estimate) for bucket in fitting}
        top = max(gains.values())
        for bucket, gain in gains.items():
            best[bucket] = max(best[bucket], gain / top + (gain == top and strength == 1.0))
    return sorted(fitting, key=lambda bucket: -best[bucket])


def _shape(limits: Limits, rows: int, bucket: Bucket, sampler: str) -> RoundShape:
    block, nodes = bucket
    # A sure row may take the places of unsure ones, up to four times its share.
    most = min(limits.max_nodes, rows * nodes, max(4 * nodes, 15) if nodes else 0)
    return RoundShape(rows, rows * (nodes + 1), block, most, sampler)
