# Owns: how a set of prompts is run and timed, and the record that comes of it (definitions: METHOD.md section 5).
# Promises: every method's record holds the same fields; what a mode cannot tell is null, never a guess.
# Never: compares runs of different prompts, dtypes or concurrency.
"""Measuring: `measure` runs prompts through an engine, `record` makes the JSON object of one cell."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ratoon.core.request import Budget, Method, RequestOutput, SamplingParams, compare, near_tie_bound
from ratoon.lab.acceptance import accept_per_position, tau, until_repeat, until_stop
from ratoon.lab.memory import peak_bytes, reset_peak
from ratoon.lab.prompts import Prompt, random_ids
from ratoon.lab.provenance import git_commit, versions

if TYPE_CHECKING:
    from ratoon.runtime.engine import Engine, StreamEvent

Watch = Callable[["StreamEvent"], None]

STAGES = ("draft", "build", "verify", "accept", "commit", "draft_build", "accept_commit")
WARM_UP_TOKENS = 16
PERCENTILES = (50, 95, 99)


@dataclass(frozen=True)
class Cell:
    """One configuration of the matrix. `budget` and `topk_cap` mean nothing to ar, `topk_cap` nothing to a chain.

    Method 'server': what a server does, measured over HTTP. `cut`: whether an answer ends at its prompt's stop strings.
    """

    method: Method | Literal["server"]
    budget: Budget
    topk_cap: int
    concurrency: int
    temperature: float = 0.0
    seed: int = 0
    max_tokens: int = 256
    cut: bool = True
    ignore_eos: bool = False

    @property
    def name(self) -> str:
        if self.method in ("ar", "server"):
            return self.method
        cap = f" cap {self.topk_cap}" if self.method == "tree" else ""
        return f"{self.method} {self.budget}{cap}"

    def params(self, stop: tuple[str, ...]) -> SamplingParams:
        assert self.method != "server", "a server is asked in lab/endpoint.py"
        return SamplingParams(
            temperature=self.temperature,
            seed=self.seed,
            stop=stop if self.cut else (),
            max_tokens=self.max_tokens,
            ignore_eos=self.ignore_eos,
            method=self.method,
            budget=0 if self.method == "ar" else self.budget,
            topk_cap=self.topk_cap if self.method == "tree" else None,
        )


@dataclass(frozen=True)
class Run:
    """Outputs in the order of the prompts, and the wall time of the whole set (prefill included)."""

    outputs: tuple[RequestOutput, ...]
    wall_s: float

    @property
    def num_tokens(self) -> int:
        return sum(len(output.token_ids) for output in self.outputs)

    @property
    def tok_s(self) -> float:
        return self.num_tokens / self.wall_s

    def kept(self) -> dict[str, Any]:
        """What `of` makes it of again, for JSON."""
        return {"wall_s": self.wall_s, "outputs": [asdict(output) for output in self.outputs]}

    @classmethod
    def of(cls, kept: Mapping[str, Any]) -> Run:
        def output(fields: Mapping[str, Any]) -> RequestOutput:
            tuples: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in fields.items()}
            return RequestOutput(**tuples)

        return cls(tuple(output(fields) for fields in kept["outputs"]), kept["wall_s"])


@dataclass(frozen=True)
class Measured(Run):
    """A run with its prompts and what was seen of it; mean stage times.

    `ttft_s` counts from when a prompt was let in: one that waits for a free row is not late. `itl_s`: seconds between
    tokens, those of one round sharing its time. `peak_bytes`: runtime memory while it ran, None where unknown.
    """

    prompts: tuple[Prompt, ...]
    ttft_s: tuple[float, ...]
    itl_s: tuple[float, ...]
    stage_ms: Mapping[str, float]
    rounds: int
    fallbacks: Mapping[str, int]
    peak_bytes: int | None


def encode(engine: Engine, prompt: Prompt) -> list[int]:
    """Token ids of a raw text, of messages through the chat template, or random ones."""
    if prompt.num_random:
        return random_ids(prompt, engine.vocab_size)
    if prompt.messages:
        return engine.tokenizer.encode_chat(prompt.messages)
    return engine.tokenizer.encode(prompt.text)


def measure(engine: Engine, prompts: Sequence[Prompt], cell: Cell, watch: Watch | None = None) -> Measured:
    """Runs `prompts`, at most `cell.concurrency` at a time. `watch` sees each stream event."""
    ids = [encode(engine, prompt) for prompt in prompts]
    before = engine.counters()
    reset_peak(engine.device)
    begun = time.perf_counter()
    outputs: list[RequestOutput] = []
    ttft_s: list[float] = []
    itl_s: list[float] = []
    # One call serves prompts that share their stop strings; a set has one group, the demo two.
    for stop, group in groupby(range(len(prompts)), key=lambda i: prompts[i].stop):
        stream = _Stream(cell.concurrency, watch)
        stream.run(engine, [ids[i] for i in group], cell.params(stop))
        outputs += [stream.outputs[i] for i in sorted(stream.outputs)]
        ttft_s += stream.ttft_s()
        itl_s += stream.itl_s
    wall_s = time.perf_counter() - begun
    after = engine.counters()
    return Measured(
        prompts=tuple(prompts),
        outputs=tuple(outputs),
        wall_s=wall_s,
        ttft_s=tuple(ttft_s),
        itl_s=tuple(itl_s),
        stage_ms=_stage_ms(before, after),
        rounds=int(after.get("rounds", 0) - before.get("rounds", 0)),
        fallbacks=_fallbacks(before, after),
        peak_bytes=peak_bytes(engine.device),
    )


class _Stream:
    """One call of the engine, with the moments at which requests were let in and answered."""

    def __init__(self, concurrency: int, watch: Watch | None) -> None:
        self.concurrency, self.watch = concurrency, watch
        self.outputs: dict[int, RequestOutput] = {}
        self.itl_s: list[float] = []
        self._first: dict[int, float] = {}
        self._last: dict[int, float] = {}
        self._room: list[float] = []

    def run(self, engine: Engine, ids: list[list[int]], params: SamplingParams) -> None:
        self._room = [time.perf_counter()] * self.concurrency
        for event in engine.stream(ids, params):
            now = time.perf_counter()
            self._first.setdefault(event.index, now)
            self._note_gap(event, now)
            if event.output is not None:
                self.outputs[event.index] = event.output
                self._room.append(now)
            if self.watch:
                self.watch(event)

    def _note_gap(self, event: StreamEvent, now: float) -> None:
        """The tokens of one event came together: each took its share of the time since the event before."""
        if not event.token_ids:
            return
        if event.index in self._last:
            self.itl_s += [(now - self._last[event.index]) / len(event.token_ids)] * len(event.token_ids)
        self._last[event.index] = now

    def ttft_s(self) -> list[float]:
        """The engine lets requests in first come, first served: the i-th when the i-th room became free."""
        return [self._first[i] - self._room[i] for i in sorted(self.outputs)]


def _stage_ms(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    rounds = after.get("rounds", 0) - before.get("rounds", 0)
    spent = {stage: after.get(f"ms_{stage}", 0.0) - before.get(f"ms_{stage}", 0.0) for stage in STAGES}
    return {stage: ms / rounds for stage, ms in spent.items() if rounds and f"ms_{stage}" in after}


def _fallbacks(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, int]:
    """Those that happened, by name."""
    since = {key: int(after[key] - before.get(key, 0)) for key in after if key.startswith("fallback")}
    return {key.removeprefix("fallback_"): count for key, count in since.items() if count}


def percentiles_ms(name: str, seconds: Sequence[float]) -> dict[str, float | None]:
    """Percentiles in milliseconds; None where nothing was timed."""
    values = np.percentile(seconds, PERCENTILES) * 1000 if len(seconds) else [None] * len(PERCENTILES)
    return {f"{name}_ms_p{p}": _rounded(value) for p, value in zip(PERCENTILES, values, strict=True)}


def _graph_share(engine: Engine, measured: Measured) -> float | None:
    """Share of the rounds that ran in a graph."""
    if engine.mode not in ("graph", "staged"):
        return 0.0
    return _rounded(1 - measured.fallbacks.get("no_graph", 0) / measured.rounds) if measured.rounds else None


def warm_up(engine: Engine, cell: Cell, num_random: int = 0) -> None:
    """A few rounds of the cell's own kind, so that what is done once is not timed; on random ids where they are."""
    text = "" if num_random else "def add(a, b):\n    return"
    prompts = [Prompt(f"warm-up/{i}", "code", text, num_random=num_random) for i in range(cell.concurrency)]
    ids = [encode(engine, prompt) for prompt in prompts]
    engine.generate(ids, replace(cell, max_tokens=min(WARM_UP_TOKENS, cell.max_tokens)).params(()))


def settings(
    cell: Cell, model: str, drafter: str | None, mode: str | None, dtype: str | None, device: str | None, prompts: int
) -> dict[str, Any]:
    """What a record says of its cell, whatever became of it."""
    speculative = cell.method != "ar"
    return {
        "model": model,
        "drafter": drafter if speculative else None,
        "method": cell.method,
        "budget": cell.budget if speculative else 0,
        "topk_cap": cell.topk_cap if cell.method == "tree" else None,
        "concurrency": cell.concurrency,
        "mode": mode,
        "dtype": dtype,
        "device": device,
        "temperature": cell.temperature,
        "max_tokens": cell.max_tokens,
        "cut": cell.cut,
        "prompts": prompts,
    }


def record(
    engine: Engine,
    cell: Cell,
    measured: Measured,
    reference: Run | None,
    simulated: str | float | None = None,
) -> dict[str, Any]:
    """The bench record. `reference`: the autoregressive run of the same prompts, or None where there was none.

    `simulated` acceptance ('table' or a fixed mean) writes what the lots say, so its tokens are compared with nothing.
    """
    outputs = measured.outputs
    compared = reference if simulated is None else None
    divergences = _divergences(measured, compared, engine.dtype) if compared else []
    verdicts = [divergence["verdict"] for divergence in divergences]
    return {
        **settings(cell, engine.model, engine.drafter, engine.mode, engine.dtype, engine.device, len(outputs)),
        "simulated": simulated,
        "output_tokens": measured.num_tokens,
        "tok_s": round(measured.tok_s, 2),
        "speedup_vs_ar": round(measured.tok_s / reference.tok_s, 3) if reference else None,
        "tau": tau(outputs),
        "tau_cut": _tau_cut(engine, measured),
        "tau_no_repeat": tau(outputs, [until_repeat(output) for output in outputs]),
        "accept_per_position": accept_per_position(outputs),
        "identical_prompts": len(outputs) - len(verdicts) if compared else None,
        "near_tie_prompts": verdicts.count("near_tie") if compared else None,
        "mismatched_prompts": verdicts.count("mismatch") if compared else None,
        "divergences": divergences,
        **{f"ms_{stage}": _rounded(measured.stage_ms.get(stage)) for stage in STAGES},
        "ttft_ms": round(1000 * float(np.median(measured.ttft_s)), 2),
        **percentiles_ms("ttft", measured.ttft_s),
        **percentiles_ms("itl", measured.itl_s),
        "peak_memory_bytes": measured.peak_bytes,
        "rounds": measured.rounds,
        "graph_share": _graph_share(engine, measured),
        "fallbacks": sum(measured.fallbacks.values()),
        "fallbacks_by_name": dict(measured.fallbacks),
        "git_commit": git_commit(),
        "versions": versions(),
    }


def _tau_cut(engine: Engine, measured: Measured) -> float | None:
    """tau of the texts cut at their prompts' stop strings; None where no prompt has any."""
    if not any(prompt.stop for prompt in measured.prompts):
        return None

    def decode(ids: list[int]) -> str:
        return engine.tokenizer.decode(ids)

    pairs = zip(measured.prompts, measured.outputs, strict=True)
    return tau(measured.outputs, [until_stop(output, prompt.stop, decode) for prompt, output in pairs])


def _divergences(measured: Measured, reference: Run, dtype: str) -> list[dict[str, Any]]:
    """Where texts leave the autoregressive ones: prompt, index of the token, AR's gaps and their bound there."""
    found = []
    for prompt, ours, theirs in zip(measured.prompts, reference.outputs, measured.outputs, strict=True):
        comparison = compare(ours, theirs, dtype)
        if comparison.index is None:
            continue
        place = min(comparison.index, len(ours.gaps) - 1)
        found.append(
            {
                "prompt": prompt.id,
                "verdict": comparison.verdict,
                "index": comparison.index,
                "gap": _finite(ours.gaps, place),
                "third_gap": _finite(ours.third_gaps, place),
                "bound": near_tie_bound(ours.top_logits[place], dtype),
            }
        )
    return found


def _finite(gaps: Sequence[float], place: int) -> float | None:
    """A gap, or None where there is none: JSON knows no infinity."""
    return round(gaps[place], 6) if place < len(gaps) and math.isfinite(gaps[place]) else None


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(float(value), 3)
