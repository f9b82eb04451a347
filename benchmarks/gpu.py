# Owns: the pieces of `make bench-gpu`: which cases there are, what each of them runs.
# Promises: a case that is done is not run again; what fails is written down and the next case runs.
# Never: averages runs of different commits in silence: every line of the results names its own.
"""Measurements of true shapes on a GPU (benchmarks/README.md).

python -m benchmarks.gpu [--piece NAME] [--again] [--list] [--toy]
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

import benchmarks.limits as limits
from benchmarks.results import Results, pack_cache, provenance, report, unpack_cache
from ratoon.core.request import Method
from ratoon.lab.gpu_bench import Replay, floor_bytes, random_prompts, requests, shape_for, steady, throughput
from ratoon.lab.prompts import load_prompts
from ratoon.lab.record import Cell, Measured, measure, record, warm_up
from ratoon.models.decoder import Decoder
from ratoon.models.dflash import DFlash
from ratoon.models.hub import drafter_for, resolve
from ratoon.models.random import drafter_shape, random_decoder, random_drafter, target_shape
from ratoon.models.weights import load_drafter, load_model
from ratoon.runtime.engine import Engine
from ratoon.runtime.graphs import Level
from ratoon.runtime.text import Tokenizer
from ratoon.spec.ddtree import build_tree, expected_tau
from ratoon.spec.simulate import AcceptanceTable, Simulation
from ratoon.spec.state import RoundShape

CONFIGS = Path(__file__).parent / "configs"
CAP = 16
STAGES = ("draft_build", "verify", "accept_commit")


@dataclass(frozen=True)
class Scale:
    """Sizes of a run. plain, drafted: new tokens of a long and a short request without and with drafting."""

    device: str
    dtype: torch.dtype
    models: dict[str, tuple[str, str]]
    budgets: tuple[int, ...] = (15, 31, 63)
    chain: int = 15
    rounds: int = 220
    context: int = 1024
    contexts: tuple[int, ...] = (128, 1024)
    concurrency: tuple[int, ...] = (1, 8, 32, 128)
    plain: tuple[int, int] = (272, 16)
    drafted: tuple[int, int] = (544, 32)
    tau: float = 6.5
    repeats: int = 3
    text_tokens: int = 256
    text_len: int = 4096
    text_prompts: int = 16
    limit_rows: tuple[int, ...] = (1, 8, 16, 32, 64, 128)
    births: Level = "quick"


FULL = Scale(
    "cuda",
    torch.bfloat16,
    {
        "qwen3-8b": ("qwen3-8b.json", "qwen3-8b-dflash-b16.json"),
        "smollm2": ("smollm2-135m.json", "smollm2-135m-dflash-b16.json"),
    },
)
TOY = Scale(
    "cpu",
    torch.float32,
    dict.fromkeys(FULL.models, ("toy.json", "toy-dflash-b8.json")),
    budgets=(7, 15),
    chain=7,
    rounds=6,
    context=64,
    contexts=(8, 24),
    concurrency=(1, 2),
    plain=(12, 4),
    drafted=(16, 6),
    tau=4.5,
    repeats=1,
    text_tokens=8,
    text_len=512,
    text_prompts=1,
    limit_rows=(1, 2),
    births="off",
)

Run = Callable[[], dict[str, Any]]


@dataclass(frozen=True)
class Pair:
    """Networks, and a tokenizer where there is one."""

    target: Decoder
    drafter: DFlash
    tokenizer: Tokenizer | None = None


class Bench:
    """Networks, built when first asked for (one pair at a time), and engines over them."""

    def __init__(self, scale: Scale, run_ahead: int | None, smollm2: str) -> None:
        self.scale, self.run_ahead, self.smollm2 = scale, run_ahead, smollm2
        self.device = torch.device(scale.device)
        self._name, self._pair = "", None

    def pair(self, model: str) -> Pair:
        """Random weights of a shape, or 'text': SmolLM2 and its drafter."""
        if self._pair is None or self._name != model:
            self._pair = None
            self._free()
            self._name, self._pair = model, self._real() if model == "text" else self._random(model)
        return self._pair

    def _random(self, model: str) -> Pair:
        target, drafter = (CONFIGS / name for name in self.scale.models[model])
        dtype = self.scale.dtype
        return Pair(
            random_decoder(target_shape(target), dtype, self.device),
            random_drafter(drafter_shape(drafter), dtype, self.device, seed=1),
        )

    def _real(self) -> Pair:
        path, drafter = resolve(self.smollm2), drafter_for("smollm2")
        target = load_model(path, self.scale.dtype, self.device)
        if drafter is None:
            raise ValueError("no drafter is known for smollm2")
        net = load_drafter(drafter, self.scale.dtype, self.device, target.config)
        return Pair(target, net, Tokenizer.load(path))

    @contextmanager
    def engine(
        self,
        model: str,
        method: Method,
        budget: int | None,
        shapes: Sequence[RoundShape] | None,
        rows: int,
        length: int,
        simulation: Simulation | None,
        mode: str = "graph",
    ) -> Iterator[Engine]:
        """An engine that opens `shapes` (None: its own choice) for `rows` rows of up to `length` tokens; ar gets no
        drafter. budget None: auto."""
        pair, page = self.pair(model), 16
        self._free()
        most = min(length, pair.target.config.max_position)
        engine = Engine.from_parts(
            pair.target,
            None if method == "ar" else pair.drafter,
            pair.tokenizer,
            name=model,
            simulation=simulation,
            shapes=shapes,
            cache_tokens=rows * (most + 128 + page),
            method=method,
            budget="auto" if budget is None else budget,
            topk_cap=CAP,
            mode=mode,
            max_rows=rows,
            max_model_len=most,
            page_size=page,
            run_ahead=self.run_ahead,
            # Runs repeat their prompts, and a row that yields would be no steady state.
            enable_prefix_caching=False,
            admission="worst-case",
            # The test of 128 rows copies and poisons tens of gigabytes of cache; tests/gpu make it at small sizes.
            birth_test=self.scale.births if rows <= 8 else "off",
        )
        try:
            yield engine
        finally:
            engine.close()

    def _free(self) -> None:
        """Caches of the engine before, which its own case still held when it closed."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def table(self, model: str) -> Simulation:
        return Simulation.of_table(self.pair(model).drafter.config.num_drafts, self.device)

    def shape(self, model: str, rows: int, nodes: int, sampler: str = "argmax") -> RoundShape:
        block = self.pair(model).drafter.config.block_size if nodes else 0
        return RoundShape(rows, rows * (nodes + 1), block, nodes, sampler)

    def vocab(self, model: str) -> int:
        return self.pair(model).target.config.vocab_size


# ---- cases ------------------------------------------------------------------------------------------------


def table_tau(block: int, budget: int, cap: int) -> float:
    """What the simulated table makes of a tree, exactly."""
    if not budget:
        return 1.0
    logprob_LK = AcceptanceTable().logprobs(block - 1, CAP)
    return expected_tau(build_tree(logprob_LK, np.zeros(logprob_LK.shape), budget, cap))


def rounds_case(bench: Bench, model: str, method: Method, budget: int, mode: str = "graph") -> dict[str, Any]:
    """Rounds of one row whose context is the scale's in the middle of the measurement."""
    scale = bench.scale
    tau = table_tau(bench.pair(model).drafter.config.block_size, budget, 1 if method == "chain" else CAP)
    prompt_len = max(scale.context - int(scale.rounds / 2 * tau), 16)
    tokens = int((scale.rounds + 60) * tau * 1.3) + 64
    simulation = None if method == "ar" else bench.table(model)
    shapes = [bench.shape(model, 1, budget)]
    with bench.engine(model, method, budget, shapes, 1, prompt_len + tokens + 8, simulation, mode) as engine:
        prompts = random_prompts(1, prompt_len, bench.vocab(model))
        asked = requests(1, method, budget, tokens)
        run = steady(engine, prompts, asked, shape_for(engine, 1, budget), scale.rounds)
        replay = Replay(engine, run)
        found: dict[str, Any] = {"rounds": run.rounds, "prompt_len": prompt_len, "tau": run.tokens / run.rounds}
        if mode == "staged":
            spans = dict(zip(STAGES, replay.stage_ms(), strict=True))
            return {**found, "stage_ms": spans, "round_ms": run.wall_ms / run.rounds}
        graph_ms = replay.graph_ms()
        found |= {
            "expected_tau": tau,
            "round_ms": run.wall_ms / run.rounds,
            "graph_ms": graph_ms / run.rounds,
            "gap_us": 1e3 * (run.wall_ms - graph_ms) / run.rounds,
            "idle": 1 - graph_ms / run.wall_ms,
            "kernels": replay.kernels(),
        }
    pair = bench.pair(model)
    return found | {"floor_bytes": floor_bytes(pair.target, pair.drafter if budget else None, 1, scale.context)}


def protocol_case(
    bench: Bench, model: str, rows: int, method: Method, budget: int | None, prompt_len: int
) -> dict[str, Any]:
    """Tokens a second by the protocol of NUMBERS section 2. budget None: auto, judged on the table."""
    scale = bench.scale
    long, short = scale.plain if method == "ar" else scale.drafted
    drafts = bench.pair(model).drafter.config.num_drafts
    simulation: Simulation | None = None
    shapes: list[RoundShape] | None = [bench.shape(model, rows, budget or 0)]
    if budget is None:
        simulation, shapes = bench.table(model), None
    elif method != "ar":
        simulation = Simulation.of_tau(scale.tau, drafts, bench.device)
    with bench.engine(model, method, budget, shapes, rows, prompt_len + long + 8, simulation) as engine:
        prompts = random_prompts(rows, prompt_len, bench.vocab(model))
        before = engine.counters()
        found = throughput(engine, prompts, method, budget, short, long, scale.repeats)
        counts = {key: value - before.get(key, 0) for key, value in engine.counters().items()}
    counted = {key: value for key, value in counts.items() if key.startswith(("bucket_", "fallback_")) and value}
    return {"tok_s": found.tok_s, "round_ms": found.round_ms, "tau": found.tau, "rows": rows, "counters": counted}


def text_case(bench: Bench, source: str, temperature: float) -> dict[str, Any]:
    """SmolLM2 and its drafter on real prompts: every method against plain decoding in this same run."""
    scale = bench.scale
    prompts = load_prompts(source, scale.text_prompts)
    sampler = "argmax" if temperature == 0 else "general"
    methods: list[tuple[Method, int]] = [("ar", 0), ("chain", scale.chain)]
    methods.extend(("tree", n) for n in scale.budgets)
    rows: list[dict[str, Any]] = []
    reference: Measured | None = None
    for method, budget in methods:
        shapes = [bench.shape("text", 1, budget, sampler)]
        cell = Cell(method, budget, CAP, 1, temperature, 0, scale.text_tokens)
        with bench.engine("text", method, budget, shapes, 1, scale.text_len, None) as engine:
            warm_up(engine, cell)
            measured = measure(engine, prompts, cell)
            reference = measured if method == "ar" else reference
            rows.append(record(engine, cell, measured, reference))
    return {"rows": rows}


def limits_case(bench: Bench) -> dict[str, Any]:
    config = target_shape(CONFIGS / bench.scale.models["qwen3-8b"][0])
    return limits.measure(config, bench.scale.limit_rows, bench.device, bench.scale.dtype)


def pieces(bench: Bench) -> dict[str, Mapping[str, Run]]:
    """Every piece with its cases, in the order in which they run."""
    scale = bench.scale
    drafted: list[tuple[str, Method, int]] = [(f"chain-{scale.chain}", "chain", scale.chain)]
    drafted.extend((f"tree-{n}", "tree", n) for n in scale.budgets)
    found: dict[str, Mapping[str, Run]] = {"limits": {"limits": partial(limits_case, bench)}}
    for model in ("qwen3-8b", "smollm2"):
        found[f"{model}-rounds"] = {"ar": partial(rounds_case, bench, model, "ar", 0)} | {
            name: partial(rounds_case, bench, model, method, n) for name, method, n in drafted
        }
        found[f"{model}-stages"] = {
            name: partial(rounds_case, bench, model, method, n, "staged") for name, method, n in drafted
        }
    for rows in scale.concurrency:
        found[f"qwen3-8b-c{rows}"] = _protocol_cases(bench, "qwen3-8b", rows)
    found["smollm2-throughput"] = {
        f"ar-c{rows}": partial(protocol_case, bench, "smollm2", rows, "ar", 0, scale.contexts[0])
        for rows in scale.concurrency
    }
    found["smollm2-text"] = {
        f"{source}-t{temperature:g}": partial(text_case, bench, source, temperature)
        for source in ("humaneval", "mtbench")
        for temperature in (0.0, 1.0)
    }
    return found


def _protocol_cases(bench: Bench, model: str, rows: int) -> Mapping[str, Run]:
    scale, cases = bench.scale, {}
    methods: list[tuple[str, Method, int | None]] = [("ar", "ar", 0), ("chain", "chain", scale.chain)]
    methods.append(("auto", "tree", None))
    for length in scale.contexts:
        for name, method, budget in methods:
            cases[f"{name}@{length}"] = partial(protocol_case, bench, model, rows, method, budget, length)
    return cases


# ---- running ----------------------------------------------------------------------------------------------


def run_piece(results: Results, piece: str, cases: Mapping[str, Run], again: bool, until: float) -> None:
    """Cases of one piece that are not done yet, until the clock says stop."""
    for name, case in cases.items():
        if results.is_done(piece, name) and not again:
            continue
        if time.monotonic() > until:
            print(f"{piece}/{name}: left for the next run (--seconds)")
            continue
        begun = time.monotonic()
        try:
            found = case()
        except Exception as error:  # noqa: BLE001 (one broken case must not cost the others their device time)
            found = {"error": f"{type(error).__name__}: {error}"}
        results.add(piece, name, found, time.monotonic() - begun)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--piece", action="append", help="run this piece only (may be given several times)")
    parser.add_argument("--again", action="store_true", help="run what is done already")
    parser.add_argument("--list", action="store_true", help="list pieces and cases")
    parser.add_argument("--toy", action="store_true", help="a toy shape on the CPU: does everything run?")
    parser.add_argument("--out", type=Path, default=Path("build/bench-gpu"), help="folder of results.jsonl")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no case later than this")
    parser.add_argument("--run-ahead", type=int, help="default: the engine's own choice")
    parser.add_argument("--smollm2", default="smollm2", help="model of the text piece: smollm2 or a path")
    parser.add_argument("--cache-in", type=Path, help="tar of compiled kernels to begin with")
    parser.add_argument("--cache-out", type=Path, help="tar of compiled kernels to leave behind")
    parser.add_argument("--commit", help="commit to name where git is not at hand")
    given = parser.parse_args(arguments)
    if given.cache_in:
        unpack_cache(given.cache_in)
    bench = Bench(TOY if given.toy else FULL, given.run_ahead, given.smollm2)
    every = pieces(bench)
    unknown = [name for name in given.piece or () if name not in every]
    if unknown:
        parser.error(f"unknown piece {', '.join(unknown)}; there are {', '.join(every)}")
    if given.list:
        print("\n".join(f"{piece}: {' '.join(cases)}" for piece, cases in every.items()))
        return
    results = Results(given.out, provenance(given.commit, arguments))
    until = time.monotonic() + given.seconds
    try:
        for piece in given.piece or every:
            run_piece(results, piece, every[piece], given.again, until)
            if given.cache_out:
                pack_cache(given.cache_out)
    finally:
        print(report(results))


if __name__ == "__main__":
    main()
