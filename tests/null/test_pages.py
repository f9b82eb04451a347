# Owns: the tests of runtime/pages.py.
# Promises: any order of taking, sharing and returning is followed by a plain count of holders.
# Never: imports torch.
from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ratoon.runtime.pages import PagePool


def test_every_page_but_page_0_is_handed_out_once() -> None:
    pool = PagePool(9)
    assert pool.num_free == 8
    assert pool.take(3) == [1, 2, 3]  # lowest first: a lone row's pages are neighbours
    assert sorted(pool.take(5)) == [4, 5, 6, 7, 8]
    assert pool.num_free == 0 and pool.take(0) == []
    pool.check()


def test_a_pool_needs_a_page_besides_the_dummys() -> None:
    with pytest.raises(ValueError, match="at least 2 pages"):
        PagePool(1)


def test_taking_too_many_takes_none() -> None:
    pool = PagePool(5)
    pool.take(1)
    with pytest.raises(MemoryError, match="4 pages needed, 3 of 4 free"):
        pool.take(4)
    assert pool.num_free == 3
    pool.check()


def test_a_shared_page_is_free_after_its_last_holder() -> None:
    pool = PagePool(4)
    pages = pool.take(2)
    pool.share(pages)
    pool.give_back(pages)
    assert pool.num_free == 1
    pool.check()
    pool.give_back(pages)
    assert pool.num_free == 3 and sorted(pool.take(3)) == [1, 2, 3]


@pytest.mark.parametrize("page", [0, 3, 99])
def test_a_page_that_nobody_holds_is_neither_shared_nor_returned(page: int) -> None:
    pool = PagePool(4)
    pool.take(2)
    with pytest.raises(ValueError, match=f"page {page} is not held"):
        pool.share([page])
    with pytest.raises(ValueError, match=f"page {page} is returned, but nobody holds it"):
        pool.give_back([page])
    pool.check()


def test_a_page_is_not_returned_twice() -> None:
    pool = PagePool(4)
    pages = pool.take(1)
    pool.give_back(pages)
    with pytest.raises(ValueError, match="nobody holds it"):
        pool.give_back(pages)
    pool.check()


@pytest.mark.parametrize("fault", ["lost", "twice", "held"])
def test_check_sees_a_broken_pool(fault: str) -> None:
    pool = PagePool(6)
    held = pool.take(2)
    if fault == "lost":
        pool._free.pop()
    else:
        pool._free.append(pool._free[0] if fault == "twice" else held[0])
    with pytest.raises(AssertionError, match="lost" if fault == "lost" else "free"):
        pool.check()


@given(st.integers(2, 12), st.lists(st.tuples(st.sampled_from(("take", "share", "return")), st.integers(0, 5))))
@settings(max_examples=60, deadline=None)
def test_holders_are_counted(num_pages: int, steps: list[tuple[str, int]]) -> None:
    pool, rows, holders = PagePool(num_pages), [], Counter[int]()
    for step, number in steps:
        if step == "take" and number <= pool.num_free:
            pages = pool.take(number)
            assert 0 not in pages and not any(holders[page] for page in pages)
        elif step == "share" and rows:
            pages = rows[number % len(rows)]
            pool.share(pages)
        else:
            if step == "return" and rows:
                gone = rows.pop(number % len(rows))
                pool.give_back(gone)
                holders.subtract(gone)
            continue
        rows.append(pages)
        holders.update(pages)
        pool.check()
        assert pool.num_free == num_pages - 1 - len(+holders)
    for row in rows:
        pool.give_back(row)
    pool.check()
    assert pool.num_free == num_pages - 1
