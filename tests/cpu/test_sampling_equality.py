# Owns: sampled text under trees: the same text for a seed, and the exact distribution over seeds.
# Promises: distributions are enumerated in float64 by rules written here, not by ops/sample.py.
# Never: judges one text: what is random is judged over thousands of seeds, what is not must be equal.
"""Sampling through real rounds. V: vocabulary, R: rows."""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from ratoon.core.request import SamplingParams
from ratoon.models.decoder import Decoder
from ratoon.ops import sample
from tests.cpu import toy
from tests.cpu.toy import Ask, Bench, Prophet, Text, assert_same_text, dense_text
from tests.dense import DenseCausal

# ---- one seed, one text -----------------------------------------------------------------------------------

PARAMS = {
    "temperature": SamplingParams(temperature=1.0),
    "top_k": SamplingParams(temperature=1.2, top_k=7),
    "top_p": SamplingParams(temperature=1.0, top_p=0.85),
    "min_p": SamplingParams(temperature=1.5, min_p=0.04),
    "repetition": SamplingParams(temperature=0.8, repetition_penalty=1.4),
    "presence": SamplingParams(temperature=0.9, presence_penalty=1.1),
    "frequency": SamplingParams(temperature=0.9, frequency_penalty=0.9),
    "bias": SamplingParams(temperature=1.0, logit_bias={0: 3.0, 24: -8.0, 17: 1.5}),
    "greedy penalties": SamplingParams(repetition_penalty=1.3, frequency_penalty=0.4),
    "all": SamplingParams(
        temperature=0.9, top_k=20, top_p=0.95, min_p=0.01, repetition_penalty=1.2, presence_penalty=0.3,
        frequency_penalty=0.2, logit_bias={3: 1.0}, sample_index=2,
    ),
}  # fmt: skip
PROMPTS = ((5, 6, 7), (9,), tuple(range(10, 30)), (3, 1, 4, 1, 5, 9, 2, 6))
NUM = 20


@pytest.fixture(scope="module", autouse=True)
def _wide_groups() -> Iterator[None]:
    """The sampler's groups are sized for real vocabularies; of a toy's they would be thousands. No bit changes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sample, "_CPU_ROWS", 32)
        yield


@functools.cache
def target() -> Decoder:
    return toy.make_target()


@functools.cache
def ask_of(name: str, number: int) -> Ask:
    return Ask(PROMPTS[number % len(PROMPTS)], NUM, params=PARAMS[name], seed=1000 * number + 7)


@functools.cache
def text_of(name: str, number: int) -> Text:
    return dense_text(target(), ask_of(name, number))


ALL = [(name, number) for number, name in enumerate(PARAMS)]


@functools.cache
def prophet() -> Prophet:
    made = toy.make_prophet(block_size=8)
    for name, number in ALL:
        made.learn(ask_of(name, number).prompt + tuple(text_of(name, number).tokens))
    return made


@functools.cache
def bench() -> Bench:
    return Bench(target(), prophet(), nodes=31, page_size=4)


@pytest.mark.parametrize(("budget", "cap"), [(0, 1), (7, 1), (31, 0)], ids=["ar", "chain", "tree"])
@pytest.mark.parametrize(("name", "number"), ALL)
def test_a_seed_gives_the_dense_text(name: str, number: int, budget: int, cap: int) -> None:
    ask = replace(ask_of(name, number), budget=budget, cap=cap)
    (text,) = bench().run([ask])
    assert_same_text(text_of(name, number), text, f"{name}, budget {budget}")
    assert budget == 0 or len(text.accepted) < 0.7 * NUM, "drafts must be accepted for this to mean anything"


@pytest.mark.parametrize("seed", [0, 1])
def test_neighbours_change_nothing(seed: int) -> None:
    """Batches of mixed parameters and budgets, in other orders; rows leave and others join in their seats."""
    order = np.random.default_rng(seed).permutation(len(ALL))
    waiting = [ALL[i] for i in order]
    budgets = itertools.cycle([(31, 0), (0, 1), (7, 1), (15, 4), (3, 2)])
    seated = []
    while waiting or seated:
        while waiting and bench().free:
            name, number = waiting.pop()
            budget, cap = next(budgets)
            seated.append((name, number, bench().join(replace(ask_of(name, number), budget=budget, cap=cap))))
        seats = [seat for _, _, seat in seated]
        bench().read(seats, bench().launch(seats))
        for entry in [entry for entry in seated if entry[2].text.done]:
            seated.remove(entry)
            bench().leave(entry[2])
            assert_same_text(text_of(*entry[:2]), entry[2].text, f"batch {seed}, {entry[0]}")
    bench().pool.check()


def test_padded_rounds_give_the_same_text() -> None:
    used = Bench(target(), prophet(), "static", nodes=7, page_size=4)
    pairs = [ALL[-1], ALL[0], ALL[1], ALL[-2]]
    texts = used.run([replace(ask_of(*pair), budget=7) for pair in pairs], shape=used.shape(4, 7, "general"))
    for pair, text in zip(pairs, texts, strict=True):
        assert_same_text(text_of(*pair), text, f"padded, {pair[0]}")


def test_another_seed_or_sample_gives_another_text() -> None:
    base = ask_of("temperature", 0)
    texts = {tuple(text_of("temperature", 0).tokens)}
    for other in (replace(base, seed=8), replace(base, seed=2**63 + 7)):
        texts.add(tuple(dense_text(target(), other).tokens))
    texts.add(tuple(dense_text(target(), replace(base, params=replace(base.params, sample_index=1))).tokens))
    assert len(texts) == 4


@pytest.mark.parametrize("mode", ["eager", "static"])
def test_the_deepest_node_knows_its_whole_path(mode: str) -> None:
    """Four tokens that take turns: any token missing in a node's history changes the next one."""
    params = SamplingParams(frequency_penalty=1.0, presence_penalty=0.5, logit_bias={1: 9.0, 5: 9.0, 3: 9.0, 0: 9.0})
    ask = Ask((5, 6, 7), NUM, 3, 1, params)
    want = dense_text(target(), ask)
    made = toy.make_prophet(lots=(1.0,), block_size=4)
    made.learn(ask.prompt + tuple(want.tokens))
    (text,) = Bench(target(), made, mode, nodes=3).run([ask])  # pyright: ignore[reportArgumentType]
    assert_same_text(want, text, mode)
    assert text.accepted == [3] * (NUM // 4) and len(set(want.tokens)) > 3


# ---- many seeds, one distribution -------------------------------------------------------------------------

SMALL, PROMPT, DRAWS, ROWS = 6, (2,), 1536, 256
FILTERED = SamplingParams(
    temperature=0.8, top_k=5, top_p=0.93, min_p=0.03, repetition_penalty=1.3, presence_penalty=0.25,
    frequency_penalty=0.35, logit_bias={1: 0.5},
)  # fmt: skip


@functools.cache
def small_target() -> Decoder:
    return toy.make_target(seed=3, gain=1.1, vocab_size=SMALL, eos_token_id=None)


def distribution(
    logits: Sequence[float], params: SamplingParams, prompt: Sequence[int], out: Sequence[int]
) -> list[float]:
    """METHOD section 3's order, in plain Python."""
    x = list(logits)
    for token in {*prompt, *out}:
        x[token] = x[token] * params.repetition_penalty if x[token] < 0 else x[token] / params.repetition_penalty
    for token, count in Counter(out).items():
        x[token] -= params.presence_penalty + params.frequency_penalty * count
    for token, bias in params.logit_bias.items():
        x[token] += bias
    x = [value / params.temperature for value in x]
    order = sorted(range(len(x)), key=lambda token: -x[token])
    kept = order[: params.top_k] if params.top_k > 0 else order
    mass = {token: math.exp(x[token] - x[order[0]]) for token in kept}
    total, before, nucleus = sum(mass.values()), 0.0, []
    for token in kept:
        if before < params.top_p * total:
            nucleus.append(token)
        before += mass[token]
    final = {token: mass[token] for token in nucleus if mass[token] >= params.min_p}
    return [final.get(token, 0.0) / sum(final.values()) for token in range(len(x))]


@functools.cache
def exact_joint(filtered: bool) -> dict[tuple[int, ...], float]:
    """Probability of each text of three tokens."""
    params, joint = FILTERED if filtered else SamplingParams(temperature=1.0), {}

    def grow(out: tuple[int, ...], p: float) -> None:
        if len(out) == 3:
            joint[out] = p
            return
        ids = torch.tensor([*PROMPT, *out])
        with torch.inference_mode():
            hidden, _ = small_target()(ids, torch.arange(len(ids)), DenseCausal(toy.LAYERS))
            logits = small_target().logits(hidden[-1:])[0].double().tolist()
        for token, each in enumerate(distribution(logits, params, PROMPT, out)):
            if each:
                grow((*out, token), p * each)

    grow((), 1.0)
    assert sum(joint.values()) == pytest.approx(1)
    return joint


def chi_square(joint: dict[tuple[int, ...], float], counts: Counter[tuple[int, ...]], num: int) -> tuple[float, int]:
    """(statistic, degrees of freedom); texts expected fewer than five times are one cell."""
    rare = {text for text, p in joint.items() if p * num < 5}
    cells = [(p * num, counts[text]) for text, p in joint.items() if text not in rare]
    if rare:
        cells.append((sum(joint[text] for text in rare) * num, sum(counts[text] for text in rare)))
    return sum((seen - want) ** 2 / want for want, seen in cells), len(cells) - 1


def tail(statistic: float, degrees: int) -> float:
    """Upper tail of chi-square, by Wilson and Hilferty's cube root."""
    z = ((statistic / degrees) ** (1 / 3) - (1 - 2 / (9 * degrees))) / math.sqrt(2 / (9 * degrees))
    return 0.5 * math.erfc(z / math.sqrt(2))


def test_the_tail_is_chi_squares() -> None:
    assert tail(18.307, 10) == pytest.approx(0.05, abs=1e-3)
    assert tail(135.807, 100) == pytest.approx(0.01, abs=1e-3)


@pytest.mark.parametrize(("budget", "cap"), [(3, 1), (8, 0)], ids=["chain", "tree"])
@pytest.mark.parametrize("filtered", [False, True], ids=["plain", "filtered"])
def test_the_joint_of_three_tokens_is_exact(filtered: bool, budget: int, cap: int) -> None:
    params = FILTERED if filtered else SamplingParams(temperature=1.0)
    drafter = toy.make_drafter(9, vocab_size=SMALL, mask_token_id=SMALL - 1, block_size=6)
    used = Bench(small_target(), drafter, rows=ROWS, nodes=budget, page_size=16, max_len=8, sample_group=64)
    counts, accepted = Counter[tuple[int, ...]](), 0
    for first in range(0, DRAWS, ROWS):
        asks = [Ask(PROMPT, 3, budget, cap, params, seed=first + i) for i in range(ROWS)]
        for text in used.run(asks):
            counts[tuple(text.tokens)] += 1
            accepted += sum(text.accepted)
    joint = exact_joint(filtered)
    assert not counts.keys() - joint.keys(), "a token that the filters exclude was drawn"
    p = tail(*chi_square(joint, counts, DRAWS))
    assert p > 1e-3, f"chi-square: p = {p:.2e}"
    assert accepted > DRAWS / 4, "drafts must be accepted for this to mean anything"
    assert len(joint) > 20
