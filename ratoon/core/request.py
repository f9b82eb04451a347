# Owns: what a request asks for (SamplingParams), what it gets (RequestOutput), and the judge of two results.
# Promises: every value is checked once, when made, with one message that names it and the remedy.
# Never: imports torch, or knows an engine, a vocabulary or a clock.
"""Requests, results, and the near-tie rule of METHOD section 5."""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Literal

MAX_LOGIT_BIAS = 300
MAX_STOP_TOKEN_IDS = 16
MAX_NARROW_TOP_K = 64
MIN_TEMPERATURE = 1e-5
MAX_BUDGET = 127
"""Most drafted nodes of a row and round, and most candidates of a position."""

Method = Literal["ar", "chain", "tree"]
Budget = int | Literal["auto"]
FinishReason = Literal["stop", "length", "abort"]
SamplerKind = Literal["argmax", "greedy", "plain", "nucleus", "narrow", "general"]
Verdict = Literal["identical", "near_tie", "mismatch"]


@dataclass(frozen=True)
class SamplingParams:
    """How one request draws its tokens. Names and meanings are those of vLLM and Hugging Face.

    temperature 0 is argmax; `top_k` 0 or -1, `top_p` 1 and `min_p` 0 are off. `seed` None gets a fresh one per
    request; `sample_index` tells the n samples of one prompt apart. `budget` (drafted nodes a round, or 'auto'),
    `topk_cap` (0 = uncapped) and `method` None mean the engine's. `stop` strings end the text before them,
    `stop_token_ids` (beside the model's own) are the last token emitted; `ignore_eos` ignores only the model's own.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    n: int = 1
    sample_index: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    max_tokens: int = 128
    ignore_eos: bool = False
    budget: Budget | None = None
    topk_cap: int | None = None
    method: Method | None = None

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids or ()))
        object.__setattr__(self, "logit_bias", dict(self.logit_bias or {}))
        self._check_numbers()
        self._check_lists()
        self._check_speculation()

    def _check_numbers(self) -> None:
        _real("temperature", self.temperature, 0.0, math.inf, "0 for greedy")
        if 0 < self.temperature < MIN_TEMPERATURE:
            raise ValueError(f"temperature {self.temperature} is too small to divide by: use 0 for greedy")
        _whole("top_k", self.top_k, -1, 2**31 - 1, "0 or -1 for off")
        _real("top_p", self.top_p, 0.0, 1.0, "1 for off")
        if self.top_p == 0:
            raise ValueError("top_p 0 keeps nothing: use temperature 0 for greedy, 1 for off")
        _real("min_p", self.min_p, 0.0, 1.0, "0 for off")
        _real("repetition_penalty", self.repetition_penalty, 0.0, math.inf, "1 for off")
        if self.repetition_penalty == 0:
            raise ValueError("repetition_penalty 0 divides by zero: use 1 for off")
        _real("presence_penalty", self.presence_penalty, -2.0, 2.0, "0 for off")
        _real("frequency_penalty", self.frequency_penalty, -2.0, 2.0, "0 for off")
        if self.seed is not None:
            _whole("seed", self.seed, -(2**63), 2**64 - 1, "None for a fresh one")
        _whole("n", self.n, 1, 2**31 - 1, "1 for one sample")
        _whole("sample_index", self.sample_index, 0, 2**32 - 1, "0 for the first sample")
        _whole("max_tokens", self.max_tokens, 1, 2**31 - 1, "at least one token")

    def _check_lists(self) -> None:
        if any(not isinstance(text, str) or not text for text in self.stop):
            raise ValueError(f"stop must be non-empty strings, got {self.stop!r}")
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise ValueError(f"stop_token_ids has {len(self.stop_token_ids)} entries, at most {MAX_STOP_TOKEN_IDS}")
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise ValueError(f"logit_bias has {len(self.logit_bias)} entries, at most {MAX_LOGIT_BIAS}")
        for token in (*self.stop_token_ids, *self.logit_bias):
            _whole("a token id in stop_token_ids or logit_bias", token, 0, 2**31 - 1, "ids of the vocabulary")
        for token, value in self.logit_bias.items():
            _real(f"logit_bias[{token}]", value, -1e4, 1e4, "-100 bans a token")

    def _check_speculation(self) -> None:
        check_budget(self.budget)
        check_topk_cap(self.topk_cap)
        if self.method not in (None, "ar", "chain", "tree"):
            raise ValueError(f"method {self.method!r} is unknown: use 'ar', 'chain', 'tree' or None")

    def check_vocabulary(self, vocab_size: int) -> None:
        """ValueError for a token id that the model does not have."""
        for name, tokens in (("stop_token_ids", self.stop_token_ids), ("logit_bias", self.logit_bias)):
            for token in tokens:
                if token >= vocab_size:
                    raise ValueError(f"{name} names token {token}, but the vocabulary has {vocab_size} tokens")

    @property
    def has_penalties(self) -> bool:
        """Whether the token history changes the logits (needs counts in the sampler's state)."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    @property
    def sampler_kind(self) -> SamplerKind:
        """The cheapest sampler that serves this request; every kind gives the same tokens."""
        if self.temperature == 0:
            return "greedy" if self.has_penalties or self.logit_bias else "argmax"
        if 0 < self.top_k <= MAX_NARROW_TOP_K:
            return "narrow"
        if self.top_k > 0:
            return "general"
        return "plain" if self.top_p == 1 and self.min_p == 0 else "nucleus"

    def seed_or_fresh(self) -> int:
        """The 64-bit key of this request's noise."""
        return secrets.randbits(64) if self.seed is None else self.seed


def check_budget(budget: Budget | None, name: str = "budget") -> None:
    """ValueError unless it is 'auto', None, or a number of nodes that an engine can draft."""
    if budget is None or budget == "auto":
        return
    if not isinstance(budget, Integral) or isinstance(budget, bool) or not 0 <= budget <= MAX_BUDGET:
        raise ValueError(
            f"{name} must be from 0 (autoregressive) to the engine's limit of {MAX_BUDGET}, or 'auto', got {budget!r}"
        )


def check_topk_cap(topk_cap: int | None, name: str = "topk_cap") -> None:
    """ValueError unless it is None or a number of candidates."""
    if topk_cap is not None:
        _whole(name, topk_cap, 0, MAX_BUDGET, "0 for uncapped")


def batch_sampler_kind(kinds: Iterable[SamplerKind]) -> SamplerKind:
    """The cheapest kind that serves all rows of a batch (argmax for none)."""
    present = set(kinds)
    if "narrow" in present and present & {"plain", "nucleus"}:
        return "general"
    order: tuple[SamplerKind, ...] = ("general", "narrow", "nucleus", "plain", "greedy")
    for kind in order:
        if kind in present:
            return kind
    return "argmax"


@dataclass(frozen=True)
class RequestOutput:
    """What a request got. The tuples from `gaps` on have one entry per token of `token_ids`, or none at all.

    `accepted`: drafted tokens accepted in each round (the new anchor not counted). `gaps`: distance, in logits,
    of the drawn token to the `runner_ups` token (for sampled text of the perturbed scores, times temperature);
    `third_gaps` and `thirds`: the same of the next one. `edge_gaps`: distance, in logits, of the nearest filter
    edge whose move would have drawn `edge_tokens` (or the runner-up); inf and -1 where no edge matters.
    `top_logits`: the place's largest logit, sets the bf16 ulp.
    """

    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    rounds: int
    accepted: tuple[int, ...] = ()
    gaps: tuple[float, ...] = ()
    runner_ups: tuple[int, ...] = ()
    third_gaps: tuple[float, ...] = ()
    thirds: tuple[int, ...] = ()
    top_logits: tuple[float, ...] = ()
    edge_gaps: tuple[float, ...] = ()
    edge_tokens: tuple[int, ...] = ()
    ttft_s: float = 0.0
    decode_s: float = 0.0

    @property
    def tau(self) -> float:
        """Emitted tokens per round, the new anchor included (tokens cut by a stop string are not emitted)."""
        return len(self.token_ids) / self.rounds if self.rounds else 0.0


@dataclass(frozen=True)
class Comparison:
    """The judgement, and the index in `token_ids` of the first divergence (None when identical)."""

    verdict: Verdict
    index: int | None = None


def near_tie_bound(top_logit: float, dtype: str) -> float:
    """Largest gap, in logits, that counts as a near-tie: 2 bf16 ulp of the top logit, or 1e-4 in float32."""
    name = str(dtype).removeprefix("torch.")
    if name in ("float32", "fp32"):
        return 1e-4
    if name not in ("bfloat16", "bf16"):
        raise ValueError(f"no near-tie bound for dtype '{dtype}': use float32 or bfloat16")
    exponent = math.floor(math.log2(abs(top_logit))) if top_logit else -126
    return 2.0 * 2.0 ** (exponent - 7)


def compare(reference: RequestOutput, other: RequestOutput, dtype: str) -> Comparison:
    """Judges the first divergence of `other` from `reference`, the autoregressive run; the rest is not judged.

    ValueError when the texts differ and `reference` carries no gaps.
    """
    for index, (ours, theirs) in enumerate(zip(reference.token_ids, other.token_ids, strict=False)):
        if ours != theirs:
            return Comparison("near_tie" if _is_near_tie(reference, index, theirs, dtype) else "mismatch", index)
    if len(reference.token_ids) != len(other.token_ids):
        return Comparison("mismatch", min(len(reference.token_ids), len(other.token_ids)))
    return Comparison("identical")


def _is_near_tie(reference: RequestOutput, index: int, token: int, dtype: str) -> bool:
    """Whether AR recorded `token` at this place within the bound.

    The bound holds more than two candidates (a three-way tie was seen on SmolLM2), so the runner-up is not the only
    one that rounding may prefer.
    """
    if len(reference.gaps) <= index:
        raise ValueError("the reference run recorded no gaps: a divergence cannot be judged without them")
    bound = near_tie_bound(reference.top_logits[index], dtype)
    recorded = (
        (reference.gaps, reference.runner_ups),
        (reference.third_gaps, reference.thirds),
        (reference.edge_gaps, reference.edge_tokens),
        # Past an edge the drawn token itself may fall out, and its runner-up follows.
        (reference.edge_gaps, reference.runner_ups),
    )
    return any(gaps[index] <= bound and token == tokens[index] for gaps, tokens in recorded if len(gaps) > index)


def _real(name: str, value: float, low: float, high: float, remedy: str) -> None:
    number = isinstance(value, Real) and not isinstance(value, bool)
    if not (number and math.isfinite(value) and low <= value <= high):
        limits = f"at least {low:g}" if high == math.inf else f"from {low:g} to {high:g}"
        raise ValueError(f"{name} must be a number, {limits} ({remedy}), got {value!r}")


def _whole(name: str, value: int, low: int, high: int, remedy: str) -> None:
    if not isinstance(value, Integral) or isinstance(value, bool) or not low <= value <= high:
        raise ValueError(f"{name} must be a whole number from {low} to {high} ({remedy}), got {value!r}")
