# Owns: the doctor's wiring checks: each planted fault is named by its own check, healthy pairs raise no alarm.
# Promises: faults are planted into the real round or the live drafter, never into the check.
# Never: needs a trained drafter.
from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from ratoon.lab.doctor.check import Check, failures, guarded
from ratoon.lab.doctor.trial import Pair
from ratoon.lab.doctor.wiring import WIRING
from tests.cpu.toy import Ask, Bench, make_drafter, make_target

SLIDING: dict[str, Any] = {
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 5,
    "use_sliding_window": True,
}
YARN: dict[str, Any] = {
    "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
}
Plant = Callable[[Bench], None]


def bench_of(mode: Any = "eager", **keys: Any) -> Bench:
    return Bench(make_target(), make_drafter(**keys), mode, rows=2)


def drafter_of(bench: Bench) -> Any:
    return bench.runner.round.drafter


def examined(bench: Bench, plant: Plant | None = None) -> dict[str, Check]:
    """All wiring checks, against the config from before the fault."""
    expected = drafter_of(bench).config
    if plant:
        plant(bench)
    pair = Pair(bench.runner, expected)
    return {name: guarded(name, lambda check=check: check(pair)) for name, check in WIRING.items()}


@pytest.mark.parametrize("mode", ["eager", "static", "graph"])
@pytest.mark.parametrize(
    "keys",
    [
        {},
        SLIDING,
        YARN,
        SLIDING | {"is_causal": False},
        {"use_swa": True, "swa_window_size": 3},
        {"anchor_first": True, "attention_bias": True, "input_embedding_scale": 3.0, "is_causal": True},
    ],
    ids=["plain", "sliding", "yarn", "bidirectional window", "forced window", "anchor first"],
)
def test_healthy_pairs_pass_and_serve_afterwards(mode: Any, keys: dict[str, Any]) -> None:
    bench = bench_of(mode, **keys)
    ask = Ask(prompt=(5, 9, 1, 30), num=8, budget=7, cap=4)
    [before] = bench.run([ask])
    checks = examined(bench)
    assert failures(checks.values()) == []
    assert bool(bench.runner.state.done_S.all()) and not bool(bench.runner.table["cache"].any())
    [after] = bench.run([ask])
    assert after.tokens == before.tokens and after.accepted == before.accepted


def taps_one_later(bench: Bench) -> None:
    round_ = bench.runner.round
    round_.tap_ids = tuple(tap + 1 for tap in round_.tap_ids)


def taps_in_another_order(bench: Bench) -> None:
    bench.runner.round.tap_ids = bench.runner.round.tap_ids[::-1]


def masks(**changes: Any) -> Plant:
    def plant(bench: Bench) -> None:
        passes = bench.runner.round.passes
        passes.drafter = replace(passes.drafter, **changes)  # pyright: ignore[reportArgumentType]

    return plant


def mask_in_slot_0(bench: Bench) -> None:
    drafter = drafter_of(bench)
    healthy = drafter.block_embeddings

    def block_embeddings(*args: Any) -> torch.Tensor:
        x_TH = healthy(*args)
        x_TH[0] = x_TH[1]
        return x_TH

    drafter.block_embeddings = block_embeddings


def block_one_late(bench: Bench) -> None:
    passes: Any = bench.runner.round.passes
    healthy = passes.block
    passes.block = lambda *args: replace(healthy(*args), position_T=healthy(*args).position_T + 1)


def zero_mask(bench: Bench) -> None:
    drafter_of(bench).set_mask_embedding(torch.zeros(32))


def zero_mask_in_the_table(bench: Bench) -> None:
    bench.runner.round.target.embed.weight.data[drafter_of(bench).config.mask_token_id] = 0


def another_mask(bench: Bench) -> None:
    bench.runner.round.drafter.config = replace(drafter_of(bench).config, mask_token_id=3)  # pyright: ignore


def no_amplitude(bench: Bench) -> None:
    rotary = drafter_of(bench).rotary
    rotary.rope = replace(rotary.rope, amplitude=1.0)


def another_theta(bench: Bench) -> None:
    drafter_of(bench).rotary.inv_freq *= 0.9


def no_key_norm(bench: Bench) -> None:
    context = drafter_of(bench).context
    context.k_norm_LD = nn.Parameter(torch.ones_like(context.k_norm_LD), requires_grad=False)


def another_target(bench: Bench) -> None:
    target = bench.runner.round.target
    target.config = replace(target.config, vocab_size=49)


def hard_of_hearing(bench: Bench) -> None:
    """Block attention whose queries are halved: no named check looks there."""
    passes: Any = bench.runner.round.passes
    healthy = passes.block

    def block(*args: Any) -> Any:
        found: Any = healthy(*args)
        own = found.attend._attend
        found.attend._attend = lambda layer, q, kv: own(layer, 0.5 * q, kv)
        return found

    passes.block = block


@pytest.mark.parametrize(
    ("keys", "plant", "name", "words"),
    [
        (
            {"target_layer_ids": [0]},
            taps_one_later,
            "taps",
            "tap 0 is the stream after layer 1 instead of layer 0 (off",
        ),
        ({}, taps_in_another_order, "taps", "tap 0 is the stream after layer 0 instead of layer 1"),
        (SLIDING, masks(windows=(None, None)), "masks", "layer 0 is run as full, its window is ignored"),
        (SLIDING, masks(causal=(False, False)), "masks", "layer 0 is run bidirectional"),
        ({}, masks(causal=(False, True)), "masks", "layer 1 is run causal"),
        (SLIDING, masks(windows=(None, None), causal=(False, False)), "masks", "layer 0 is run full and bidirectional"),
        (SLIDING, masks(windows=(6, None)), "masks", "layer 0 differs at"),
        ({}, mask_in_slot_0, "anchor", "slot 0 holds the mask row: the anchor's embedding is missing"),
        ({}, block_one_late, "anchor", "block positions [24, 25"),
        ({}, zero_mask, "mask row", "the mask row is zero"),
        ({}, zero_mask_in_the_table, "mask row", "the mask row is zero"),
        (YARN, no_amplitude, "rope", "the running amplitude is 1.0000"),
        ({}, another_theta, "rope", "angles differ"),
        ({}, no_key_norm, "rope", "amplitude"),
        ({}, another_target, "pair", "vocab_size is 48, the target's 49"),
        ({}, hard_of_hearing, "draft pass", "off a dense pass"),
    ],
    ids=lambda value: getattr(value, "__name__", None) if callable(value) else None,
)
def test_a_planted_fault_is_named(keys: dict[str, Any], plant: Plant, name: str, words: str) -> None:
    checks = examined(bench_of(**keys), plant)
    failed = [check.name for check in failures(checks.values())]
    assert failed and failed[0] == name, [checks[other].seen for other in failed]
    assert words in checks[name].seen and checks[name].expected and checks[name].remedy


def test_changed_settings_are_named_by_the_pair() -> None:
    checks = examined(bench_of(), another_mask)
    assert "mask_token_id 3, not 47" in checks["pair"].seen
    assert [check.name for check in failures(checks.values())] == ["pair", "mask row"]


def test_a_crash_inside_a_check_is_its_failure_and_no_more() -> None:
    bench = bench_of()
    drafter_of(bench).store_context = None
    checks = examined(bench)
    assert checks["taps"].status == "fail" and "TypeError" in checks["taps"].seen
    assert checks["masks"].status == "ok" and checks["pair"].status == "ok"


def test_an_engine_without_a_drafter_has_no_pair() -> None:
    bench = Bench(make_target(), None, rows=1)
    with pytest.raises(ValueError, match="no drafter"):
        Pair(bench.runner, make_drafter().config).drafter  # noqa: B018
