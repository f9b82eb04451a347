# Owns: the instruments of `make bench-gpu`: steady rounds, replays, idle time, kernels, stages, a throughput protocol.
# Promises: what is compared is the same rounds: a replay starts from a copy of the state at which the clock started.
# Never: builds a model or an engine, knows a target figure.
"""Timing of whole rounds (definitions: METHOD section 5)."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._autograd import DeviceType

from ratoon.core.request import Method, SamplingParams
from ratoon.models.decoder import Decoder
from ratoon.models.dflash import DFlash
from ratoon.runtime.engine import Engine
from ratoon.spec.state import RoundShape

WARM_ROUNDS = 20


def sync(device: torch.device) -> None:
    """Waits for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def random_prompts(rows: int, length: int, vocab: int, seed: int = 0) -> list[list[int]]:
    """`rows` prompts of `length` random ids."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocab, (rows, length), generator=generator).tolist()


def requests(rows: int, method: Method, budget: int | None, tokens: int) -> list[SamplingParams]:
    """Greedy, to the last token; each row has a seed, and so simulated lots, of its own. budget None: the engine's."""
    return [
        SamplingParams(max_tokens=tokens, ignore_eos=True, seed=1 + row, method=method, budget=budget)
        for row in range(rows)
    ]


def shape_for(engine: Engine, rows: int, nodes: int, sampler: str = "argmax") -> RoundShape:
    """The shape that the engine runs for `rows` rows of a fixed budget."""
    block = engine.limits.max_block if nodes else 0
    return engine.runner.fit(RoundShape(rows, rows * (nodes + 1), block, nodes, sampler))


# ---- floors -----------------------------------------------------------------------------------------------


def _num_bytes(network: nn.Module, *skipped: nn.Module) -> int:
    skip = {id(p) for module in skipped for p in module.parameters()}
    return sum(p.numel() * p.element_size() for p in network.parameters() if id(p) not in skip)


def floor_bytes(target: Decoder, drafter: DFlash | None, rows: int, context: int) -> dict[str, int]:
    """Bytes that a round must read, by part. A table of embeddings is read by the row, so only a head counts."""
    size = target.embed.weight.element_size()
    head = target.head_weight.numel() * size
    parts = {"target": _num_bytes(target, *([] if target.head is None else [target.head]), target.embed) + head}
    config = target.config
    parts["cache"] = rows * context * config.num_layers * 2 * config.num_kv_heads * config.head_dim * size
    if drafter is not None:
        own = drafter.config
        parts["drafter"] = _num_bytes(drafter) + head
        parts["draft_cache"] = rows * context * own.num_layers * 2 * own.num_kv_heads * own.head_dim * size
    return parts


def floor_ms(parts: dict[str, int], bytes_per_s: float) -> float:
    """Milliseconds to read them once."""
    return 1e3 * sum(parts.values()) / bytes_per_s


# ---- steady rounds ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Steady:
    """Rounds of an engine that nobody joins or leaves. `state`: what rounds read and change, copied at their start."""

    wall_ms: float
    rounds: int
    tokens: int
    shape: RoundShape
    state: dict[str, Tensor]


def steady(
    engine: Engine, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], shape: RoundShape, rounds: int
) -> Steady:
    """Wall time of at least `rounds` rounds after a warm-up, from device idle to device idle; then all is dropped.

    RuntimeError where a request ends sooner.
    """
    runner, tokens, begun, first = engine.runner, 0, 0.0, -1
    before, state = runner.num_launched, {}
    stream = engine.stream(list(prompts), list(params))
    try:
        for event in stream:
            if event.output is not None:
                raise RuntimeError("a request ended before the measured rounds did: raise max_tokens")
            if first < 0 and runner.num_launched - before >= WARM_ROUNDS:
                state, first = snapshot(engine), runner.num_launched
                sync(runner.device)
                begun = time.perf_counter()
            elif first >= 0:
                tokens += len(event.token_ids)
                if runner.num_launched - first >= rounds:
                    break
        sync(runner.device)
        wall_ms, num_rounds = 1e3 * (time.perf_counter() - begun), runner.num_launched - first
    finally:
        stream.close()
    return Steady(wall_ms, num_rounds, tokens, shape, state)


def snapshot(engine: Engine) -> dict[str, Tensor]:
    """Copies of inputs and state, ordered after the rounds launched so far. K/V stay: rounds that run again write them
    again."""
    table = engine.runner.table
    return {name: table[name].clone() for name in table.names("input", "state")}


class Replay:
    """The rounds of a `Steady` once more, without an engine around them. Use it before the engine's next request."""

    def __init__(self, engine: Engine, run: Steady) -> None:
        runner = engine.runner
        if runner.graphs is None:
            raise RuntimeError(f"mode {engine.mode} has no graphs to replay")
        key = runner.key_of(run.shape)
        keys = key.staged() if runner.mode == "staged" else (key,)
        self.run, self.device, self.table = run, runner.device, runner.table
        self._graphs = [runner.graphs.captured(key).graph for key in keys]
        self._backend = runner.graphs.backend

    def restore(self) -> None:
        """Back to the first of the rounds."""
        for name, value in self.run.state.items():
            self.table[name].copy_(value)
        sync(self.device)

    def round(self) -> None:
        """Queues one round."""
        for graph in self._graphs:
            self._backend.replay(graph)

    def graph_ms(self) -> float:
        """Milliseconds of all rounds, replayed back to back."""
        self.restore()
        clock = Clock(self.device)
        clock.mark()
        for _ in range(self.run.rounds):
            self.round()
        clock.mark()
        return clock.spans_ms()[0]

    def stage_ms(self) -> list[float]:
        """Median milliseconds of each graph of a round."""
        self.restore()
        spans: list[list[float]] = []
        for _ in range(self.run.rounds):
            clock = Clock(self.device)
            clock.mark()
            for graph in self._graphs:
                self._backend.replay(graph)
                clock.mark()
            spans.append(clock.spans_ms())
        return [statistics.median(stage) for stage in zip(*spans, strict=True)]

    def kernels(self, rounds: int = 4, most: int = 12) -> dict[str, Any] | None:
        """Device launches per round, their time, and the longest by name; None without a GPU."""
        if self.device.type != "cuda":
            return None
        self.restore()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for _ in range(rounds):
                self.round()
            sync(self.device)
        events = [e for e in profile.events() or [] if e.device_type == DeviceType.CUDA]
        count, us = Counter(e.name for e in events), Counter()
        for event in events:
            us[event.name] += event.time_range.elapsed_us()
        longest = [(name[:60], count[name] / rounds, round(us[name] / rounds, 1)) for name, _ in us.most_common(most)]
        return {
            "launches": len(events) / rounds,
            "busy_ms": sum(us.values()) / rounds / 1e3,
            "longest": [{"name": name, "times": times, "us": spent} for name, times, spent in longest],
        }


class Clock:
    """Marks on the device's own time line (on a CPU the host's)."""

    def __init__(self, device: torch.device) -> None:
        self._on_cuda = device.type == "cuda"
        self._marks: list[Any] = []

    def mark(self) -> None:
        """Queues a mark."""
        if not self._on_cuda:
            self._marks.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._marks.append(event)

    def spans_ms(self) -> list[float]:
        """Milliseconds between neighbouring marks; waits for the last."""
        pairs = list(zip(self._marks, self._marks[1:], strict=False))
        if not self._on_cuda:
            return [1e3 * (after - before) for before, after in pairs]
        self._marks[-1].synchronize()
        return [before.elapsed_time(after) for before, after in pairs]


# ---- throughput -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Throughput:
    """`rows` requests of `long` tokens minus the same of `short`: prefill and joining cancel out."""

    tok_s: float
    round_ms: float
    tau: float
    num_tokens: int


def throughput(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    method: Method,
    budget: int | None,
    short: int,
    long: int,
    repeats: int,
) -> Throughput:
    """The median of `repeats` differences, by tok/s; one short run goes before them."""
    _batch(engine, prompts, method, budget, short)
    found = []
    for _ in range(repeats):
        brief = _batch(engine, prompts, method, budget, short)
        full = _batch(engine, prompts, method, budget, long)
        found.append(_difference(brief, full))
    return sorted(found, key=lambda run: run.tok_s)[len(found) // 2]


@dataclass(frozen=True)
class _Batch:
    seconds: float
    launched: int
    tokens: int
    row_rounds: int


def _batch(engine: Engine, prompts: Sequence[Sequence[int]], method: Method, budget: int | None, tokens: int) -> _Batch:
    launched, begun = engine.runner.num_launched, time.perf_counter()
    outputs = engine.generate(list(prompts), requests(len(prompts), method, budget, tokens))
    seconds = time.perf_counter() - begun
    num_tokens = sum(len(output.token_ids) for output in outputs)
    row_rounds = sum(output.rounds for output in outputs)
    return _Batch(seconds, engine.runner.num_launched - launched, num_tokens, row_rounds)


def _difference(brief: _Batch, full: _Batch) -> Throughput:
    seconds, tokens = full.seconds - brief.seconds, full.tokens - brief.tokens
    return Throughput(
        tok_s=tokens / seconds,
        round_ms=1e3 * seconds / (full.launched - brief.launched),
        tau=tokens / (full.row_rounds - brief.row_rounds),
        num_tokens=tokens,
    )
