# Owns: what `ratoon bench` was asked for, and the cells that come of it.
# Promises: every list is read and every cell checked before a model is loaded; autoregressive cells come first.
# Never: runs anything, imports torch.
"""The matrix of `ratoon bench`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any, TypeVar, cast, get_args

from ratoon.core.request import MAX_BUDGET, Budget, Method
from ratoon.lab.prompts import Prompt, load_prompts
from ratoon.lab.record import Cell
from ratoon.models.wheel import Progress

N = TypeVar("N", int, float)

MODES = {"auto": "auto", "on": "graph", "off": "eager"}
METHODS: tuple[Method, ...] = get_args(Method)
_DTYPES = ("auto", "bfloat16", "float32")
_RANDOM_PROMPTS = "random:128"


@dataclass(frozen=True)
class Group:
    """What cells share that run on the same engines, one without and one with a drafter."""

    concurrency: int
    graphs: str
    dtype: str
    temperature: float


@dataclass(frozen=True)
class RandomPair:
    """Shapes that get random weights (paths of configurations), and how their acceptance is simulated, if it is.

    `tau` None: by the table of METHOD section 5.
    """

    target: str
    drafter: str | None = None
    simulate: bool = False
    tau: float | None = None

    def check(self, methods: tuple[Method, ...], budgets: tuple[Budget, ...]) -> None:
        """ValueError for cells that a fixed mean says nothing about."""
        if self.drafter is None and set(methods) != {"ar"}:
            raise ValueError("--random-weights without --drafter-config has nothing to draft with: use --methods ar")
        if self.tau is None:
            return
        if self.tau < 1:
            raise ValueError(f"--simulate-tau must be at least 1, got {self.tau:g}")
        needed = math.ceil(self.tau) - 1
        fixed = all(budget != "auto" and budget >= needed for budget in budgets)
        if "tree" in methods or ("chain" in methods and not fixed):
            raise ValueError(
                f"--simulate-tau {self.tau:g} needs --methods ar,chain and fixed --budgets of at least {needed}: "
                "a tree or a shorter chain would be given what it cannot earn (--simulate uses a table instead)"
            )

    @property
    def simulated(self) -> str | float | None:
        """What the record says of it."""
        return self.tau if self.tau is not None else "table" if self.simulate else None


@dataclass(frozen=True)
class Matrix:
    """What `ratoon bench` was asked for. `engine`: settings that go to every engine as they are."""

    model: str
    drafter: str
    methods: tuple[Method, ...]
    budgets: tuple[Budget, ...]
    topk_caps: tuple[int, ...]
    concurrency: tuple[int, ...]
    graphs: tuple[str, ...]
    dtypes: tuple[str, ...]
    device: str
    temperatures: tuple[float, ...]
    prompts: str
    limit: int | None
    max_tokens: int
    repeats: int
    seed: int
    cut: bool
    random: RandomPair | None
    kernels: str
    engine: Mapping[str, Any]

    @classmethod
    def parse(cls, **given: Any) -> Matrix:
        """From the command line's texts. Raises ValueError naming the option and the entry."""
        if given["repeats"] < 1:
            raise ValueError(f"--repeats must be at least 1, got {given['repeats']}")
        pair = _random_pair(given)
        matrix = cls(
            model=given["model"],
            drafter=given["drafter"],
            methods=cast(tuple[Method, ...], words("--methods", given["methods"], METHODS)),
            budgets=tuple(budgets_of(given["budgets"])),
            topk_caps=numbers("--topk-caps", given["topk_caps"], int, 0, MAX_BUDGET),
            concurrency=numbers("--concurrency", given["concurrency"], int, 1),
            graphs=words("--graphs", given["graphs"], tuple(MODES)),
            dtypes=words("--dtype", given["dtype"], _DTYPES),
            device=given["device"],
            temperatures=numbers("--temperature", given["temperature"], float, 0.0),
            prompts=given["prompts"] or (_RANDOM_PROMPTS if pair else "humaneval"),
            limit=given["limit"],
            max_tokens=given["max_tokens"],
            repeats=given["repeats"],
            seed=given["seed"],
            cut=given["cut"],
            random=pair,
            kernels=given["kernels"],
            engine=given["engine"],
        )
        matrix._check()
        return matrix

    def _check(self) -> None:
        if self.random:
            self.random.check(self.methods, self.budgets)
            if not self.prompts.startswith("random"):
                raise ValueError("--random-weights has no tokenizer: use --prompts random:LENGTH")
        elif self.drafter == "none" and set(self.methods) != {"ar"}:
            raise ValueError("--drafter none has nothing to draft with: use --methods ar")
        for group in self.groups():
            for cell in self.cells(group):
                cell.params(())

    def fetch(self, progress: Progress | None = None) -> list[Prompt]:
        """The prompts, fetched if they must be."""
        return load_prompts(self.prompts, self.limit, progress)

    def fetch_model(self, progress: Progress | None = None) -> None:
        """Sees that target and drafter are there, fetched if they must be. FileNotFoundError with the remedy."""
        from ratoon.models.hub import resolve

        names = [] if self.random else [self.model, *({self.drafter} - {"auto", "none"})]
        for name in names:
            resolve(name, progress)

    def groups(self) -> list[Group]:
        return [Group(*choice) for choice in product(self.concurrency, self.graphs, self.dtypes, self.temperatures)]

    def mode(self, group: Group) -> str:
        """How the group's engines run a round: the engine setting if it is given, else what --graphs says."""
        return self.engine.get("mode", MODES[group.graphs])

    def cells(self, group: Group) -> list[Cell]:
        """The group's cells, ar first, none twice."""
        cells: list[Cell] = []
        for method in sorted(self.methods, key=METHODS.index):
            budgets = self.budgets if method != "ar" else (0,)
            caps = self.topk_caps if method == "tree" else (1,)
            for budget, cap in product(budgets, caps):
                cell = Cell(
                    method=method,
                    budget=budget,
                    topk_cap=cap,
                    concurrency=group.concurrency,
                    temperature=group.temperature,
                    seed=self.seed,
                    max_tokens=self.max_tokens,
                    cut=self.cut,
                    # Random weights may name the end token at any time, and each method would at another.
                    ignore_eos=self.random is not None,
                )
                cells.append(cell)
        return list(dict.fromkeys(cells))

    def configuration(self, group: Group, cell: Cell) -> dict[str, Any]:
        """All that the cell's figures may depend on, but for prompts, machine and code. Plain decoding has no drafter,
        so that its figures serve every one."""
        drafts, pair = cell.method != "ar", asdict(self.random) if self.random else None
        if pair and not drafts:
            pair = {"target": pair["target"]}
        return {
            **{"model": self.model, "drafter": self.drafter if drafts else None, "random": pair},
            **asdict(cell),
            **{"graphs": group.graphs, "dtype": group.dtype, "device": self.device, "kernels": self.kernels},
            **{"repeats": self.repeats, "engine": dict(self.engine)},
        }


def _random_pair(given: Mapping[str, Any]) -> RandomPair | None:
    shapes = ("drafter_config", "simulate", "simulate_tau")
    if given["random_weights"] is None:
        for name in shapes:
            if given[name] is not None and given[name] is not False:
                raise ValueError(f"--{name.replace('_', '-')} needs --random-weights")
        return None
    if given["simulate"] and given["simulate_tau"] is not None:
        raise ValueError("give --simulate (a table) or --simulate-tau (a fixed mean), not both")
    target, drafter = given["random_weights"], given["drafter_config"]
    return RandomPair(str(target), drafter and str(drafter), given["simulate"], given["simulate_tau"])


def words(option: str, text: str, known: tuple[str, ...]) -> tuple[str, ...]:
    """A list of known words, none twice. ValueError naming the option."""
    given = tuple(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))
    unknown = [word for word in given if word not in known]
    if unknown or not given:
        raise ValueError(f"{option} takes {', '.join(known)} separated by commas, got '{text}'")
    return given


def numbers(option: str, text: str, kind: type[N], least: N, most: float = float("inf")) -> tuple[N, ...]:
    """A list of numbers within limits, none twice. ValueError naming the option."""
    try:
        given = tuple(dict.fromkeys(kind(entry) for entry in text.split(",")))
    except ValueError:
        given = ()
    if not given or not all(least <= number <= most for number in given):
        limit = "" if most == float("inf") else f" to {most:g}"
        raise ValueError(f"{option} takes numbers from {least}{limit} separated by commas, got '{text}'")
    return given


def budgets_of(text: str) -> Iterator[Budget]:
    """Numbers of nodes, or auto, none twice."""
    for entry in dict.fromkeys(part.strip() for part in text.split(",")):
        if entry == "auto":
            yield "auto"
        else:
            yield from numbers("--budgets (beside auto)", entry, int, 0, MAX_BUDGET)
