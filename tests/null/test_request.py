# Owns: the checks of SamplingParams, the sampler kinds, and the near-tie judge.
# Promises: numpy at most; one case per message and per branch of the rule.
# Never: imports torch.
"""Requests and results."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from ratoon.core.request import (
    MAX_LOGIT_BIAS,
    MAX_STOP_TOKEN_IDS,
    RequestOutput,
    SamplingParams,
    batch_sampler_kind,
    compare,
    near_tie_bound,
)

BAD = [
    ("temperature", -0.1),
    ("temperature", math.nan),
    ("temperature", math.inf),
    ("temperature", 1e-6),
    ("temperature", "hot"),
    ("top_k", -2),
    ("top_k", 1.5),
    ("top_k", True),
    ("top_p", 0.0),
    ("top_p", 1.01),
    ("min_p", -0.1),
    ("min_p", 1.1),
    ("repetition_penalty", 0.0),
    ("repetition_penalty", -1.0),
    ("presence_penalty", 2.1),
    ("frequency_penalty", -2.1),
    ("seed", 2**64),
    ("seed", -(2**63) - 1),
    ("seed", 1.0),
    ("n", 0),
    ("sample_index", -1),
    ("sample_index", 2**32),
    ("max_tokens", 0),
    ("budget", -1),
    ("budget", 128),
    ("budget", True),
    ("budget", 1.0),
    ("budget", "some"),
    ("topk_cap", -1),
    ("topk_cap", 128),
    ("method", "beam"),
    ("stop", ""),
    ("stop", ["ok", ""]),
    ("stop", [3]),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", range(MAX_STOP_TOKEN_IDS + 1)),
    ("logit_bias", {-1: 1.0}),
    ("logit_bias", {1: math.inf}),
    ("logit_bias", dict.fromkeys(range(MAX_LOGIT_BIAS + 1), 1.0)),
]


@pytest.mark.parametrize(("name", "value"), BAD)
def test_bad_value_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=name):
        SamplingParams(**{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", 1e-5),
        ("top_k", -1),
        ("top_p", 1),
        ("min_p", 1.0),
        ("seed", 2**64 - 1),
        ("seed", -(2**63)),
        ("budget", 0),
        ("budget", 127),
        ("budget", "auto"),
        ("budget", None),
        ("topk_cap", 0),
        ("topk_cap", 127),
        ("method", "chain"),
        ("stop_token_ids", tuple(range(MAX_STOP_TOKEN_IDS))),
        ("logit_bias", dict.fromkeys(range(MAX_LOGIT_BIAS), -100.0)),
    ],
)
def test_edge_value_is_taken(name: str, value: object) -> None:
    assert getattr(SamplingParams(**{name: value}), name) == value  # type: ignore[arg-type]


def test_lists_are_normalised() -> None:
    bias = {3: 1.0}
    params = SamplingParams(stop="END", stop_token_ids=[1, 2], logit_bias=bias)  # type: ignore[arg-type]
    bias[4] = 2.0
    assert params.stop == ("END",) and params.stop_token_ids == (1, 2) and params.logit_bias == {3: 1.0}
    empty = SamplingParams(stop=None, stop_token_ids=None, logit_bias=None)  # type: ignore[arg-type]
    assert empty.stop == () and empty.stop_token_ids == () and empty.logit_bias == {}


def test_vocabulary_is_checked() -> None:
    SamplingParams(stop_token_ids=(9,), logit_bias={9: 1.0}).check_vocabulary(10)
    with pytest.raises(ValueError, match="stop_token_ids names token 10"):
        SamplingParams(stop_token_ids=(10,)).check_vocabulary(10)
    with pytest.raises(ValueError, match="logit_bias names token 10"):
        SamplingParams(logit_bias={10: 1.0}).check_vocabulary(10)


def test_seed_is_kept_or_fresh() -> None:
    assert SamplingParams(seed=0).seed_or_fresh() == 0
    fresh = {SamplingParams().seed_or_fresh() for _ in range(4)}
    assert len(fresh) == 4 and all(0 <= seed < 2**64 for seed in fresh)


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({}, "argmax"),
        ({"top_k": 5, "top_p": 0.5}, "argmax"),
        ({"repetition_penalty": 1.1}, "greedy"),
        ({"presence_penalty": 0.1}, "greedy"),
        ({"frequency_penalty": 0.1}, "greedy"),
        ({"logit_bias": {0: 1.0}}, "greedy"),
        ({"temperature": 1.0}, "plain"),
        ({"temperature": 1.0, "repetition_penalty": 1.1}, "plain"),
        ({"temperature": 1.0, "top_p": 0.9}, "nucleus"),
        ({"temperature": 1.0, "min_p": 0.1}, "nucleus"),
        ({"temperature": 1.0, "top_k": 64, "top_p": 0.9}, "narrow"),
        ({"temperature": 1.0, "top_k": 65}, "general"),
    ],
)
def test_sampler_kind(options: dict[str, float], kind: str) -> None:
    assert SamplingParams(**options).sampler_kind == kind  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kinds", "kind"),
    [
        ([], "argmax"),
        (["argmax", "greedy"], "greedy"),
        (["greedy", "plain"], "plain"),
        (["plain", "nucleus"], "nucleus"),
        (["argmax", "narrow"], "narrow"),
        (["plain", "narrow"], "general"),
        (["nucleus", "narrow"], "general"),
        (["general", "argmax"], "general"),
    ],
)
def test_batch_kind_serves_all(kinds: list, kind: str) -> None:
    assert batch_sampler_kind(kinds) == kind


REFERENCE = RequestOutput(
    prompt_token_ids=(1,),
    token_ids=(5, 6, 7),
    text="",
    finish_reason="length",
    rounds=3,
    gaps=(3.0, 0.125, 0.0001),
    runner_ups=(1, 2, 3),
    top_logits=(12.0, 12.0, 12.0),
    edge_gaps=(math.inf, math.inf, math.inf),
    edge_tokens=(-1, -1, -1),
)


def other(*tokens: int) -> RequestOutput:
    unjudged = RequestOutput(prompt_token_ids=(1,), token_ids=(), text="", finish_reason="length", rounds=3)
    return replace(unjudged, token_ids=tokens)


def test_near_tie_bound_is_two_bf16_ulp() -> None:
    assert near_tie_bound(8.0, "bfloat16") == 2 * 0.0625
    assert near_tie_bound(-15.9, "torch.bfloat16") == 2 * 0.0625
    assert near_tie_bound(7.99, "bfloat16") == 2 * 0.03125
    assert 0 < near_tie_bound(0.0, "bfloat16") < 1e-30
    assert near_tie_bound(1000.0, "float32") == 1e-4
    with pytest.raises(ValueError, match="float16"):
        near_tie_bound(1.0, "float16")


@pytest.mark.parametrize(
    ("tokens", "dtype", "verdict", "index"),
    [
        ((5, 6, 7), "bfloat16", "identical", None),
        ((5, 2, 9), "bfloat16", "near_tie", 1),  # gap at the bound, runner-up; what follows is not judged
        ((5, 4, 7), "bfloat16", "mismatch", 1),  # gap within the bound, but not the runner-up
        ((1, 6, 7), "bfloat16", "mismatch", 0),  # the runner-up, but a wide gap
        ((5, 2, 7), "float32", "mismatch", 1),
        ((5, 6, 3), "float32", "near_tie", 2),
        ((5, 6), "bfloat16", "mismatch", 2),
        ((5, 6, 7, 8), "bfloat16", "mismatch", 3),
    ],
)
def test_compare(tokens: tuple[int, ...], dtype: str, verdict: str, index: int | None) -> None:
    result = compare(REFERENCE, other(*tokens), dtype)
    assert (result.verdict, result.index) == (verdict, index)


def test_compare_judges_filter_edges() -> None:
    edged = replace(REFERENCE, edge_gaps=(0.1, math.inf, math.inf), edge_tokens=(8, -1, -1))
    assert compare(edged, other(8, 6, 7), "bfloat16").verdict == "near_tie"
    assert compare(edged, other(1, 6, 7), "bfloat16").verdict == "near_tie"  # the drawn token fell out
    assert compare(edged, other(9, 6, 7), "bfloat16").verdict == "mismatch"
    far = replace(edged, edge_gaps=(0.126, math.inf, math.inf))
    assert compare(far, other(8, 6, 7), "bfloat16").verdict == "mismatch"
    assert compare(replace(edged, edge_gaps=(), edge_tokens=()), other(8, 6, 7), "bfloat16").verdict == "mismatch"


def test_compare_knows_a_tie_of_three() -> None:
    """The first text of HumanEval in bfloat16: 33.651 was drawn, 33.617 came second, the tree took 33.660."""
    tied = replace(REFERENCE, third_gaps=(3.5, 0.125, 0.0002), thirds=(9, 4, 8))
    assert compare(tied, other(5, 4, 7), "bfloat16").verdict == "near_tie"
    assert compare(tied, other(5, 2, 7), "bfloat16").verdict == "near_tie", "the runner-up as before"
    assert compare(tied, other(5, 8, 7), "bfloat16").verdict == "mismatch", "another place's third"
    assert compare(tied, other(9, 6, 7), "bfloat16").verdict == "mismatch", "a third beyond the bound"
    assert compare(tied, other(5, 6, 8), "float32").verdict == "mismatch"
    wide = replace(tied, third_gaps=(3.5, 0.126, 0.0002))
    assert compare(wide, other(5, 4, 7), "bfloat16").verdict == "mismatch"
    assert compare(replace(tied, third_gaps=(), thirds=()), other(5, 4, 7), "bfloat16").verdict == "mismatch"


def test_compare_needs_gaps_only_to_judge() -> None:
    bare = other(5, 6, 7)
    assert compare(bare, REFERENCE, "float32").verdict == "identical"
    with pytest.raises(ValueError, match="no gaps"):
        compare(bare, other(5, 6, 8), "float32")


def test_tau_counts_emitted_tokens() -> None:
    assert replace(REFERENCE, rounds=2).tau == 1.5
    assert replace(REFERENCE, rounds=0).tau == 0.0
