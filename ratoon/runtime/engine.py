# Owns: the engine: loading a pair, admitting requests, launching rounds, delivering text.
# Promises: a request's tokens do not depend on its neighbours, the method or the run-ahead; nothing leaks.
# Never: prints; touches another request when one fails.
"""`Engine`: prompts in, text out."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from numbers import Integral
from typing import Any, Literal, get_args

import torch

from ratoon.core.request import FinishReason, Method, RequestOutput, SamplingParams, batch_sampler_kind
from ratoon.core.tree import Tree
from ratoon.models.hub import drafter_for, resolve
from ratoon.models.layers import prepare
from ratoon.models.weights import load_config, load_drafter, load_model
from ratoon.runtime.birth import check_births
from ratoon.runtime.costs import measure_costs, measure_sampler
from ratoon.runtime.graphs import Level
from ratoon.runtime.pages import PagePool
from ratoon.runtime.rows import Row
from ratoon.runtime.runner import Launch, Runner
from ratoon.runtime.setup import (
    MAX_NODES,
    Settings,
    auto_buckets,
    choose_device,
    choose_dtype,
    choose_mode,
    limits_for,
    padded_shapes,
)
from ratoon.runtime.text import Tokenizer
from ratoon.spec.budget import PLAIN, BudgetPolicy
from ratoon.spec.state import RoundShape

Prompt = str | Sequence[int]
PREFILL_CHUNK = 512


@dataclass(frozen=True)
class StreamEvent:
    """News of one request. `output` comes with the last event; `tree` and `path` (accepted nodes, the root
    included) only while `Engine.trace_trees` is set."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    output: RequestOutput | None = None
    tree: Tree | None = None
    path: tuple[int, ...] = ()


class Engine:
    """A target, its drafter, and rounds over up to `max_rows` requests at a time.

    model: 'smollm2', a directory, a .gguf file or a pulled hub id. drafter: 'auto' (the known one of the model, if
    any), 'none', or as for model. method 'tree', 'chain' or 'ar' and budget (drafted nodes a round, 'auto', 0 = AR)
    are defaults that a request may override. Raises ValueError or FileNotFoundError with the remedy.
    """

    def __init__(
        self,
        model: str = "smollm2",
        *,
        drafter: str | None = "auto",
        method: Method = "tree",
        budget: int | Literal["auto"] = "auto",
        topk_cap: int = 16,
        dtype: str = "auto",
        device: str = "auto",
        mode: str = "auto",
        max_rows: int = 8,
        max_model_len: int | None = None,
        page_size: int = 16,
        run_ahead: int = 0,
        birth_test: Level = "quick",
        debug: bool = False,
        progress: Callable[[str, int, int], None] | None = None,
    ) -> None:
        if method not in get_args(Method):
            raise ValueError(f"method '{method}' is unknown: use {', '.join(get_args(Method))}")
        where = choose_device(device)
        path = resolve(model)
        kind = choose_dtype(dtype, where, load_config(path))
        self.tokenizer = Tokenizer.load(path)
        self._target = load_model(path, kind, where)
        self._drafter, drafter_path = self._load_drafter(model, drafter, method, kind, where)
        config = self._drafter.config if self._drafter else None
        if where.type == "cpu" and choose_mode(mode, where) == "eager":
            self._target.prepare()
            if self._drafter:
                prepare(self._drafter)
        forecast = auto_buckets(config, where) if config else ()
        chosen = choose_mode(mode, where)
        limits = limits_for(
            self._target.config,
            config,
            max_rows=max_rows,
            max_model_len=max_model_len,
            topk_cap=topk_cap,
            page_size=page_size,
            run_ahead=run_ahead,
            forecast=forecast,
            padded_on_cpu=where.type == "cpu" and chosen != "eager",
        )
        self.settings = Settings(
            model=str(model),
            drafter=drafter_path,
            method=method if self._drafter else "ar",
            budget=None if budget == "auto" else budget,
            topk_cap=topk_cap,
            dtype=str(kind).removeprefix("torch."),
            device=str(where),
            mode=chosen,
            max_rows=max_rows,
            max_model_len=limits.max_model_len,
            page_size=page_size,
            run_ahead=run_ahead,
            birth_test=birth_test,
        )
        self._check_budget(self.settings.budget, topk_cap)
        self.limits = limits
        self.runner = Runner(self._target, self._drafter, limits, where, chosen, debug)
        self._open_shapes(birth_test, progress)
        self._pages = PagePool(limits.num_pages)
        self._free_seats = list(range(max_rows, 0, -1))
        self._policy: BudgetPolicy | None = None
        self._place_ms: dict[str, float] = {"argmax": 0.0}
        self._waiting: deque[Row] = deque()
        self._rows: dict[int, Row] = {}
        self._in_flight: deque[Launch] = deque()
        self._counters: Counter[str] = Counter()

    def _load_drafter(self, model: str, drafter: str | None, method: str, kind: torch.dtype, where: torch.device):
        if drafter in (None, "none"):
            return None, None
        path = drafter_for(model) if drafter == "auto" else resolve(drafter)
        if path is None:
            return None, None
        return load_drafter(path, kind, where, self._target.config), str(drafter if drafter != "auto" else path.name)

    def _open_shapes(self, level: Level, progress: Callable[[str, int, int], None] | None) -> None:
        """Padded modes: opens the shapes, captures and tests them."""
        if self.settings.mode == "eager":
            return
        budget = 0 if self.settings.method == "ar" else self.settings.budget
        shapes = padded_shapes(self.limits, budget, torch.device(self.settings.device))
        self.runner.capture(shapes, partial(progress, "capture") if progress else None)
        if self.runner.graphs is not None:
            check_births(self.runner, self.runner.shapes, level)

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

    def describe(self) -> str:
        """The resolved settings, one per line."""
        return self.settings.describe()

    @property
    def trace_trees(self) -> bool:
        """Whether events carry draft trees."""
        return self.runner.trace

    @trace_trees.setter
    def trace_trees(self, wanted: bool) -> None:
        self.runner.trace = wanted

    def counters(self) -> dict[str, float]:
        """Counts since start: rounds, tokens, `ms_*` of the stages, `fallback_*`, `bucket_*`."""
        return {**self._counters, **self.runner.stage_ms, **self.runner.fallbacks}

    def close(self) -> None:
        """Ends every request and frees the device's graphs and caches."""
        self._abort_all()
        self.runner.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- generating -------------------------------------------------------------------------------------------

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[RequestOutput]:
        """Finished outputs, in the order of the prompts (texts, or sequences of token ids)."""
        done = {event.index: event.output for event in self.stream(prompts, params) if event.output is not None}
        return [done[index] for index in sorted(done)]

    def stream(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> Generator[StreamEvent]:
        """Events as rounds end. Closing the iterator early aborts what is unfinished.

        All prompts are checked before the first runs: ValueError for an empty one, or one longer than the context.
        """
        rows = self._submit(prompts, params)
        return self._serve(rows)

    def _submit(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[Row]:
        if isinstance(prompts, bytes) or not isinstance(prompts, str | Iterable):
            raise ValueError(f"prompts must be text, token ids, or a list of them, got {type(prompts).__name__}")
        several: list[Any] = [prompts] if isinstance(prompts, str) else list(prompts)
        if several and isinstance(several[0], Integral):
            several = [several]
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(several)
        if len(params) != len(several):
            raise ValueError(
                f"{len(several)} prompts but {len(params)} sampling parameters: give one for all, or one each"
            )
        return [self._row(i, p, q) for i, (p, q) in enumerate(zip(several, params, strict=True))]  # pyright: ignore

    def _ids(self, prompt: Prompt) -> tuple[int, ...]:
        """Token ids of a prompt; ValueError for what is neither text nor whole numbers."""
        if isinstance(prompt, str):
            return tuple(self.tokenizer.encode(prompt))
        if isinstance(prompt, bytes) or not isinstance(prompt, Iterable):
            raise ValueError(f"a prompt must be text or a sequence of token ids, got {type(prompt).__name__}")
        ids = tuple(prompt)
        odd = next((token for token in ids if isinstance(token, bool) or not isinstance(token, Integral)), None)
        if odd is not None:
            raise ValueError(f"a prompt must be text or a sequence of token ids, got {odd!r} as a token id")
        return tuple(int(token) for token in ids)

    def _row(self, index: int, prompt: Prompt, params: SamplingParams) -> Row:
        ids = self._ids(prompt)
        config = self._target.config
        if not ids:
            raise ValueError("the prompt is empty: give at least one token")
        if len(ids) >= self.limits.max_model_len:
            raise ValueError(
                f"the prompt has {len(ids)} tokens, but the context holds {self.limits.max_model_len} with room for "
                "at least one more: shorten the prompt or raise max_model_len"
            )
        if not all(0 <= token < config.vocab_size for token in ids):
            raise ValueError(f"the prompt has a token id outside of the vocabulary of {config.vocab_size}")
        params.check_vocabulary(config.vocab_size)
        if params.n != 1:
            raise ValueError(f"n is {params.n}, but a prompt gets one sample: repeat it with sample_index 0, 1, ...")
        method = params.method or self.settings.method
        if method != "ar" and self._drafter is None:
            raise ValueError(f"method '{method}' needs a drafter, and this engine has none: use method 'ar'")
        budget = self.settings.budget if params.budget is None else params.budget
        cap = self.settings.topk_cap if params.topk_cap is None else params.topk_cap
        self._check_budget(budget, cap)
        is_auto = budget is None and method != "ar"
        eos = () if params.ignore_eos else config.eos_ids + tuple(self.tokenizer.eos_ids)
        return Row(
            index=index,
            prompt=ids,
            params=params,
            stop_ids=tuple(dict.fromkeys((*eos, *params.stop_token_ids))),
            budget=0 if method == "ar" else self.limits.max_nodes if budget is None else budget,
            topk_cap=1 if method == "chain" else cap,
            is_auto=is_auto,
            tokenizer=self.tokenizer,
            submitted=time.perf_counter(),
        )

    def _check_budget(self, budget: int | None, cap: int) -> None:
        if budget is not None and not (isinstance(budget, Integral) and 0 <= budget <= MAX_NODES):
            raise ValueError(
                f"budget must be from 0 (autoregressive) to the engine's limit of {MAX_NODES}, got {budget!r}"
            )
        if self._drafter is None:
            return
        if cap < 0:
            raise ValueError(f"topk_cap must be at least 0 (0: uncapped), got {cap}")
        if cap > MAX_NODES:
            raise ValueError(f"topk_cap must be at most {MAX_NODES} (0: uncapped), got {cap}")
        own = self.settings.topk_cap
        if own and (cap == 0 or cap > own):
            raise ValueError(f"topk_cap {cap} exceeds this engine's {own}: start it with a larger topk_cap, or with 0")

    # ---- the loop ---------------------------------------------------------------------------------------------

    def _serve(self, rows: list[Row]) -> Generator[StreamEvent]:
        if self._waiting or self._rows:
            raise RuntimeError("another stream is still open on this engine: finish it or close() it first")
        self._waiting.extend(rows)
        try:
            while any(row.finish_reason is None for row in rows):
                self._admit()
                live = [row for row in self._rows.values() if row.finish_reason is None]
                assert live or self._in_flight, "requests wait for pages that no row holds: pages were lost"
                if live and len(self._in_flight) <= self.limits.run_ahead:
                    self._launch(live)
                if self._in_flight and (len(self._in_flight) > self.limits.run_ahead or not live):
                    yield from self._deliver(self._in_flight.popleft())
        finally:
            self._abort_all()

    def _admit(self) -> None:
        """Seats waiting requests while seats and pages last; pages cover the request's longest course."""
        while self._waiting and self._free_seats:
            row = self._waiting[0]
            longest = min(len(row.prompt) + row.params.max_tokens, self.limits.max_model_len)
            num_pages = -(-(longest + self.limits.scratch) // self.limits.page_size)
            if num_pages > self._pages.num_free:
                return
            self._waiting.popleft()
            row.seat, row.pages = self._free_seats.pop(), self._pages.take(num_pages)
            self._rows[row.seat] = row
            self._join(row, longest)

    def _join(self, row: Row, limit: int) -> None:
        params = row.params
        self.runner.join(
            row.seat,
            row.prompt,
            row.pages,
            params,
            row.stop_ids,
            params.seed_or_fresh(),
            limit,
            row.budget,
            row.topk_cap,
        )
        if row.is_auto:
            self._policy_of().join(row.seat)
        last = len(row.prompt) - 1
        for begin in range(0, last, PREFILL_CHUNK):
            self.runner.prefill(row.seat, row.prompt, begin, min(begin + PREFILL_CHUNK, last))

    def _launch(self, live: list[Row]) -> None:
        shape = self._shape(live)
        launch = self.runner.launch([row.seat for row in live], shape)
        for row in live:
            row.last_launch = launch.number
        self._in_flight.append(launch)
        self._counters["rounds"] += 1

    def _shape(self, live: list[Row]) -> RoundShape:
        """The next round's bucket: the rows' own budgets, or the policy's choice."""
        kind = batch_sampler_kind([row.params.sampler_kind for row in live])
        fixed = [row.budget for row in live if not row.is_auto]
        block, nodes, places = 0, max(fixed, default=0), sum(budget + 1 for budget in fixed)
        if nodes:
            block = self.limits.max_block
        auto = [row.seat for row in live if row.is_auto]
        if auto:
            bucket = self._policy_of().choose(auto, self._sampler_ms(kind))
            self._counters[f"bucket_{bucket[0]}x{bucket[1]}"] += 1
            block, places = max(block, bucket[0]), places + len(auto) * (bucket[1] + 1)
            nodes = max(nodes, self._policy_nodes() if bucket != PLAIN else 0)
            if fixed:
                # A fixed budget is a promise: with enough places for every row, none is shared away.
                nodes = max(max(fixed), bucket[1])
                places = len(live) * (nodes + 1)
        return self.runner.fit(RoundShape(len(live), places, block, nodes, kind))

    def _policy_nodes(self) -> int:
        return max(nodes for _, nodes in self.limits.forecast)

    def _sampler_ms(self, kind: str) -> float:
        """Cost per place of a sampler kind beyond an argmax, measured when it first comes."""
        if kind not in self._place_ms:
            device = torch.device(self.settings.device)
            self._place_ms[kind] = measure_sampler(self.runner.round, kind, device)
        return self._place_ms[kind]

    def _policy_of(self) -> BudgetPolicy:
        """The policy, measured when the first request with an automatic budget comes."""
        if self._policy is None:
            buckets = self.limits.forecast
            blocks = sorted({block for block, _ in buckets})
            table = measure_costs(self.runner.round, blocks, self._policy_nodes(), torch.device(self.settings.device))
            # Optimistic, so that the first rounds draft and tell.
            prior = [min(nodes, block - 1) * 0.5 for block, nodes in buckets]
            self._policy = BudgetPolicy(table, buckets, prior)
        return self._policy

    def _deliver(self, launch: Launch) -> Iterator[StreamEvent]:
        results = self.runner.read(launch)
        trees = self.runner.trees(launch)
        bucket = (launch.shape.block, launch.shape.places // launch.shape.rows - 1)
        for seat, result in zip(launch.seats, results, strict=True):
            row = self._rows.get(seat)
            if row is None or row.finish_reason is not None:
                continue
            if result.bad:
                self._abort_all()
                raise RuntimeError(
                    f"the target gave a NaN for request {row.index}: its weights are damaged, or {self.dtype} is too "
                    "narrow for it: load it anew, or try dtype float32"
                )
            tokens = row.take(result)
            if row.is_auto and launch.shape.block:
                self._policy_of().observe(seat, bucket, result.mass, result.accepted, launch.shape.nodes)
            self._counters["tokens"] += len(tokens)
            tree, path = trees.get(seat, (None, ()))
            output = None
            if row.finish_reason is not None:
                output = row.output()
                self.runner.stop(seat)
            yield StreamEvent(row.index, row.new_text(), tuple(tokens), row.finish_reason, output, tree, path)
        self._free(launch.number)

    def _free(self, read_until: int) -> None:
        """Gives back seats and pages that no launched round names any more."""
        for seat, row in list(self._rows.items()):
            if row.finish_reason is not None and row.last_launch <= read_until:
                del self._rows[seat]
                self._pages.give_back(row.pages)
                self._free_seats.append(seat)
                if self._policy:
                    self._policy.leave(seat)

    def _abort_all(self) -> None:
        """Drops whatever is waiting or running; rounds in flight are read and thrown away."""
        for row in [*self._waiting, *self._rows.values()]:
            row.abort()
        self._waiting.clear()
        while self._in_flight:
            self.runner.read(self._in_flight.popleft())
        for seat in self._rows:
            self.runner.stop(seat)
        self._free(self.runner.num_launched)
        self.runner.settle()
