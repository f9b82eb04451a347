# Owns: `ratoon plan`.
# Promises: needs no GPU, no weights and no torch (a GGUF or hub name aside).
# Never: predicts anything; lab/plan.py does.
"""The command that predicts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from ratoon.cli.errors import command
from ratoon.cli.options import option

if TYPE_CHECKING:
    from ratoon.lab.plan import Prediction
    from ratoon.lab.planned import Question


@command
def plan(
    model: Annotated[str, option("--model", "-m", help="A config.json, a directory, or a model's name.")] = "smollm2",
    drafter: Annotated[str, option(help="Likewise; auto (known pair) or none.")] = "auto",
    gpus: Annotated[int, option(help="Tensor parallel over so many (a forecast: the engine runs on one).")] = 1,
    gpu: Annotated[str, option(help="Kind of GPU: h200 (measured), b200 (by data sheet).")] = "h200",
    link: Annotated[str, option(help="Between GPUs: nvlink or pcie.")] = "nvlink",
    methods: Annotated[str, option(help="Of ar, chain, tree.", metavar="A,B")] = "ar,chain,tree",
    budgets: Annotated[
        str, option(help="Drafted nodes per round, or auto: the best.", metavar="N,M")
    ] = "15,31,63,auto",
    concurrency: Annotated[str, option(help="Rows decoded together.", metavar="N,M")] = "1,8,32,128",
    context: Annotated[str, option(help="Tokens of each row.", metavar="N,M")] = "1024",
    tau: Annotated[float | None, option(help="Mean tokens of a chain's round, else by the published table.")] = None,
    compare: Annotated[bool, option("--compare", help="Only show the errors against what was measured.")] = False,
) -> None:
    """Predict round times and the best budget by concurrency, from bytes, rows and launches."""
    from ratoon.lab.predicted import report

    if compare:
        print("\n".join(report()))
        return
    from ratoon.lab.planned import Question

    question = Question.parse(
        model=model,
        drafter=drafter,
        gpus=gpus,
        gpu=gpu,
        link=link,
        methods=methods,
        budgets=budgets,
        concurrency=concurrency,
        context=context,
        tau=tau,
    )
    for tokens in question.contexts:
        for rows in question.concurrency:
            _show(question, rows, tokens)
    if tau is None and set(question.methods) != {"ar"}:
        print("tau: by the published table of a Qwen3-4B drafter (docs/NUMBERS.md), not of this one")
    print(f"{question.pair.gpu.name}: {question.pair.gpu.source}")
    if gpus > 1 and question.pair.link is not None:
        print(f"{question.pair.link.name}: {question.pair.link.source}")


def _show(question: Question, rows: int, context: int) -> None:
    choices = list(question.rounds(rows, context))
    first, fastest = choices[0], max(choices, key=lambda choice: choice.tokens_per_s)
    print(f"C={rows}, context {context}")
    for choice in choices:
        print(_line(choice, choice.tokens_per_s / first.tokens_per_s, choice is fastest))


def _line(choice: Prediction, speedup: float, fastest: bool) -> str:
    from ratoon.lab.predicted import choice_of

    figures = f"{choice.ms:8.2f} ms  tau {choice.tau:5.2f}  {choice.tokens_per_s:9,.0f} tok/s  {speedup:5.2f} x AR"
    return f"  {choice_of(choice):20}{figures}{'  best' if fastest else ''}"
