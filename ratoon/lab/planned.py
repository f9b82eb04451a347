# Owns: what `ratoon plan` was asked for: configs read, lists parsed, and the rows of its answer.
# Promises: needs a config.json alone, no weights and no torch; what the model cannot be is refused by name.
# Never: knows what a round costs (lab/plan.py does).
"""The question and the answer of `ratoon plan`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from ratoon.core.config import ModelConfig
from ratoon.core.drafter import DrafterConfig
from ratoon.core.request import Budget, Method
from ratoon.lab.gpus import gpu_of, link_of
from ratoon.lab.matrix import METHODS, budgets_of, numbers, words
from ratoon.lab.plan import Pair, Prediction, Round, Shape, best, plain, predict
from ratoon.lab.predicted import fit


@dataclass(frozen=True)
class Question:
    """What to predict."""

    pair: Pair
    methods: tuple[Method, ...]
    budgets: tuple[Budget, ...]
    concurrency: tuple[int, ...]
    contexts: tuple[int, ...]
    tau: float | None

    @classmethod
    def parse(cls, **given: Any) -> Question:
        """From the command line's texts. Raises ValueError or FileNotFoundError naming the option."""
        methods = cast(tuple[Method, ...], words("--methods", given["methods"], METHODS))
        tau, budgets = given["tau"], tuple(budgets_of(given["budgets"]))
        if tau is not None and (tau < 1 or "tree" in methods or "auto" in budgets):
            raise ValueError("--tau is the mean of a chain with a fixed budget, at least 1: use --methods ar,chain")
        pair = _pair(given["model"], given["drafter"], given["gpus"], given["gpu"], given["link"])
        if pair.drafter is None and set(methods) != {"ar"}:
            raise ValueError(
                "chain and tree need a --drafter (a config.json, a directory or a hub id): or --methods ar"
            )
        concurrency, contexts = (numbers(f"--{name}", given[name], int, 1) for name in ("concurrency", "context"))
        return cls(pair, methods, budgets, concurrency, contexts, tau)

    def rounds(self, rows: int, context: int) -> Iterator[Prediction]:
        """The asked-for choices of one concurrency and context, plain decoding first, none twice."""
        pair, engine, seen = self.pair, fit(), set()
        choices = [plain(pair, engine, rows, context)]
        for method in self.methods:
            if method == "ar":
                continue
            for budget in self.budgets:
                if budget == "auto":
                    choices.append(best(pair, engine, rows, context, [method]))
                elif budget:
                    round_ = Round(rows, budget, pair.block, context)
                    choices.append(predict(pair, engine, method, round_, self.tau))
        for choice in choices:
            if (choice.method, choice.round_) not in seen:
                seen.add((choice.method, choice.round_))
                yield choice


def _pair(model: str, drafter: str, num_gpus: int, gpu: str, link: str) -> Pair:
    target = _target(model)
    shape, chosen = Shape.of(target), _drafter(model, drafter)
    if num_gpus < 1 or target.num_heads % num_gpus:
        raise ValueError(f"--gpus {num_gpus} cannot share {target.num_heads} heads evenly: use a divisor")
    if chosen is None:
        return Pair(shape, gpu_of(gpu), num_gpus=num_gpus, link=link_of(link))
    chosen.require_target(target.num_layers, target.hidden_size, target.vocab_size)
    taps = len(chosen.target_layer_ids)
    return Pair(shape, gpu_of(gpu), Shape.of(chosen), chosen.block_size, taps, num_gpus, link_of(link))


def _target(model: str) -> ModelConfig:
    raw = _config(model)
    if raw is not None:
        return ModelConfig.from_hf(raw)
    from ratoon.models.hub import resolve
    from ratoon.models.weights import load_config

    return load_config(resolve(model))


def _drafter(model: str, drafter: str) -> DrafterConfig | None:
    """None for 'none', and for 'auto' where no drafter is known or the model is a bare config."""
    from ratoon.models.hub import drafter_for, resolve

    if drafter == "none" or (drafter == "auto" and _config(model) is not None):
        return None
    raw = None if drafter == "auto" else _config(drafter)
    if raw is None:
        folder = drafter_for(model) if drafter == "auto" else resolve(drafter)
        raw = None if folder is None else _config(str(folder))
    return None if raw is None else DrafterConfig.from_hf(raw)


def _config(name: str) -> dict[str, Any] | None:
    """The JSON of a config file, or of a directory's; None for any other name."""
    path = Path(name).expanduser()
    path = path / "config.json" if path.is_dir() else path
    if path.suffix != ".json" or not path.is_file():
        return None
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
