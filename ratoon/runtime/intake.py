# Owns: turning prompts and parameters into rows.
# Promises: what cannot be served is refused by name before anything of its batch runs.
# Never: seats a row, or touches the device.
"""Checking requests."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

from ratoon.core.config import ModelConfig
from ratoon.core.request import SamplingParams
from ratoon.runtime.rows import Row
from ratoon.runtime.setup import Settings
from ratoon.runtime.text import Tokenizer
from ratoon.spec.simulate import Simulation
from ratoon.spec.state import Limits

Prompt = str | Sequence[int]


@dataclass(frozen=True)
class Intake:
    """What an engine needs to know to judge a request."""

    settings: Settings
    limits: Limits
    config: ModelConfig
    tokenizer: Tokenizer | None
    has_drafter: bool
    simulation: Simulation | None = None

    def rows(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> list[Row]:
        """One row per prompt. Raises ValueError with the remedy."""
        if timeout_s is not None and timeout_s <= 0:
            raise ValueError(f"timeout_s must be above 0 seconds, got {timeout_s:g}")
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
        pairs = enumerate(zip(several, params, strict=True))
        timeout_s = float("inf") if timeout_s is None else timeout_s
        return [self._row(index, prompt, own, priority, timeout_s) for index, (prompt, own) in pairs]

    def _row(self, index: int, prompt: Prompt, params: SamplingParams, priority: int, timeout_s: float) -> Row:
        ids = self._ids(prompt)
        self._check_prompt(ids)
        params.check_vocabulary(self.config.vocab_size)
        if params.n != 1:
            raise ValueError(f"n is {params.n}, but a prompt gets one sample: repeat it with sample_index 0, 1, ...")
        if params.stop and self.tokenizer is None:
            raise ValueError("this engine has no tokenizer, so it sees no stop strings: use stop_token_ids")
        method = params.method or self.settings.method
        if method != "ar" and not self.has_drafter:
            raise ValueError(f"method '{method}' needs a drafter, and this engine has none: use method 'ar'")
        own = self.settings.budget if params.budget is None else params.budget
        budget = None if own == "auto" else own
        cap = self.settings.topk_cap if params.topk_cap is None else params.topk_cap
        self._check_cap(cap)
        if self.simulation:
            self.simulation.check(method, budget)
        known = tuple(self.tokenizer.eos_ids) if self.tokenizer else ()
        eos = () if params.ignore_eos else self.config.eos_ids + known
        now = time.perf_counter()
        return Row(
            index=index,
            prompt=ids,
            params=params,
            stop_ids=tuple(dict.fromkeys((*eos, *params.stop_token_ids))),
            budget=0 if method == "ar" else self.limits.max_nodes if budget is None else budget,
            topk_cap=1 if method == "chain" else cap,
            is_auto=budget is None and method != "ar",
            tokenizer=self.tokenizer,
            submitted=now,
            limit=min(len(ids) + params.max_tokens, self.limits.max_model_len),
            priority=priority,
            deadline=now + timeout_s,
        )

    def _ids(self, prompt: Prompt) -> tuple[int, ...]:
        """Token ids of a prompt; ValueError for what is neither text nor whole numbers."""
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ValueError("this engine has no tokenizer: give prompts as sequences of token ids")
            return tuple(self.tokenizer.encode(prompt))
        if isinstance(prompt, bytes) or not isinstance(prompt, Iterable):
            raise ValueError(f"a prompt must be text or a sequence of token ids, got {type(prompt).__name__}")
        ids = tuple(prompt)
        odd = next((token for token in ids if isinstance(token, bool) or not isinstance(token, Integral)), None)
        if odd is not None:
            raise ValueError(f"a prompt must be text or a sequence of token ids, got {odd!r} as a token id")
        return tuple(int(token) for token in ids)

    def _check_prompt(self, ids: tuple[int, ...]) -> None:
        if not ids:
            raise ValueError("the prompt is empty: give at least one token")
        if len(ids) >= self.limits.max_model_len:
            raise ValueError(
                f"the prompt has {len(ids)} tokens, but the context holds {self.limits.max_model_len} with room for "
                "at least one more: shorten the prompt or raise max_model_len"
            )
        if min(ids) < 0 or max(ids) >= self.config.vocab_size:
            raise ValueError(f"the prompt has a token id outside of the vocabulary of {self.config.vocab_size}")

    def _check_cap(self, cap: int) -> None:
        """ValueError for more candidates than this engine ranks."""
        own = self.settings.topk_cap
        if self.has_drafter and own and (cap == 0 or cap > own):
            raise ValueError(f"topk_cap {cap} exceeds this engine's {own}: start it with a larger topk_cap, or with 0")
