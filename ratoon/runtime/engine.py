# Owns: the engine: loading a pair, resolving its settings, starting its loop; the ways to ask it for text.
# Promises: a request's tokens do not depend on its neighbours, the method or the run-ahead; nothing leaks.
# Never: prints; touches another request when one fails.
"""`Engine`: prompts in, text out."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from ratoon.core.request import Method, RequestOutput, SamplingParams
from ratoon.models.decoder import Decoder
from ratoon.models.dflash import DFlash
from ratoon.models.hub import drafter_for, resolve
from ratoon.models.layers import prepare
from ratoon.models.weights import load_config, load_drafter, load_model
from ratoon.runtime.background import Background
from ratoon.runtime.birth import check_births
from ratoon.runtime.chooser import Chooser
from ratoon.runtime.graphs import Level
from ratoon.runtime.intake import Intake, Prompt
from ratoon.runtime.kv import specs_of
from ratoon.runtime.loop import Loop, StreamEvent
from ratoon.runtime.pages import PagePool
from ratoon.runtime.plan import device_memory, fit_pages, memory_remedy, page_bytes, plan_memory
from ratoon.runtime.prefix import PrefixCache
from ratoon.runtime.rows import Row
from ratoon.runtime.runner import Runner
from ratoon.runtime.scheduler import Scheduler, Sizes
from ratoon.runtime.setup import (
    PREFILL_SIZE,
    Admission,
    Options,
    Settings,
    choose_device,
    choose_dtype,
    choose_method,
    choose_mode,
    choose_run_ahead,
    limits_for,
)
from ratoon.runtime.shapes import Estimate, auto_buckets, padded_shapes
from ratoon.runtime.text import Tokenizer
from ratoon.spec.simulate import Simulation
from ratoon.spec.state import Limits, RoundShape

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Statistics:
    """Requests that hold a seat and that wait, and pages of the cache: available (idle ones of the prefix cache
    included) of all."""

    num_running: int
    num_waiting: int
    available_pages: int
    num_pages: int


class Engine:
    """A target, its drafter, and rounds over up to `max_rows` requests at a time.

    model: 'smollm2', a directory, a .gguf file or a pulled hub id. drafter: 'auto' (the known one of the model, if
    any), 'none', or as for model. method 'tree', 'chain' or 'ar' (None or 'auto': tree with a drafter, else ar) and
    budget (drafted nodes a round, 'auto', 0 = AR) are defaults that a request may override. run_ahead: rounds launched
    before the oldest is read (None: 1 where a GPU replays graphs, else 0). gpu_memory_utilization: the share of a GPU
    that weights, caches and graphs may take. enable_prefix_caching: known beginnings of prompts are not computed
    again. chunked_prefill_size: prompt tokens computed between two rounds while others decode. admission: 'reserve'
    or 'worst-case' (runtime/setup.py `Options`). progress(what, done, total) follows capture, tests, measurements.
    Raises ValueError, FileNotFoundError or MemoryError with the remedy.
    """

    def __init__(
        self,
        model: str = "smollm2",
        *,
        drafter: str | None = "auto",
        method: Method | Literal["auto"] | None = None,
        budget: int | Literal["auto"] = "auto",
        topk_cap: int = 16,
        dtype: str = "auto",
        device: str = "auto",
        mode: str = "auto",
        max_rows: int = 8,
        max_model_len: int | None = None,
        page_size: int = 16,
        run_ahead: int | None = None,
        birth_test: Level = "quick",
        gpu_memory_utilization: float = 0.85,
        debug: bool = False,
        shapes: Sequence[RoundShape] | None = None,
        cache_tokens: int | None = None,
        enable_prefix_caching: bool = True,
        chunked_prefill_size: int | None = None,
        admission: Admission = "reserve",
        progress: Progress | None = None,
    ) -> None:
        options = Options(
            method=method,
            budget=budget,
            topk_cap=topk_cap,
            mode=mode,
            max_rows=max_rows,
            max_model_len=max_model_len,
            page_size=page_size,
            run_ahead=run_ahead,
            birth_test=birth_test,
            gpu_memory_utilization=gpu_memory_utilization,
            debug=debug,
            shapes=shapes,
            cache_tokens=cache_tokens,
            enable_prefix_caching=enable_prefix_caching,
            chunked_prefill_size=chunked_prefill_size,
            admission=admission,
        )
        where, path, draft_path = choose_device(device), resolve(model), _drafter_path(model, drafter)
        choose_method(method, draft_path is not None)
        kind, tokenizer = choose_dtype(dtype, where, load_config(path)), Tokenizer.load(path)
        with memory_remedy("loading the weights", "free the GPU, or choose a smaller model"):
            target = load_model(path, kind, where)
            network = load_drafter(draft_path, kind, where, target.config) if draft_path else None
        name = None if draft_path is None else draft_path.name if drafter == "auto" else str(drafter)
        self._start(target, network, tokenizer, (str(model), name), options, None, progress)

    @classmethod
    def from_parts(
        cls,
        target: Decoder,
        drafter: DFlash | None = None,
        tokenizer: Tokenizer | None = None,
        *,
        name: str = "parts",
        simulation: Simulation | None = None,
        progress: Progress | None = None,
        **options: Any,
    ) -> Engine:
        """An engine over networks that are in place. Without a tokenizer prompts are token ids and outputs have no
        text. options: those of `Engine` from `method` on."""
        engine, chosen = cls.__new__(cls), Options(**options)
        names = (name, name if drafter else None)
        engine._start(target, drafter, tokenizer, names, chosen, simulation, progress)
        return engine

    def _start(
        self,
        target: Decoder,
        drafter: DFlash | None,
        tokenizer: Tokenizer | None,
        names: tuple[str, str | None],
        options: Options,
        simulation: Simulation | None,
        progress: Progress | None,
    ) -> None:
        self._target, self._drafter, self._tokenizer = target, drafter, tokenizer
        config, where = drafter.config if drafter else None, target.embed.weight.device
        mode, method = choose_mode(options.mode, where), choose_method(options.method, drafter is not None)
        run_ahead = choose_run_ahead(options.run_ahead, where, mode)
        limits = limits_for(
            target.config,
            config,
            options,
            run_ahead=run_ahead,
            forecast=auto_buckets(config, where) if config else (),
            padded_on_cpu=where.type == "cpu" and mode != "eager",
            device=where.type,
        )
        self.settings = Settings(
            model=names[0],
            drafter=names[1],
            method=method,
            budget=None if options.budget == "auto" else options.budget,
            topk_cap=options.topk_cap,
            dtype=str(target.embed.weight.dtype).removeprefix("torch."),
            device=str(where),
            mode=mode,
            max_rows=options.max_rows,
            max_model_len=limits.max_model_len,
            page_size=options.page_size,
            run_ahead=run_ahead,
            birth_test=options.birth_test,
            gpu_memory_utilization=options.gpu_memory_utilization,
            enable_prefix_caching=options.enable_prefix_caching,
            chunked_prefill_size=options.chunked_prefill_size or PREFILL_SIZE[where.type],
            admission=options.admission,
        )
        self._intake = Intake(self.settings, limits, target.config, tokenizer, drafter is not None, simulation)
        shapes = self._shapes(limits, options)
        self.limits = self._plan(limits, shapes, fits=where.type == "cuda" and options.cache_tokens is None)
        if where.type == "cpu" and mode == "eager":
            target.prepare()
            if drafter:
                prepare(drafter)
        remedy = "lower max_rows or max_model_len, or gpu_memory_utilization, which leaves graphs more room"
        with memory_remedy("allocating caches and capturing graphs", remedy):
            self.runner = Runner(target, drafter, self.limits, where, mode, options.debug, simulation)
            self._chooser = Chooser(self.runner)
            self._open(shapes, options.birth_test, progress)
        self._loop = Loop(self.runner, self._chooser, self._scheduler())
        self._background: Background | None = None

    def _scheduler(self) -> Scheduler:
        limits, settings = self.limits, self.settings
        sizes = Sizes(
            max_rows=limits.max_rows,
            page_size=limits.page_size,
            scratch=limits.scratch,
            step=limits.max_depth + 1,
            prefill=settings.chunked_prefill_size,
        )
        cache = PrefixCache(PagePool(limits.num_pages), limits.page_size, settings.enable_prefix_caching)
        return Scheduler(sizes, cache, worst_case=settings.admission == "worst-case")

    def _shapes(self, limits: Limits, options: Options) -> Sequence[RoundShape]:
        """What padded modes open."""
        if self.settings.mode == "eager":
            return ()
        if options.shapes is not None:
            return options.shapes
        budget = 0 if self.settings.method == "ar" else self.settings.budget
        estimate = Estimate.of(self._target.config, self._drafter.config) if self._drafter else None
        return padded_shapes(limits, budget, self._target.embed.weight.device, estimate)

    def _plan(self, limits: Limits, shapes: Sequence[RoundShape], fits: bool) -> Limits:
        """Makes the memory plan; on a GPU with as many pages as fit."""
        configs = (self._target.config, self._drafter.config if self._drafter else None)
        weight = self._target.embed.weight

        def planned(limits: Limits):
            specs = specs_of(limits, *configs, weight.dtype)
            return plan_memory(self._target, self._drafter, configs[0], specs, shapes, limits)

        if fits:
            page = page_bytes(configs, limits.page_size, weight.dtype)
            share = self.settings.gpu_memory_utilization
            limits = fit_pages(limits, planned(limits), page, device_memory(weight.device), share)
        self.memory = planned(limits)
        return limits

    def _open(self, shapes: Sequence[RoundShape], level: Level, progress: Progress | None) -> None:
        """Padded modes: opens the shapes, captures, tests and measures them."""
        if self.settings.mode == "eager":
            return
        self.runner.capture(shapes, partial(progress, "capture") if progress else None)
        if self.runner.graphs is not None:
            check_births(self.runner, self.runner.shapes, level, partial(progress, "birth test") if progress else None)
        if self.settings.budget is None and self.settings.method != "ar":
            self._chooser.prepare()

    # ---- what it is -------------------------------------------------------------------------------------------

    @property
    def model(self) -> str:
        return self.settings.model

    @property
    def drafter(self) -> str | None:
        return self.settings.drafter

    @property
    def mode(self) -> str:
        return self.settings.mode

    @property
    def dtype(self) -> str:
        return self.settings.dtype

    @property
    def device(self) -> str:
        return self.settings.device

    @property
    def tokenizer(self) -> Tokenizer:
        """ValueError where the engine was made without one."""
        if self._tokenizer is None:
            raise ValueError("this engine has no tokenizer: it reads and gives token ids")
        return self._tokenizer

    @property
    def vocab_size(self) -> int:
        return self._target.config.vocab_size

    def describe(self) -> str:
        """The resolved settings and the memory plan, one entry per line."""
        return f"{self.settings.describe()}\n{self.memory.describe()}"

    @property
    def trace_trees(self) -> bool:
        """Whether events carry draft trees."""
        return self.runner.trace

    @trace_trees.setter
    def trace_trees(self, wanted: bool) -> None:
        self.runner.trace = wanted

    def counters(self) -> dict[str, float]:
        """Counts since start: rounds, tokens, `ms_*` of the stages, `fallback_*`, `bucket_*`, preemptions, and known
        tokens of seated requests (`prefix_asked_tokens`) and of them those that the prefix cache had."""
        own = {**self._loop.counters, **self._loop.scheduler.counts}
        return {**own, **self._chooser.counts, **self.runner.stage_ms, **self.runner.fallbacks}

    def statistics(self) -> Statistics:
        """What the engine is doing now."""
        scheduler = self._loop.scheduler
        cache = scheduler.cache
        return Statistics(scheduler.num_seated, scheduler.num_waiting, cache.num_available, cache.num_pages)

    def close(self) -> None:
        """Ends every request and frees the device's graphs and caches."""
        if self._background:
            self._background.close()
            self._background = None
        self._loop.abort_all()
        self.runner.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- generating -------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> list[RequestOutput]:
        """Finished outputs, in the order of the prompts (texts, or sequences of token ids).

        priority: lower goes first. A request that is not finished after timeout_s ends there, by 'abort'.
        """
        rows = self._intake.rows(prompts, params, priority, timeout_s)
        for row in rows:
            row.streams = False
        done = {event.index: event.output for event in self._serve(rows) if event.output is not None}
        return [done[index] for index in sorted(done)]

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> Generator[StreamEvent]:
        """Events as rounds end. Closing the iterator early aborts what is unfinished.

        All prompts are checked before the first runs: ValueError for an empty one, or one longer than the context.
        """
        return self._serve(self._intake.rows(prompts, params, priority, timeout_s))

    def _serve(self, rows: list[Row]) -> Generator[StreamEvent]:
        if self._background:
            raise RuntimeError("this engine serves asyncio callers: use stream_async, or an engine of its own")
        if self._loop.busy:
            raise RuntimeError("another stream is still open on this engine: finish it or close() it first")
        for row in rows:
            self._loop.submit(row)
        try:
            while self._loop.busy:
                for _, event in self._loop.turn():
                    yield event
        finally:
            self._loop.abort_all()

    async def stream_async(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> AsyncGenerator[StreamEvent]:
        """Events of one request, beside any number of others: `async for event in engine.stream_async(prompt)`.

        The first call starts a thread that turns the engine until `close`. Leaving the loop early, or cancelling the
        task, aborts the request. Raises as `stream` does.
        """
        [row] = self._intake.rows([prompt], params, priority, timeout_s)
        if self._background is None:
            if self._loop.busy:
                raise RuntimeError("another stream is still open on this engine: finish it or close() it first")
            self._background = Background(self._loop)
        async for event in self._background.stream(row):
            yield event


def _drafter_path(model: str, drafter: str | None) -> Path | None:
    if drafter in (None, "none"):
        return None
    return drafter_for(model) if drafter == "auto" else resolve(drafter)
