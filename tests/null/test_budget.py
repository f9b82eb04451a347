# Owns: the tests of spec/budget.py.
# Promises: every choice is held against Theta written out by hand on a synthetic table.
# Never: imports torch, or measures a machine.
from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest

from ratoon.spec.budget import PLAIN, BudgetPolicy, CostTable, Curve

SMALL, WIDE, DEEP = (4, 3), (4, 15), (8, 15)
BUCKETS = (SMALL, WIDE, DEEP)


def flat_table(base: float = 10.0, per_place: float = 0.0, draft: float = 1.0) -> CostTable:
    """base ms for a verify of one place, per_place for each further one; a draft costs the same for any rows."""
    verify = Curve((1, 101), (base, base + 100 * per_place))
    return CostTable({4: Curve((1,), (draft,)), 8: Curve((1,), (2 * draft,))}, verify)


def policy(table: CostTable, prior: Sequence[float] = (1.0, 2.0, 4.0), **changes: float) -> BudgetPolicy:
    made = BudgetPolicy(table, BUCKETS, prior, **changes)  # pyright: ignore[reportArgumentType]
    made.join(1)
    return made


# ---- what a bucket costs ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "ms"), [(1, 10.0), (3, 14.0), (5, 18.0), (7, 19.0), (9, 20.0), (13, 22.0), (0, 10.0), (-4, 10.0)]
)
def test_a_curve_is_straight_between_its_points_and_beyond_the_last(size: float, ms: float) -> None:
    assert Curve((1, 5, 9), (10.0, 18.0, 20.0)).at(size) == pytest.approx(ms)


def test_a_curve_of_one_point_is_flat() -> None:
    assert Curve((4,), (3.0,)).at(1) == Curve((4,), (3.0,)).at(400) == 3.0


def test_a_round_costs_its_draft_by_rows_and_its_verify_by_places() -> None:
    table = CostTable({4: Curve((1, 3), (1.0, 2.0))}, Curve((1, 101), (10.0, 110.0)))
    assert table.round_ms(3, PLAIN) == pytest.approx(12.0)  # three roots, nothing drafted
    assert table.round_ms(3, (4, 7)) == pytest.approx(2.0 + 9.0 + 3 * 8)


# ---- choosing ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("per_place", "best"),
    [
        (0.0, DEEP),
        (0.8, SMALL),
        (5.0, PLAIN),
    ],
)
def test_the_choice_is_the_argmax_of_expected_tokens_per_ms(per_place: float, best: tuple[int, int]) -> None:
    table = flat_table(per_place=per_place)
    prior = (1.0, 1.2, 1.4) if best == SMALL else (1.0, 2.0, 4.0)
    theta = {PLAIN: 1 / table.round_ms(1, PLAIN)}
    theta |= {b: (1 + m) / table.round_ms(1, b) for b, m in zip(BUCKETS, prior, strict=True)}
    assert max(theta, key=lambda bucket: theta[bucket]) == best
    assert policy(table, prior).choose([1]) == best


def test_rows_add_up_in_tokens_and_in_places() -> None:
    # One row: 5 tokens in 1 + 10 + 15 ms against 1 in 10. Four rows: 20 in 1 + 10 + 63 ms against 4 in 13.
    table = CostTable({4: Curve((1,), (1.0,)), 8: Curve((1,), (1.0,))}, Curve((1, 101), (10.0, 110.0)))
    made = BudgetPolicy(table, [DEEP], [4.0])
    for seat in (1, 2, 3, 4):
        made.join(seat)
    assert made.choose([1]) == DEEP
    assert made.choose([1, 2, 3, 4]) == PLAIN


def test_only_the_seats_of_the_round_count() -> None:
    made = BudgetPolicy(flat_table(), [DEEP], [4.0], rate=1.0)
    made.join(1)
    made.join(2)
    made.observe(2, DEEP, [0.0], accepted=0)
    assert made.choose([1]) == DEEP
    assert made.choose([2]) == PLAIN


def test_the_last_bucket_is_kept_within_the_hysteresis() -> None:
    table = CostTable({4: Curve((1,), (1.0,)), 8: Curve((1,), (1.0,))}, Curve((1,), (9.0,)))
    made = BudgetPolicy(table, [SMALL, WIDE], [2.00, 1.96], rate=1.0, hysteresis=0.03)
    made.join(1)
    assert made.choose([1]) == SMALL
    made.observe(1, WIDE, [2.00, 2.08], accepted=2)  # 3.08 against 3.00: 2.6 % better
    assert made.choose([1]) == SMALL
    made.observe(1, WIDE, [2.00, 2.12], accepted=2)  # 3.12 against 3.00: 3.8 % better
    assert made.choose([1]) == WIDE
    made.observe(1, WIDE, [2.05, 2.02], accepted=2)  # and now it is WIDE that is kept
    assert made.choose([1]) == WIDE


def test_one_plain_round_in_n_probes_with_the_best_drafting_bucket() -> None:
    made = policy(flat_table(per_place=5.0), probe_every=4)
    picks = [made.choose([1]) for _ in range(12)]
    assert [pick == PLAIN for pick in picks] == [True, True, True, False] * 3
    theta = {b: (1 + m) / made.table.round_ms(1, b) for b, m in zip(BUCKETS, (1.0, 2.0, 4.0), strict=True)}
    assert set(picks) == {PLAIN, max(theta, key=lambda bucket: theta[bucket])}
    assert made.decisions == Counter(picks)


def test_without_buckets_there_is_nothing_to_probe() -> None:
    made = BudgetPolicy(flat_table(), [], [], probe_every=1)
    made.join(1)
    assert {made.choose([1]) for _ in range(5)} == {PLAIN}


def test_every_decision_is_counted() -> None:
    made = policy(flat_table())
    for _ in range(7):
        made.choose([1])
    assert made.decisions == Counter({DEEP: 7})


# ---- learning ---------------------------------------------------------------------------------------------


def test_masses_move_by_the_rate() -> None:
    made = policy(flat_table(), rate=0.25)
    made.observe(1, DEEP, [2.0, 2.0, 2.0], accepted=2)
    assert made._seats[1].mass == pytest.approx([1.25, 2.0, 3.5])


def test_a_short_block_scales_the_depths_that_it_cannot_see() -> None:
    made = policy(flat_table(), rate=0.5)
    made.observe(1, WIDE, [1.0, 1.0, 0.0], accepted=1)  # block 4 saw 1.0 where 2.0 was expected
    assert made._seats[1].mass == pytest.approx([1.0, 1.5, 4.0 * 1.5 / 2.0])


def test_a_tree_too_small_for_a_bucket_says_nothing_of_it_but_its_trend() -> None:
    """Else a small bucket would report its own mass for the larger ones, and never be left again."""
    made = policy(flat_table(), rate=0.5)
    made.observe(1, DEEP, [2.0, 2.0, 2.0], accepted=2, built=3)  # bucket WIDE and DEEP hold 15
    assert made._seats[1].mass == pytest.approx([1.5, 2.0, 4.0])
    made.observe(1, SMALL, [3.0, 3.0, 3.0], accepted=2, built=3)
    assert made._seats[1].mass == pytest.approx([2.25, 2.0 * 1.5, 4.0 * 1.5])


def test_the_scale_follows_what_is_accepted() -> None:
    up, down = policy(flat_table()), policy(flat_table())
    for _ in range(400):
        up.observe(1, DEEP, [1.0, 2.0, 4.0], accepted=6)
        down.observe(1, DEEP, [1.0, 2.0, 4.0], accepted=2)
    assert up.scale == pytest.approx(1.5, abs=0.01)
    assert down.scale == pytest.approx(0.5, abs=0.01)


def test_an_acceptance_that_collapses_ends_in_plain_rounds_and_a_recovery_is_found_by_a_probe() -> None:
    made = policy(flat_table(per_place=0.05), probe_every=8)
    assert made.choose([1]) == DEEP
    for _ in range(60):
        bucket = made.choose([1])
        made.observe(1, bucket, [0.01, 0.02, 0.03], accepted=0)
    assert made.choose([1]) == PLAIN
    probes = 0
    while probes < 40:
        bucket = made.choose([1])
        probes += bucket != PLAIN
        made.observe(1, bucket, [1.0, 2.5, 6.0], accepted=bucket[1] and 3)
    assert made.choose([1]) != PLAIN


def test_a_plain_round_and_a_stranger_teach_nothing() -> None:
    made = policy(flat_table())
    made.observe(1, PLAIN, [0.0, 0.0, 0.0], accepted=0)
    made.observe(7, DEEP, [0.0, 0.0, 0.0], accepted=0)
    assert made._seats[1].mass == [1.0, 2.0, 4.0] and made.scale == 1.0 and 7 not in made._seats


def test_a_new_tenant_starts_from_the_mean_of_the_living_or_from_the_prior() -> None:
    made = policy(flat_table(), rate=1.0)
    made.join(2)
    made.observe(2, DEEP, [3.0, 4.0, 8.0], accepted=4)
    made.join(3)
    assert made._seats[3].mass == pytest.approx([2.0, 3.0, 6.0])
    for seat in (1, 2, 3):
        made.leave(seat)
    made.leave(3)  # leaving twice is no error: an aborted request may never have joined
    made.join(2)
    assert made._seats[2].mass == [1.0, 2.0, 4.0]
