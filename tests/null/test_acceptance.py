# Owns: tests of tau and of its cuts.
# Promises: each cut is compared with tokens and rounds counted by hand.
# Never: imports torch.
"""lab/acceptance.py."""

from __future__ import annotations

import pytest

from ratoon.core.request import RequestOutput
from ratoon.lab.acceptance import accept_per_position, rounds_of, tau, until_repeat, until_stop


def output(tokens: list[int], accepted: list[int]) -> RequestOutput:
    assert sum(count + 1 for count in accepted) == len(tokens)
    return RequestOutput((1,), tuple(tokens), "", "length", rounds=len(accepted), accepted=tuple(accepted))


def letters(ids: list[int]) -> str:
    return "".join(chr(token) for token in ids)


def spelled(text: str, accepted: list[int]) -> RequestOutput:
    return output([ord(letter) for letter in text], accepted)


def test_a_cut_counts_the_rounds_that_wrote_what_it_keeps() -> None:
    written = output([1, 2, 3, 4, 5, 6], [2, 0, 1])  # three, one, two tokens
    assert [rounds_of(written, length) for length in range(7)] == [0, 1, 1, 1, 2, 3, 3]
    assert tau([written]) == 2.0
    assert tau([written, written], kept=[3, 4]) == round(7 / 3, 3)
    assert tau([written], kept=[0]) is None and tau([]) is None


def test_text_ends_with_the_token_that_completes_a_stop_string() -> None:
    written = spelled("abc\ndef g", [3, 0, 3])
    assert until_stop(written, ("\nde", "zz"), letters) == 6
    assert until_stop(written, ("\ndefx",), letters) == 9, "never completed"
    assert until_stop(written, (), letters) == 9
    assert until_stop(written, ("a",), letters) == 1
    assert tau([written], kept=[6]) == 2.0


@pytest.mark.parametrize(
    ("tokens", "kept"),
    [
        (list(range(30)), 30),
        ([*range(8), *range(8)], 15),  # the run is complete with its eighth token
        ([*range(8), *range(7)], 15),  # seven are no run
        ([5] * 12, 8),  # the second run of eight begins one token later
        ([1, 2] * 10, 9),
        ([], 0),
    ],
)
def test_repetition_begins_where_a_run_of_eight_ends_again(tokens: list[int], kept: int) -> None:
    assert until_repeat(output(tokens, [0] * len(tokens))) == kept


def test_acceptance_per_position_is_unconditional() -> None:
    outputs = [output([1, 2, 3], [2]), output([1, 2, 3], [0, 1])]
    assert accept_per_position(outputs) == [round(2 / 3, 4), round(1 / 3, 4)]
    assert accept_per_position([output([1], [0])]) == []
