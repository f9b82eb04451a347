# Owns: the configuration that fails, and the flips of one variable that may heal it.
# Promises: a case survives JSON unchanged; flips come mildest first and never repeat what the case already is.
# Never: imports torch, or opens an engine.
"""Cases and flips of `ratoon bisect`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from ratoon.core.request import SamplingParams

Prompt = str | tuple[int, ...]

_SIMPLER_MODES = {"graph": ("staged", "static", "eager"), "staged": ("static", "eager"), "static": ("eager",)}
_PAGE_SIZES = (16, 64)


@dataclass(frozen=True)
class Case:
    """One configuration, its prompts, and what its acceptance should be.

    mode, kernels and run_ahead are what runs, not the engine's 'auto'; band: lowest and highest healthy tau;
    plant: a fault of lab/faults.py that every process of this case plants first.
    """

    model: str = "smollm2"
    drafter: str = "auto"
    method: str = "tree"
    budget: int | str = 16
    topk_cap: int = 16
    rows: int = 1
    mode: str = "eager"
    kernels: str = "torch"
    dtype: str = "auto"
    device: str = "auto"
    page_size: int = 16
    run_ahead: int = 0
    max_model_len: int | None = None
    birth_test: str = "quick"
    prompts: tuple[Prompt, ...] = ()
    max_tokens: int = 32
    temperature: float = 0.0
    seed: int = 0
    band: tuple[float, float] | None = None
    plant: str | None = None

    def __post_init__(self) -> None:
        if not self.prompts:
            raise ValueError("there is nothing to bisect on: give at least one prompt")
        if self.rows < 1:
            raise ValueError(f"rows must be at least 1, got {self.rows}")
        if self.band is not None and not 1 <= self.band[0] <= self.band[1]:
            raise ValueError(f"a band of tau is LOW:HIGH with 1 <= LOW <= HIGH, got {self.band[0]:g}:{self.band[1]:g}")

    @property
    def engine(self) -> dict[str, Any]:
        """The settings of an engine, model, drafter, dtype and device apart. Its checks are all on."""
        names = ("method", "budget", "topk_cap", "mode", "page_size", "run_ahead", "max_model_len", "birth_test")
        own = {name: getattr(self, name) for name in names}
        # Sides are compared with each other's K/V, and spoilt: nothing may be found in them later, no table may grow.
        still = {"enable_prefix_caching": False, "admission": "worst-case"}
        return own | {"max_rows": self.rows, "debug": True, **still}

    @property
    def params(self) -> SamplingParams:
        """Every text runs to its full length: what ends one early would hide what comes later."""
        return SamplingParams(
            temperature=self.temperature, seed=self.seed, max_tokens=self.max_tokens, ignore_eos=True
        )  # fmt: skip

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Case:
        prompts = tuple(prompt if isinstance(prompt, str) else tuple(prompt) for prompt in values["prompts"])
        band = values.get("band")
        return cls(**{**values, "prompts": prompts, "band": tuple(band) if band else None})


@dataclass(frozen=True)
class Flip:
    """One variable set to another value. keeps_tree: the rounds that it makes are those of the case, place by place."""

    variable: str
    value: Any
    keeps_tree: bool = False

    def __str__(self) -> str:
        return f"{self.variable} {self.value}"

    def apply(self, case: Case) -> Case:
        if self.variable == "drafter" and self.value == "none":
            return replace(case, drafter="none", method="ar", budget=0)
        return replace(case, **{self.variable: self.value})


def flips(case: Case) -> Iterator[Flip]:
    """What differs least from the case comes first."""
    yield from (Flip("mode", mode, True) for mode in _SIMPLER_MODES.get(case.mode, ()))
    if case.kernels == "triton":
        yield Flip("kernels", "torch", True)
    if case.run_ahead:
        yield Flip("run_ahead", 0, True)
    yield Flip("page_size", next(size for size in _PAGE_SIZES if size != case.page_size), True)
    if case.rows > 1:
        yield Flip("rows", 1)
    if case.method == "ar":
        yield from _last(case)
        return
    budget = 16 if case.budget == "auto" else int(case.budget)
    sizes = [size for size in (budget if case.budget == "auto" else 0, budget // 2, budget // 4, 1) if size]
    yield from (Flip("budget", size) for size in dict.fromkeys(sizes) if size != case.budget)
    if case.method == "tree" and case.topk_cap != 1:
        yield Flip("topk_cap", 1)
    yield from _last(case)
    yield Flip("drafter", "none")


def _last(case: Case) -> Iterator[Flip]:
    if case.dtype != "float32":
        yield Flip("dtype", "float32")


def running(
    device: str, mode: str, kernels: str, run_ahead: int | None, method: str | None, drafter: str
) -> dict[str, Any]:
    """What the engine's 'auto' comes to here: device, mode, kernels, run_ahead and method of a case."""
    from ratoon.runtime.setup import choose_device, choose_mode, choose_run_ahead

    where = choose_device(device)
    how = choose_mode(mode, where)
    return {
        "device": where.type,
        "mode": how,
        "kernels": "triton" if kernels == "triton" or (kernels == "auto" and where.type == "cuda") else "torch",
        "run_ahead": choose_run_ahead(run_ahead, where, how),
        "method": method or ("ar" if drafter == "none" else "tree"),
    }
