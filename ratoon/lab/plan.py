# Owns: the time of a round before it was run: from bytes, rows, launches, distinct experts and collectives.
# Promises: linear in three constants of this engine, which are fitted to rounds of one row alone (lab/predicted.py).
# Never: imports torch, runs anything, or knows a measurement.
"""The cost model of `ratoon plan`. T: places, B: block, bytes are bfloat16."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from ratoon.core.config import ModelConfig
from ratoon.core.drafter import DrafterConfig
from ratoon.core.request import Method
from ratoon.lab.gpus import Gpu, Link
from ratoon.spec.acceptance import AcceptanceTable
from ratoon.spec.ddtree import build_tree

_BYTES = 2
_LOGIT_BYTES = 8
"""A float32 logit is written once and read once."""
_LAYER_LAUNCHES, _STEP_LAUNCHES, _DRAFT_LAUNCHES = 8, 16, 30
"""Kernels of a layer (one more where q and k are normed), of a plain round beside them, and of drafting. Counted in
rounds of one row: 340 of the Qwen3-8B shape, 255 of SmolLM2's; drafting adds 75 to SmolLM2's."""
_TREE_SIZES = (1, 3, 5, 7, 11, 15, 23, 31, 47, 63)


@dataclass(frozen=True)
class Engine:
    """What this engine makes of the machine: its share of the copy bandwidth, a launch over the smallest kernel, and
    what one more place of a row costs in a layer's attention (a chain of dependent loads)."""

    bandwidth_share: float
    launch_factor: float
    place_us: float


@dataclass(frozen=True)
class Shape:
    """A stack of layers, and its head. `num_experts` 0: dense; else `intermediate_size` is that of one expert."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    qk_norm: bool
    num_experts: int = 0
    experts_per_token: int = 0

    @classmethod
    def of(cls, config: ModelConfig | DrafterConfig) -> Shape:
        """The target's or drafter's; a drafter's head is the target's."""
        return cls(
            config.num_layers,
            config.hidden_size,
            config.intermediate_size,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            config.vocab_size,
            qk_norm=config.qk_norm if isinstance(config, ModelConfig) else True,
        )

    @property
    def qkv_size(self) -> int:
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    @property
    def attention_weights(self) -> int:
        """Of all layers, in elements."""
        return self.num_layers * self.hidden_size * (self.qkv_size + self.num_heads * self.head_dim)

    @property
    def mlp_weights(self) -> int:
        """Of all layers, of one expert each."""
        return self.num_layers * 3 * self.hidden_size * self.intermediate_size

    @property
    def head_weights(self) -> int:
        return self.hidden_size * self.vocab_size

    @property
    def kv_bytes(self) -> int:
        """Of one token."""
        return self.num_layers * 2 * self.num_kv_heads * self.head_dim * _BYTES

    @property
    def place_bytes(self) -> int:
        """What kernels beside the products read and write for one place in all layers: two norms, rotary and store,
        attention's ends, the gate."""
        norms, heads = 4 * self.hidden_size, 2 * self.qkv_size + 2 * self.num_heads * self.head_dim
        return self.num_layers * (norms + heads + 3 * self.intermediate_size) * _BYTES


@dataclass(frozen=True)
class Pair:
    """What decodes, on what. block and taps: the drafter's block and how many layers it taps."""

    target: Shape
    gpu: Gpu
    drafter: Shape | None = None
    block: int = 0
    taps: int = 0
    num_gpus: int = 1
    link: Link | None = None


@dataclass(frozen=True)
class Round:
    """rows decode together, `nodes` drafted nodes each out of a block (0, 0: plain decoding), in `context` tokens."""

    rows: int
    nodes: int
    block: int
    context: int


@dataclass(frozen=True)
class Work:
    """A round's costs apart. read_ms: bytes at the bandwidth of a copy; rows_ms: what more rows add to the products;
    place_layers: places beyond the first, times layers, times waves; link_ms: collectives."""

    read_ms: float
    rows_ms: float
    launches: int
    place_layers: float
    link_ms: float

    def ms(self, engine: Engine, gpu: Gpu) -> float:
        """The round's time."""
        launch_ms = 1e-3 * gpu.kernel_us * engine.launch_factor * self.launches
        attention_ms = 1e-3 * engine.place_us * self.place_layers
        return self.read_ms / engine.bandwidth_share + self.rows_ms + launch_ms + attention_ms + self.link_ms


def distinct_experts(num_experts: int, experts_per_token: int, places: int) -> float:
    """Experts of a layer that `places` tokens are expected to wake, routed evenly and independently."""
    return num_experts * (1 - (1 - experts_per_token / num_experts) ** places)


def work(pair: Pair, round_: Round) -> Work:
    """What a round has to do."""
    places = round_.rows * (round_.nodes + 1)
    total = _pass(pair, pair.target, places, round_.rows, round_.nodes, round_.context)
    total = _sum(total, _products(pair.gpu, pair.target.head_weights / pair.num_gpus, places))
    logits, launches = places, _STEP_LAUNCHES
    if round_.nodes and pair.drafter is not None:
        drafted = round_.rows * round_.block
        total = _sum(
            total, _pass(pair, pair.drafter, drafted, round_.rows, round_.block - 1, round_.context),
            _products(pair.gpu, pair.target.head_weights / pair.num_gpus, drafted),
            _products(pair.gpu, _context_weights(pair) / pair.num_gpus, drafted),
        )  # fmt: skip
        logits, launches = logits + drafted, launches + _DRAFT_LAUNCHES
    logit_ms = _read_ms(pair.gpu, logits * pair.target.vocab_size * _LOGIT_BYTES / pair.num_gpus)
    return _sum(total, Work(logit_ms, 0.0, launches, 0.0, 0.0))


def _pass(pair: Pair, shape: Shape, places: int, rows: int, more: int, context: int) -> Work:
    """The layers of one network. more: places of a row beyond its first."""
    gpu, split = pair.gpu, pair.num_gpus
    mlp, mlp_places = float(shape.mlp_weights), float(places)
    if shape.num_experts:
        awake = distinct_experts(shape.num_experts, shape.experts_per_token, places)
        mlp, mlp_places = mlp * awake, places * shape.experts_per_token / awake
    kv = rows * context * shape.kv_bytes / min(split, shape.num_kv_heads)
    waves = max(1.0, rows * shape.num_kv_heads / split / gpu.multiprocessors)
    beside = Work(
        read_ms=_read_ms(gpu, kv + places * shape.place_bytes / split),
        rows_ms=0.0,
        launches=(_LAYER_LAUNCHES + shape.qk_norm) * shape.num_layers,
        place_layers=more * shape.num_layers * waves,
        link_ms=2 * shape.num_layers * _all_reduce_ms(pair, places * shape.hidden_size * _BYTES),
    )
    attention = _products(gpu, shape.attention_weights / split, places)
    return _sum(beside, attention, _products(gpu, mlp / split, mlp_places))


def _products(gpu: Gpu, weights: float, places: float) -> Work:
    """Products with so many weights (elements): beyond the most rows measured, time grows with rows."""
    beyond = max(1.0, places / gpu.rows[-1])
    more_ms = float(np.interp(places, gpu.rows, gpu.products_ms)) - gpu.products_ms[0]
    size = weights * _BYTES
    return Work(_read_ms(gpu, size) * beyond, more_ms * size / (1e9 * gpu.products_gb) * beyond, 0, 0.0, 0.0)


def _context_weights(pair: Pair) -> int:
    """fc and the context projection, which every round applies to the accepted path's taps."""
    assert pair.drafter is not None
    shape = pair.drafter
    kv = 2 * shape.num_kv_heads * shape.head_dim * shape.num_layers
    return shape.hidden_size * (pair.taps * pair.target.hidden_size + kv)


def _read_ms(gpu: Gpu, size: float) -> float:
    return size / gpu.copy_tb_s / 1e9


def _all_reduce_ms(pair: Pair, size: float) -> float:
    if pair.num_gpus == 1:
        return 0.0
    assert pair.link is not None
    ring = 2 * (pair.num_gpus - 1) / pair.num_gpus
    return 1e-3 * pair.link.start_us + ring * size / pair.link.gb_s / 1e6


def _sum(*parts: Work) -> Work:
    return Work(
        sum(part.read_ms for part in parts),
        sum(part.rows_ms for part in parts),
        sum(part.launches for part in parts),
        sum(part.place_layers for part in parts),
        sum(part.link_ms for part in parts),
    )


# ---- what a round earns --------------------------------------------------------------------------------------


@lru_cache(maxsize=256)
def expected_tau(method: Method, nodes: int, block: int) -> float:
    """Tokens of a round by the published table (METHOD section 5), trees of cap 16."""
    if method == "ar" or not nodes:
        return 1.0
    table = AcceptanceTable()
    logprob_LK = table.logprobs(block - 1, table.num_ranks)
    tree = build_tree(logprob_LK, np.zeros(logprob_LK.shape, dtype=np.int64), nodes, 1 if method == "chain" else 16)
    return 1.0 + float(np.exp(tree.score.astype(np.float64)).sum())


@dataclass(frozen=True)
class Prediction:
    """One choice at one concurrency: ms of a round, tokens of it, tokens/s of all rows."""

    method: Method
    round_: Round
    ms: float
    tau: float

    @property
    def tokens_per_s(self) -> float:
        return 1e3 * self.round_.rows * self.tau / self.ms


def predict(pair: Pair, engine: Engine, method: Method, round_: Round, tau: float | None = None) -> Prediction:
    """tau: of a chain that is known to earn so much; None for the table's. A chain has at most block - 1 nodes."""
    if method == "chain":
        round_ = Round(round_.rows, min(round_.nodes, round_.block - 1), round_.block, round_.context)
    earned = expected_tau(method, round_.nodes, round_.block) if tau is None or method == "ar" else tau
    return Prediction(method, round_, work(pair, round_).ms(engine, pair.gpu), earned)


def plain(pair: Pair, engine: Engine, rows: int, context: int) -> Prediction:
    """Plain decoding."""
    return predict(pair, engine, "ar", Round(rows, 0, 0, context))


def best(pair: Pair, engine: Engine, rows: int, context: int, methods: Iterable[Method]) -> Prediction:
    """The fastest of the methods' rounds: blocks halved down to 2, trees and chains of all sizes."""
    choices = [plain(pair, engine, rows, context)]
    blocks = [pair.block >> step for step in range(8) if pair.block >> step >= 2]
    choices += [
        predict(pair, engine, method, Round(rows, nodes, block, context))
        for method in methods
        if method != "ar"
        for block in blocks
        for nodes in _TREE_SIZES
    ]
    return max(choices, key=lambda choice: choice.tokens_per_s)
