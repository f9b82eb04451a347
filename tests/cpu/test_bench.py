# Owns: tests of `ratoon demo` and `ratoon bench`: cells, engines, records.
# Promises: each runs the real command line over a fake engine.
# Never: loads a model, or judges speed.
"""lab/demo.py, lab/bench.py, lab/record.py."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any, cast

import pytest

from ratoon.lab.prompts import Prompt
from ratoon.lab.record import Cell, measure
from tests.cpu import fake_engine
from tests.cpu.fake_engine import FakeEngine, ratoon


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> type[FakeEngine]:
    return fake_engine.install(monkeypatch)


def result_records(stdout: str) -> list[dict]:
    last = stdout.strip().splitlines()[-1]
    assert last.startswith("RESULT ")
    return json.loads(last.removeprefix("RESULT "))["records"]


def test_demo_ends_with_one_record_per_method(engines: type[FakeEngine]) -> None:
    result = ratoon("demo", "--max-tokens", "9")
    assert result.exit_code == 0
    records = result_records(result.stdout)
    assert [r["method"] for r in records] == ["ar", "chain", "tree"]
    assert all(r["prompts"] == 3 and r["identical_prompts"] == 3 and r["output_tokens"] == 27 for r in records)
    assert [r["tau"] for r in records] == [1.0, 3.0, 3.0]
    assert [engine.settings["drafter"] for engine in engines.made] == ["none", "auto"]
    assert engines.made[1].settings["dtype"] == "float32", "both on what the first one chose"
    assert all(engine.closed for engine in engines.made)
    assert "draft tree" in result.stdout and "━" in result.stdout


def test_time_to_the_first_token_does_not_count_the_wait_for_a_free_row(engines: type[FakeEngine]) -> None:
    engines.behaviour = staticmethod(lambda ids: time.sleep(0.05))
    cell = Cell("tree", 3, 4, concurrency=1, max_tokens=6)
    prompts = [Prompt(id=str(i), kind="code", text="a b") for i in range(3)]
    measured = measure(cast(Any, engines("m")), prompts, cell)
    assert all(0.05 <= ttft_s < 0.1 for ttft_s in measured.ttft_s)
    assert measured.wall_s >= 0.15 and measured.num_tokens == 18


FIELDS = """model drafter method budget topk_cap concurrency mode dtype device prompts output_tokens tok_s speedup_vs_ar
tau tau_cut tau_no_repeat simulated cut accept_per_position identical_prompts near_tie_prompts mismatched_prompts
ms_draft ms_build ms_verify ms_accept
ms_commit ms_draft_build ms_accept_commit ttft_ms fallbacks git_commit versions""".split()  # noqa: SIM905


def test_bench_writes_one_record_a_line(engines: type[FakeEngine], tmp_path: Path) -> None:
    prompts, out = tmp_path / "p.jsonl", tmp_path / "out.jsonl"
    prompts.write_text('{"prompt": "one two"}\n{"messages": [{"role": "user", "content": "hi"}]}\n')
    arguments = "--methods tree,ar,chain --budgets 3,auto --topk-caps 4,8 --max-tokens 6"
    result = ratoon("bench", "--prompts", str(prompts), "--json", str(out), *arguments.split())
    assert result.exit_code == 0, result.stderr
    records = [json.loads(line) for line in out.read_text().splitlines()]
    cells = [(r["method"], r["budget"], r["topk_cap"]) for r in records]
    assert cells == [
        ("ar", 0, None),
        ("chain", 3, None),
        ("chain", "auto", None),
        ("tree", 3, 4),
        ("tree", 3, 8),
        ("tree", "auto", 4),
        ("tree", "auto", 8),
    ]
    for row in records:
        assert set(FIELDS) <= set(row)
        assert row["ms_verify"] == 2.0 and row["ms_draft"] is None, "what a mode cannot tell is null"
        assert (row["identical_prompts"], row["mismatched_prompts"]) == (2, 0)
    assert records[0]["drafter"] is None and records[0]["accept_per_position"] == []
    assert records[1]["accept_per_position"] == [1.0, 1.0]
    timed = [params for _, params in engines.made[1].calls if params.max_tokens == 6]
    assert {(p.method, p.budget, p.topk_cap) for p in timed} == {
        ("chain", 3, None),
        ("chain", "auto", None),
        *(("tree", budget, cap) for budget in (3, "auto") for cap in (4, 8)),
    }


def test_bench_counts_what_differs(engines: type[FakeEngine], tmp_path: Path) -> None:
    engines.wrong_token = 2
    (tmp_path / "p.jsonl").write_text('{"prompt": "one two"}\n')
    files = ["--prompts", str(tmp_path / "p.jsonl"), "--json", str(tmp_path / "o")]
    shown = ratoon("bench", "--methods", "ar,tree", *files).stdout
    plain, tree = (json.loads(line) for line in (tmp_path / "o").read_text().splitlines())
    assert plain["mismatched_prompts"] == 0
    assert (tree["identical_prompts"], tree["near_tie_prompts"], tree["mismatched_prompts"]) == (0, 0, 1)
    [divergence] = tree["divergences"]
    assert divergence == {
        "prompt": "p/1",
        "verdict": "mismatch",
        "index": 2,
        "gap": 1.0,
        "third_gap": None,
        "bound": 1e-4,
    }
    assert "p/1 differs from token 2 on: mismatch, AR's next best are 1.0000 below" in " ".join(shown.split())


def test_bench_reports_tau_cut_at_stop_strings_and_before_repetition(engines: type[FakeEngine], tmp_path: Path) -> None:
    """Three words a round: 'the shoot that | a plant sends | up after it | was cropped'."""
    (tmp_path / "p.jsonl").write_text('{"prompt": "one two", "stop": "plant"}\n')
    files = ["--prompts", str(tmp_path / "p.jsonl"), "--json", str(tmp_path / "o"), "--methods", "tree"]
    assert ratoon("bench", *files, "--uncut").exit_code == 0
    engines.loops = True
    assert ratoon("bench", *files, "--max-tokens", "30").exit_code == 0
    uncut, looping = (json.loads(line) for line in (tmp_path / "o").read_text().splitlines())
    assert (uncut["cut"], uncut["tau"], uncut["tau_cut"], uncut["tau_no_repeat"]) == (False, 2.75, 2.5, 2.75)
    assert (looping["cut"], looping["tau"], looping["tau_cut"]) == (True, 3.0, 3.0)
    assert looping["tau_no_repeat"] == 3.0, "nine tokens, three rounds"
    assert [params.stop for _, params in (call for engine in engines.made for call in engine.calls)] == [
        (),
        (),
        (),
        ("plant",),
    ]


def test_bench_without_ar_compares_nothing(engines: type[FakeEngine], tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text('{"prompt": "one two"}\n')
    result = ratoon("bench", "--prompts", str(tmp_path / "p.jsonl"), "--methods", "tree", "--json", "-")
    row = json.loads(result.stdout)
    assert row["speedup_vs_ar"] is None and row["identical_prompts"] is None
    assert "tau" in result.stderr, "the table leaves standard output to the records"


def test_each_graphs_choice_is_a_mode(engines: type[FakeEngine], tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text('{"prompt": "one two"}\n')
    options = "--methods tree --graphs on,off,auto --concurrency 2"
    ratoon("bench", "--prompts", str(tmp_path / "p.jsonl"), *options.split())
    assert [e.settings["mode"] for e in engines.made] == ["graph", "eager", "auto"]
    assert {e.settings["max_rows"] for e in engines.made} == {2}


def test_captured_rounds_get_an_engine_per_budget(engines: type[FakeEngine]) -> None:
    options = "--prompts random:4 --limit 1 --methods ar,chain,tree --budgets 7,0,auto --topk-caps 4 --graphs"
    ratoon("bench", *options.split(), "off")
    assert [engine.settings["budget"] for engine in engines.made] == [0, "auto"]
    engines.made.clear()
    ratoon("bench", *options.split(), "on")
    served = [
        (engine.drafter, engine.settings["budget"], {(params.method, params.budget) for _, params in engine.calls})
        for engine in engines.made
    ]
    drafted = [("auto", budget, {("chain", budget), ("tree", budget)}) for budget in (7, 0, "auto")]
    assert served == [("none", 0, {("ar", 0)}), *drafted]


def test_bench_hands_engine_settings_over(engines: type[FakeEngine]) -> None:
    options = "--prompts random:9 --limit 2 --methods ar,tree --max-model-len 64 --run-ahead 1 --birth-test off"
    assert ratoon("bench", *options.split()).exit_code == 0
    for engine in engines.made:
        assert {"max_model_len": 64, "run_ahead": 1, "birth_test": "off"}.items() <= engine.settings.items()
        assert all(len(ids) == 9 and max(ids) < 100 for prompts, _ in engine.calls for ids in prompts)
    plain, tree = (engine.calls[-1][0] for engine in engines.made)
    assert plain == tree and plain[0] != plain[1], "every method gets the same random prompts"
