# Owns: tests of lab/coding.py: what the problems accept and refuse, and how answers become programs.
# Promises: every problem is shown a right answer and the wrong ones that its edge cases are for.
# Never: asks a model.
from __future__ import annotations

import pytest

from ratoon.lab.coding import FIVE, Problem, load_problems
from ratoon.lab.prompts import Prompt, humaneval_problems, load_prompts
from ratoon.lab.sandbox import Limits, Sandbox

SANDBOX = Sandbox.open(unsafe=True)
QUICK = Sandbox(SANDBOX.isolated, Limits(cpu_s=1))
BY_NAME = {problem.entry_point: problem for problem in FIVE}

RIGHT = {
    "is_palindrome": "def is_palindrome(t):\n    t = [c.lower() for c in t if c.isalnum()]\n    return t == t[::-1]",
    "fibonacci": "def fibonacci(n):\n    a, b = 0, 1\n    for _ in range(n): a, b = b, a + b\n    return a",
    "merge_sorted": "def merge_sorted(a, b):\n    return sorted(a + b)",
    "word_count": "from collections import Counter\ndef word_count(t):\n    return dict(Counter(t.lower().split()))",
    "gcd": "def gcd(a, b):\n    while b: a, b = b, a % b\n    return a",
}
WRONG = [
    ("is_palindrome", "def is_palindrome(t): return t == t[::-1]", "Noon"),
    ("is_palindrome", "def is_palindrome(t):\n    t = t.lower().replace(' ', '')\n    return t == t[::-1]", "Panama"),
    ("is_palindrome", "def is_palindrome(t): return (t := [c for c in t.lower() if c.isalpha()]) == t[::-1]", "0P"),
    ("fibonacci", "def fibonacci(n): return 1 if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)", "fibonacci(0)"),
    ("fibonacci", "def fibonacci(n): return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)", "processor time"),
    ("fibonacci", "def fibonacci(n): return round((1 + 5**0.5)**n / (2**n * 5**0.5))", "fibonacci(90)"),
    ("merge_sorted", "def merge_sorted(a, b): return a + b", "[2, 4, 6]"),
    ("merge_sorted", "def merge_sorted(a, b): return sorted({*a, *b})", "[1, 1, 2]"),
    ("merge_sorted", "def merge_sorted(a, b): return sorted(a + b, key=abs)", "[-3, 0]"),
    ("merge_sorted", "def merge_sorted(a, b):\n    if not b: return a\n    return sorted(a + b)", "not a new one"),
    ("merge_sorted", "def merge_sorted(a, b):\n    a += b\n    a.sort()\n    return list(a)", "arguments changed"),
    ("word_count", "def word_count(t): return {w: t.split().count(w) for w in t.split()}", "The the THE"),
    ("word_count", "def word_count(t):\n    w = t.lower().split(' ')\n    return {k: w.count(k) for k in w}", '("")'),
    ("gcd", "def gcd(a, b): return next(n for n in range(min(a, b), 0, -1) if a % n == b % n == 0)", "StopIteration"),
    ("gcd", "def gcd(a, b):\n    while a and b: a, b = max(a, b) - min(a, b), min(a, b)\n    return a + b", "time"),
]  # fmt: skip


def test_there_are_five_problems() -> None:
    assert load_problems("five") == list(FIVE) and set(BY_NAME) == set(RIGHT) and len(FIVE) == 5
    assert [problem.entry_point for problem in load_problems("five", 2)] == ["is_palindrome", "fibonacci"]
    with pytest.raises(ValueError, match="--limit 0"):
        load_problems("five", 0)


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_answer_passes(name: str) -> None:
    problem = BY_NAME[name]
    answer = f"Sure! Here it is:\n\n```python\n{RIGHT[name]}\n```\nIt is quick."
    judged = SANDBOX.run(problem.program(answer), problem.tests)
    assert judged.passed, judged.cause


@pytest.mark.parametrize(("name", "program", "cause"), WRONG)
def test_a_wrong_answer_fails_where_it_is_wrong(name: str, program: str, cause: str) -> None:
    judged = QUICK.run(program, BY_NAME[name].tests)
    assert not judged.passed and cause in judged.cause, judged


def test_humaneval_has_tests_that_canonical_solutions_pass() -> None:
    problems, raw = load_problems("humaneval"), humaneval_problems()
    assert [problem.prompt for problem in problems] == load_prompts("humaneval") and len(problems) == 164
    for number in (0, 32, 163):  # the tests of 32 call a function of its prompt
        program = problems[number].program(raw[number]["canonical_solution"])
        assert SANDBOX.run(program, problems[number].tests).passed
        empty = SANDBOX.run(problems[number].program("    return None\n"), problems[number].tests)
        assert not empty.passed, "a body that does nothing"


CHAT = Problem(Prompt("c", "chat", messages=({"role": "user", "content": "?"},)), "f", "")
RAW = Problem(Prompt("r", "code", "import re\n\ndef f(x):\n    '''Doc.'''\n"), "f", "")


@pytest.mark.parametrize(
    ("answer", "program"),
    [
        ("```python\ndef f(): pass\n```", "def f(): pass\n"),
        ("Use:\n```\nf()\n```\nof\n```py\ndef f(): pass\n```", "def f(): pass\n"),
        ("1. so:\n   ```python\n   def f():\n       pass\n   ```", "def f():\n    pass\n"),
        ("```python\ndef f():\n    return 1", "def f():\n    return 1"),
        ("```python\ng = 1\n```\nand\n```python\nh = 2\n```", "g = 1\n\nh = 2\n"),
        ("Here:\nimport re\ndef f():\n\n    return 1\nAll.\ndef g(): pass", "import re\ndef f():\n\n    return 1"),
        ("I cannot.", ""),
    ],
)  # fmt: skip
def test_code_of_a_chat_answer(answer: str, program: str) -> None:
    assert CHAT.program(answer) == program


@pytest.mark.parametrize(
    ("answer", "program"),
    [
        ("    return 1\n", "    return 1\n"),
        ("    return 1\n```\nThat is all.", "    return 1"),
        ("```python\ndef f(x):\n    return 2\n```\n", "\ndef f(x):\n    return 2\n"),
    ],
)
def test_code_of_a_completion_keeps_its_prompt(answer: str, program: str) -> None:
    assert RAW.program(answer) == RAW.prompt.text + program
