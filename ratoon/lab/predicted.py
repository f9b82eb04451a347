# Owns: rounds that were measured (ours and others'), the constants fitted to those of one row, and the errors.
# Promises: nothing of more than one row goes into a fit; every error is shown, however large.
# Never: imports torch, or leaves out a row that it has.
"""`ratoon plan` held against measurements. Sources: docs/NUMBERS.md section 4 (ours), the reports named (others')."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from ratoon.core.request import Method
from ratoon.lab.gpus import GPUS, H200, Gpu
from ratoon.lab.plan import Engine, Pair, Prediction, Round, Shape, best, plain, predict, work

QWEN3_8B = Shape(36, 4096, 12288, 32, 8, 128, 151936, qk_norm=True)
QWEN3_8B_DRAFTER = Shape(5, 4096, 12288, 32, 8, 128, 151936, qk_norm=True)
SMOLLM2 = Shape(30, 576, 1536, 9, 3, 64, 49152, qk_norm=False)
SMOLLM2_DRAFTER = Shape(5, 576, 1536, 9, 3, 64, 49152, qk_norm=True)
_SHAPES = {"Qwen3-8B": (QWEN3_8B, QWEN3_8B_DRAFTER), "SmolLM2": (SMOLLM2, SMOLLM2_DRAFTER)}
_METHODS: tuple[Method, ...] = ("chain", "tree")
BLOCK = 16


def pair_of(model: str, gpu: Gpu = H200) -> Pair:
    """A shape that was measured, with its five-layer drafter of block 16."""
    target, drafter = _SHAPES[model]
    return Pair(target, gpu, drafter, BLOCK, taps=5)


@dataclass(frozen=True)
class Row:
    """One measurement of ours: ms of a round."""

    model: str
    method: Method
    nodes: int
    rows: int
    context: int
    ms: float
    fitted: bool = False

    @property
    def predicted(self) -> float:
        return predict(pair_of(self.model), fit(), self.method, self.round_).ms

    @property
    def round_(self) -> Round:
        return Round(self.rows, self.nodes, BLOCK if self.nodes else 0, self.context)

    @property
    def error(self) -> float:
        return self.predicted / self.ms - 1


def _throughput(method: Method, nodes: int, tau: float, prompt: int, rates: dict[int, float]) -> Iterator[Row]:
    """Rows of the throughput protocol: 16 to 272 new tokens plain, 32 to 544 drafted; context in the middle."""
    context = prompt + (288 if nodes else 144)
    for rows, rate in rates.items():
        yield Row("Qwen3-8B", method, nodes, rows, context, 1e3 * rows * tau / rate)


MEASURED: tuple[Row, ...] = (
    Row("Qwen3-8B", "ar", 0, 1, 1024, 4.72, fitted=True),
    Row("SmolLM2", "ar", 0, 1, 1024, 0.685, fitted=True),
    Row("Qwen3-8B", "chain", 15, 1, 1024, 6.05, fitted=True),
    Row("SmolLM2", "chain", 15, 1, 1024, 1.04, fitted=True),
    Row("Qwen3-8B", "tree", 15, 1, 1024, 6.06),
    Row("SmolLM2", "tree", 15, 1, 1024, 1.04),
    Row("Qwen3-8B", "tree", 31, 1, 1024, 6.32),
    Row("SmolLM2", "tree", 31, 1, 1024, 1.19),
    Row("Qwen3-8B", "tree", 63, 1, 1024, 6.47),
    Row("SmolLM2", "tree", 63, 1, 1024, 1.42),
    *_throughput("ar", 0, 1.0, 128, {1: 215, 8: 1629, 32: 5816, 128: 17962}),
    *_throughput("ar", 0, 1.0, 1024, {1: 212, 8: 1532, 32: 4820}),
    *_throughput("chain", 15, 6.5, 128, {1: 1106, 8: 7163, 32: 11767, 128: 12524}),
    *_throughput("chain", 15, 6.5, 1024, {1: 1049, 8: 6617, 32: 11025}),
)
AUTO: dict[tuple[int, int], float] = {(8, 128): 2.96, (32, 128): 2.09, (128, 128): 1.13, (8, 1024): 3.09}
"""(rows, prompt) -> budget auto over plain decoding, measured."""


@lru_cache(maxsize=1)
def fit() -> Engine:
    """The engine's three constants: least squares of the relative errors over the rows marked `fitted`."""
    rows = [row for row in MEASURED if row.fitted]
    assert all(row.rows == 1 for row in rows), "only rounds of one row are fitted"
    works = [work(pair_of(row.model), row.round_) for row in rows]
    known = np.array([row.ms - part.rows_ms for row, part in zip(rows, works, strict=True)])
    terms = np.array([[w.read_ms, 1e-3 * H200.kernel_us * w.launches, 1e-3 * w.place_layers] for w in works])
    scale = 1 / np.array([row.ms for row in rows])
    solved, *_ = np.linalg.lstsq(terms * scale[:, None], known * scale, rcond=None)
    return Engine(bandwidth_share=1 / float(solved[0]), launch_factor=float(solved[1]), place_us=float(solved[2]))


# ---- others ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Other:
    """A figure of somebody else: tokens/s, a speed-up over their plain decoding, or ms of a round."""

    who: str
    setting: str
    unit: str
    figure: float
    gpu: str
    method: Method
    nodes: int
    tau: float
    rows: int = 1
    context: int = 1024

    @property
    def predicted(self) -> float:
        pair = pair_of("Qwen3-8B", GPUS[self.gpu])
        ours = predict(pair, fit(), self.method, Round(self.rows, self.nodes, BLOCK, self.context), self.tau)
        if self.unit == "ms":
            return ours.ms
        if self.unit == "x AR":
            return ours.tokens_per_s / plain(pair, fit(), self.rows, self.context).tokens_per_s
        return ours.tokens_per_s

    @property
    def error(self) -> float:
        return self.predicted / self.figure - 1


def _vllm(method: Method, nodes: int, tau: float, context: int, rates: dict[int, float]) -> Iterator[Other]:
    setting = "chain-15, tau 6.5" if nodes else "plain"
    for rows, rate in rates.items():
        yield Other("vLLM 0.26, H200", f"{setting}, C={rows}", "tok/s", rate, "h200", method, nodes, tau, rows, context)


_SGLANG, _PAPER, _DDTREE = "SGLang DFlash, B200", "DFlash paper, H200", "DDTree paper, H200"
OTHERS: tuple[Other, ...] = (
    *_vllm("ar", 0, 1.0, 272, {1: 194, 8: 1474, 32: 5655, 128: 16783}),
    *_vllm("chain", 15, 6.5, 416, {1: 1023, 8: 7041, 32: 13351, 128: 14405}),
    Other(_PAPER, "average, tau 6.49", "x AR", 4.86, "h200", "chain", 15, 6.49),
    Other(_PAPER, "MATH-500, tau 7.87", "x AR", 6.08, "h200", "chain", 15, 7.87),
    Other(_DDTREE, "MATH-500, tau 10.73, budget 63 assumed", "x AR", 7.52, "h200", "tree", 63, 10.73),
    Other(_DDTREE, "HumanEval, tau 9.67, budget 63 assumed", "x AR", 6.90, "h200", "tree", 63, 9.67),
    *(
        Other(_SGLANG, f"MATH-500, C={rows}, tau 7.87 assumed", "tok/s", rate, "b200", "chain", 15, 7.87, rows)
        for rows, rate in {1: 1175, 8: 7485, 32: 16076}.items()
    ),
    Other("JetSpec engine, B200", "MATH-500, C=1, 8 to 11 ms", "ms", 9.5, "b200", "tree", 63, 1.0),
)
NOT_PREDICTED = (
    "Kimi K2.6 INT4 on 8 B300 or 8 RTX PRO 6000 (AR 141, tree-8 285-303 tok/s; 65, 98, 1,493): its architecture (MLA, "
    "experts, INT4) is refused by core/config.py, and no limit of these GPUs was measured",
    "DDTree on Qwen3-30B-A3B (8.22x): mixtures of experts are refused by core/config.py",
    "vLLM port of DDTree on an A6000 (99.1 against 144.9 tok/s): a hybrid target, and a GPU that was not measured",
)


# ---- tables ----------------------------------------------------------------------------------------------------


def ours_table() -> list[str]:
    """Markdown: measured, predicted, error."""
    lines = ["| shape, method | C | context | measured, ms | predicted, ms | error |", "|---|---|---|---|---|---|"]
    for row in MEASURED:
        name = row.method if row.method == "ar" else f"{row.method}-{row.nodes}"
        note = "fitted" if row.fitted else ""
        error = f"{100 * row.error:+.1f} %{f' ({note})' if note else ''}"
        lines.append(
            f"| {row.model} {name} | {row.rows} | {row.context:,} | {row.ms:.3g} | {row.predicted:.3g} | {error} |"
        )
    return lines


def auto_table() -> list[str]:
    """Markdown: budget auto over plain decoding against the best choice that the plan sees."""
    lines = ["| C | prompt | measured | predicted best | error | choice |", "|---|---|---|---|---|---|"]
    for (rows, prompt), measured in AUTO.items():
        pair, context = pair_of("Qwen3-8B"), prompt + 288
        choice = best(pair, fit(), rows, context, _METHODS)
        ratio = choice.tokens_per_s / plain(pair, fit(), rows, prompt + 144).tokens_per_s
        error = f"{100 * (ratio / measured - 1):+.0f} %"
        lines.append(f"| {rows} | {prompt:,} | {measured:.2f} | {ratio:.2f} | {error} | {choice_of(choice)} |")
    return lines


def others_table() -> list[str]:
    """Markdown: what others report beside what this engine would do by the plan."""
    lines = ["| who | setting | theirs | predicted | difference |", "|---|---|---|---|---|"]
    for other in OTHERS:
        digits = ".0f" if other.unit == "tok/s" else ".2f"
        figures = f"{other.figure:{digits}} {other.unit} | {other.predicted:{digits}}"
        lines.append(f"| {other.who} | {other.setting} | {figures} | {100 * other.error:+.0f} % |")
    return lines


def choice_of(choice: Prediction) -> str:
    """The method in words."""
    if choice.method == "ar":
        return "ar"
    return f"{choice.method}-{choice.round_.nodes}, block {choice.round_.block}"


def worst(rows: Sequence[Row]) -> float:
    """Largest error, either way."""
    return max(abs(row.error) for row in rows)


def report() -> list[str]:
    """All tables, as docs/NUMBERS.md holds them."""
    engine = fit()
    told = (
        f"Fitted to the four rows marked so: {engine.bandwidth_share:.3f} of the copy bandwidth, a launch of "
        f"{engine.launch_factor * H200.kernel_us:.2f} us, {engine.place_us:.2f} us for each further place of a row in "
        f"a layer's attention. Largest error of the others: {100 * worst(unseen()):.1f} %."
    )
    lines = [told, "", *ours_table(), "", *auto_table(), "", *others_table(), "", "Not predicted:", ""]
    return [*lines, *(f"- {line}." for line in NOT_PREDICTED)]


def unseen() -> list[Row]:
    """What was measured and not fitted."""
    return [row for row in MEASURED if not row.fitted]
