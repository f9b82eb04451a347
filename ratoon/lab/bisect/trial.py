# Owns: one run of a case, and how it ended: healthy, wrong tokens, acceptance, NaN, broken contract, crash.
# Promises: wrong tokens are judged against plain decoding of the same weights, near-ties counted apart.
# Never: looks inside a round.
"""Reproducing a failure."""

from __future__ import annotations

from collections.abc import Sequence

from ratoon.core.request import RequestOutput, SamplingParams, compare
from ratoon.lab.acceptance import tau
from ratoon.lab.bisect.case import Case
from ratoon.lab.bisect.descend import Opener, opened
from ratoon.lab.bisect.outcome import Outcome
from ratoon.lab.bisect.stack import stack_of
from ratoon.lab.faults import planted
from ratoon.ops.launch import use_kernels
from ratoon.runtime.buffers import ContractError
from ratoon.runtime.engine import Engine


def run(case: Case, open_engine: Opener = opened) -> Outcome:
    """Serves the case's prompts and judges the texts. ValueError or FileNotFoundError for a case that cannot be."""
    with planted(case.plant):
        use_kernels(case.kernels)  # pyright: ignore[reportArgumentType]
        try:
            return _judged_run(case, open_engine)
        finally:
            use_kernels("auto")


def _judged_run(case: Case, open_engine: Opener) -> Outcome:
    try:
        engine = open_engine(case)
    except ContractError as error:
        return _of_error("contract", error)
    except (RuntimeError, MemoryError) as error:
        return _of_error("crash", error)
    with engine:
        try:
            outputs = engine.generate(list(case.prompts), case.params)
        except ContractError as error:
            return _of_error("contract", error)
        except Exception as error:  # noqa: BLE001 (any end of a run is a result)
            return _of_error("nan" if "gave a NaN" in str(error) else "crash", error)
        return _judge(case, engine, outputs)


def _of_error(kind: str, error: Exception) -> Outcome:
    stage, where = stack_of(error)
    detail = f"{type(error).__name__}: {' '.join(str(error).split())}"
    return Outcome(kind, detail, stage, where)  # pyright: ignore[reportArgumentType]


def _judge(case: Case, engine: Engine, outputs: Sequence[RequestOutput]) -> Outcome:
    near_ties, mean = 0, tau(outputs)
    for number, (ours, theirs) in enumerate(zip(_plain(case, engine), outputs, strict=True)):
        verdict = compare(ours, theirs, engine.dtype)
        near_ties += verdict.verdict == "near_tie"
        if verdict.verdict == "mismatch":
            assert verdict.index is not None
            pair = [output.token_ids[verdict.index : verdict.index + 1] for output in (ours, theirs)]
            want, got = (tokens[0] if tokens else "the end" for tokens in pair)
            detail = f"token {verdict.index} of prompt {number}: plain decoding gives {want}, this case {got}"
            return Outcome("tokens", detail, tau=mean)
    seen = f"tau {mean}, {len(outputs)} texts as plain decoding's ({near_ties} near-ties)"
    if case.band is not None and mean is not None and not case.band[0] <= mean <= case.band[1]:
        return Outcome("acceptance", f"{seen}; tau is outside of {case.band[0]:g}..{case.band[1]:g}", tau=mean)
    return Outcome("healthy", seen, tau=mean)


def _plain(case: Case, engine: Engine) -> list[RequestOutput]:
    """The same prompts one by one, without a drafter or a graph."""
    use_kernels("torch")
    target = engine.runner.round.target
    options = {"mode": "eager", "max_rows": 1, "method": "ar", "max_model_len": case.max_model_len}
    with Engine.from_parts(target, None, engine._tokenizer, **options) as plain:
        params: SamplingParams = case.params
        return [plain.generate([prompt], params)[0] for prompt in case.prompts]
