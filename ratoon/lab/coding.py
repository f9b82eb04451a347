# Owns: the coding problems of `ratoon eval`, and how an answer becomes a program.
# Promises: the same problems in the same order every time; an answer is cut, never mended.
# Never: runs a program.
"""Five small problems asked in chat, and HumanEval as raw text to be continued (pass@1)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from textwrap import dedent
from typing import Literal

from ratoon.lab.prompts import Prompt, humaneval_problems, humaneval_prompt

SetName = Literal["five", "humaneval"]

_FENCED = re.compile(r"^[ \t]*```[^\n`]*\n(.*?)(?:^[ \t]*```|\Z)", flags=re.M | re.S)
_STARTS = ("def ", "class ", "import ", "from ", "@")


@dataclass(frozen=True)
class Problem:
    """`tests` call `entry_point` of the program and raise where it is wrong."""

    prompt: Prompt
    entry_point: str
    tests: str

    @property
    def asked(self) -> str:
        """What the model was given, before any chat template."""
        return self.prompt.text or self.prompt.messages[-1]["content"]

    def program(self, answer: str) -> str:
        """The program that an answer makes: its fenced code if that defines the function, else, of a completion, the
        prompt continued, and of a chat answer the lines that look like code."""
        blocks = [dedent(block) for block in _FENCED.findall(answer)]
        whole = next((block for block in blocks if self._is_defined_in(block)), None)
        if self.prompt.messages:
            return whole or "\n".join(blocks) or _code_lines(answer)
        return self.prompt.text + (f"\n{whole}" if whole else answer.split("\n```")[0])

    def _is_defined_in(self, code: str) -> bool:
        return re.search(rf"^def {re.escape(self.entry_point)}\(", code, flags=re.M) is not None


def load_problems(name: SetName, limit: int | None = None) -> list[Problem]:
    """The problems of a set, at most `limit` of them. ValueError for a limit below 1 or a missing package."""
    if limit is not None and limit < 1:
        raise ValueError(f"--limit {limit} leaves no problem: use at least 1")
    return (list(FIVE) if name == "five" else _humaneval())[:limit]


def _humaneval() -> list[Problem]:
    return [
        Problem(
            prompt=humaneval_prompt(p),
            entry_point=p["entry_point"],
            tests=f"{p['test']}\ncheck({p['entry_point']})\n",
        )
        for p in humaneval_problems()
    ]


def _code_lines(answer: str) -> str:
    """From the first line that looks like code to the first unindented one after it that does not."""
    kept: list[str] = []
    for line in answer.splitlines():
        if line.startswith(_STARTS) or (kept and (not line.strip() or line[0] in " \t#)]}")):
            kept.append(line)
        elif kept:
            break
    return "\n".join(kept)


def _five(entry_point: str, stub: str, tests: str) -> Problem:
    question = (
        f"Complete this Python function. Answer with the whole function in one code block.\n\n```python\n{stub}```"
    )
    prompt = Prompt(id=f"five/{entry_point}", kind="chat", messages=({"role": "user", "content": question},))
    return Problem(prompt, entry_point, tests)


FIVE: tuple[Problem, ...] = (
    _five(
        "is_palindrome",
        '''def is_palindrome(text: str) -> bool:
    """Whether the text reads the same backwards. Only letters and digits count, and upper case equals lower case."""
''',
        """assert is_palindrome("level") is True
assert is_palindrome("levels") is False
assert is_palindrome("") is True
assert is_palindrome("x") is True
assert is_palindrome("xy") is False
assert is_palindrome("Noon") is True
assert is_palindrome("A man, a plan, a canal: Panama!") is True
assert is_palindrome("0P") is False
assert is_palindrome("1 2 1") is True
assert is_palindrome("?!") is True
""",
    ),
    _five(
        "fibonacci",
        '''def fibonacci(n: int) -> int:
    """The n-th Fibonacci number: fibonacci(0) is 0 and fibonacci(1) is 1. It must be quick for n up to 300."""
''',
        """assert fibonacci(0) == 0
assert fibonacci(1) == 1
assert fibonacci(2) == 1
assert fibonacci(3) == 2
assert fibonacci(10) == 55
assert fibonacci(30) == 832040
assert fibonacci(90) == 2880067194370816120
assert fibonacci(300) == 222232244629420445529739893461909967206666939096499764990979600
""",
    ),
    _five(
        "merge_sorted",
        '''def merge_sorted(a: list[int], b: list[int]) -> list[int]:
    """Merge two sorted lists into a new sorted list. Equal numbers are all kept, and a and b stay as they are."""
''',
        """assert merge_sorted([1, 3, 5], [2, 4, 6]) == [1, 2, 3, 4, 5, 6]
assert merge_sorted([], []) == []
assert merge_sorted([], [1]) == [1]
assert merge_sorted([1], []) == [1]
assert merge_sorted([1, 1, 2], [1, 2, 2]) == [1, 1, 1, 2, 2, 2]
assert merge_sorted([5, 6], [1, 2, 3, 4]) == [1, 2, 3, 4, 5, 6]
assert merge_sorted([-3, 0], [-2]) == [-3, -2, 0]
a, b = [1, 4], [2, 3]
assert merge_sorted(a, b) == [1, 2, 3, 4]
assert (a, b) == ([1, 4], [2, 3]), "its arguments changed"
c = [1]
assert merge_sorted(c, []) is not c, "the list is not a new one"
""",
    ),
    _five(
        "word_count",
        '''def word_count(text: str) -> dict[str, int]:
    """How often each word occurs, in lower case. Words are separated by white space of any kind and length."""
''',
        """assert word_count("one two one") == {"one": 2, "two": 1}
assert word_count("") == {}
assert word_count("   ") == {}
assert word_count("The the THE") == {"the": 3}
assert word_count("  a  b\\ta\\nb a ") == {"a": 3, "b": 2}
assert word_count("word") == {"word": 1}
assert word_count("don't stop don't") == {"don't": 2, "stop": 1}
""",
    ),
    _five(
        "gcd",
        '''def gcd(a: int, b: int) -> int:
    """The greatest common divisor of two integers that are not negative. gcd(0, n) is n. Quick for large numbers."""
''',
        """assert gcd(12, 18) == 6
assert gcd(18, 12) == 6
assert gcd(17, 5) == 1
assert gcd(7, 7) == 7
assert gcd(0, 5) == 5
assert gcd(5, 0) == 5
assert gcd(0, 0) == 0
assert gcd(1, 10**18) == 1
assert gcd(10**18, 6 * 10**9) == 2 * 10**9
assert gcd(2**61 - 1, 10**18) == 1
""",
    ),
)
