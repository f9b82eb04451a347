# Owns: bisect's own behaviour: flips, the order of the search, side-by-side runs, children, verdicts, the command.
# Promises: each rule of the search has a case that breaks without it.
# Never: loads a real model.
from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ratoon.lab.bisect import child
from ratoon.lab.bisect import search as search_module
from ratoon.lab.bisect.case import Case, Flip, flips, running
from ratoon.lab.bisect.descend import side_by_side
from ratoon.lab.bisect.observe import SCRATCH, Observation, compare
from ratoon.lab.bisect.outcome import Difference, Outcome, Verdict
from ratoon.lab.bisect.search import bisect
from ratoon.lab.bisect.stack import place_of
from ratoon.lab.faults import planted
from tests.cpu.fake_engine import ratoon
from tests.cpu.planting import HERE, case_of, open_toy

SICK = Outcome("tokens", "token 3 of prompt 0: plain decoding gives 1, this case 2")
WELL = Outcome("healthy", "tau 2.0")
CULPRIT = Difference("commit", "keys and values of cache", (17, 0), 1.0, 2.0, layer=3, slot=17, round=2)


@dataclass
class Told:
    """A worker that is told which values heal."""

    heals: Mapping[str, Any]
    first: Outcome = SICK
    culprit: Difference | None = CULPRIT
    ran: list[Case] = field(default_factory=list)
    descended: list[tuple[Case, Case | None]] = field(default_factory=list)

    def run(self, case: Case) -> Outcome:
        self.ran.append(case)
        healed = any(getattr(case, name) == value for name, value in self.heals.items())
        return WELL if healed else self.first

    def descend(self, case: Case, healed: Case | None) -> Difference | None:
        self.descended.append((case, healed))
        return self.culprit


# ---- cases and flips --------------------------------------------------------------------------------------


def test_a_case_survives_json() -> None:
    case = case_of(band=(2.0, 3.5), prompts=("text", (1, 2, 3)), plant="none field")
    assert Case.from_json(json.loads(json.dumps(case.as_json()))) == case
    assert Case.from_json(json.loads(json.dumps(case_of().as_json()))) == case_of()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"prompts": ()}, "at least one prompt"),
        ({"rows": 0}, "rows must be at least 1"),
        ({"band": (3.0, 2.0)}, "LOW:HIGH"),
        ({"band": (0.5, 2.0)}, "LOW:HIGH"),
    ],
)
def test_what_cannot_be_a_case_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        case_of(**changes)


def test_flips_come_mildest_first_and_change_one_variable() -> None:
    case = case_of(mode="graph", kernels="triton", run_ahead=1, rows=4, budget=32, topk_cap=8, page_size=16)
    case = replace(case, dtype="bfloat16")
    found = list(flips(case))
    assert [str(flip) for flip in found] == [
        *("mode staged", "mode static", "mode eager", "kernels torch", "run_ahead 0", "page_size 64", "rows 1"),
        *("budget 16", "budget 8", "budget 1", "topk_cap 1", "dtype float32", "drafter none"),
    ]
    assert [flip.keeps_tree for flip in found] == [True] * 6 + [False] * 7
    for flip in found[:-1]:
        assert flip.apply(case) == replace(case, **{flip.variable: flip.value}) != case
    assert flips_of(case_of(method="ar", budget=0, drafter="none")) == ["page_size 16"]
    assert "budget 16" in flips_of(case_of(budget="auto")), "an automatic budget is fixed first"
    assert flips_of(case_of(budget=1))[1:] == ["drafter none"] or "budget 1" not in flips_of(case_of(budget=1))


def flips_of(case: Case) -> list[str]:
    return [str(flip) for flip in flips(case)]


def test_without_a_drafter_the_method_is_plain_decoding() -> None:
    plain = Flip("drafter", "none").apply(case_of())
    assert (plain.drafter, plain.method, plain.budget) == ("none", "ar", 0)


def test_auto_is_resolved_before_anything_runs() -> None:
    found = running("cpu", "auto", "auto", None, None, "auto")
    assert found == {"device": "cpu", "mode": "eager", "kernels": "torch", "run_ahead": 0, "method": "tree"}
    assert running("cpu", "graph", "triton", 2, None, "none")["method"] == "ar"
    assert running("cpu", "graph", "triton", 2, None, "none")["kernels"] == "triton"


# ---- the search -------------------------------------------------------------------------------------------


def test_the_mildest_healing_flip_is_reported_and_ends_the_flipping() -> None:
    worker = Told({"page_size": 16, "rows": 1})
    verdict = bisect(case_of(mode="static", rows=2), worker)
    assert verdict.healed_by == "page_size 16" and verdict.culprit == CULPRIT
    assert [trial.flip for trial in verdict.trials] == ["mode eager", "page_size 16"]
    # The plainest mode that is sick goes down beside the healed configuration.
    [(sick, healed)] = worker.descended
    assert sick.mode == "eager" and healed is not None and healed.page_size == 16


def test_a_flip_that_makes_other_trees_is_not_run_beside_the_sick_one() -> None:
    worker = Told({"budget": 5})
    assert bisect(case_of(), worker).healed_by == "budget 5"
    assert worker.descended == [(case_of(), None)]


def test_a_right_text_is_audited_without_flips() -> None:
    worker = Told({"page_size": 4})
    verdict = bisect(case_of(), worker)
    assert verdict.first == WELL and not verdict.trials and worker.descended == [(case_of(), None)]
    assert not verdict.is_healthy and "none in the text" in verdict.lines()[0]
    assert bisect(case_of(), Told({"page_size": 4}, culprit=None)).is_healthy


@pytest.mark.parametrize(
    "first", [Outcome("hang", "no end within 9 s"), Outcome("crash", "the process died of SIGSEGV", "commit", "f:1 g")]
)
def test_what_ended_its_process_is_not_gone_down_into(first: Outcome) -> None:
    worker = Told({"topk_cap": 1}, first)
    verdict = bisect(case_of(), worker)
    assert worker.descended == [] and verdict.healed_by == "topk_cap 1" and not verdict.is_healthy
    assert f"stage {first.stage or 'unknown'}" in verdict.lines()[-1] or first.stage is None


def test_a_flip_that_cannot_be_is_passed_over() -> None:
    class Picky(Told):
        def run(self, case: Case) -> Outcome:
            if case.page_size == 16:
                raise ValueError("no such size")
            return super().run(case)

    said: list[str] = []
    verdict = bisect(case_of(), Picky({"budget": 5}), said.append)
    assert verdict.healed_by == "budget 5" and "page_size 16: cannot be (no such size)" in said


def test_a_verdict_is_said_in_plain_lines() -> None:
    verdict = Verdict(SICK, (), None, CULPRIT, 1.0)
    assert verdict.lines()[-1].startswith(
        "culprit: stage commit, operation keys and values of cache, layer 3, round 2, first wrong slot 17, "
        "at [17, 0]: expected 1, got 2"
    )
    assert json.loads(json.dumps(verdict.as_json()))["culprit"]["slot"] == 17


# ---- comparing --------------------------------------------------------------------------------------------


def record(**values: Any) -> Observation:
    seen = Observation()
    for name, value in values.items():
        stage, _, operation = name.partition("_")
        seen.add(stage, operation, torch.as_tensor(value))
    return seen


def test_the_first_difference_is_that_of_the_first_stage() -> None:
    want = record(commit_start=[3, 4], verify_hidden=[1.0, 2.0], build_token=[1, 2])
    got = record(commit_start=[3, 5], verify_hidden=[1.0, 2.5], build_token=[1, 2])
    found = compare(want, got, 1e-3)
    assert found is not None and (found.stage, found.coordinate, found.expected, found.got) == ("verify", (1,), 2, 2.5)
    assert compare(want, record(build_token=[1, 2]), 0) is None, "what one side did not record is not compared"


def test_tolerance_is_of_the_largest_value_and_nan_is_a_difference() -> None:
    assert compare(record(verify_x=[1.0, 100.0]), record(verify_x=[1.05, 100.0]), 1e-3) is None
    found = compare(record(verify_x=[1.0, 100.0]), record(verify_x=[1.05, 100.0]), 0)
    assert found is not None and found.num_wrong == 1
    assert compare(record(verify_x=[1.0]), record(verify_x=[float("nan")]), 0.1) is not None
    assert compare(record(verify_x=[float("inf")]), record(verify_x=[float("inf")]), 0.1) is None
    sizes = compare(record(build_x=[1]), record(build_x=[1, 2]), 0)
    assert sizes is not None and sizes.got == "size [2]"


def test_layers_come_before_what_they_end_in_and_scratch_is_compared_from_its_end() -> None:
    want, got = record(verify_hidden=[1.0]), record(verify_hidden=[9.0])
    for seen, values in ((want, [7.0, 1.0, 2.0]), (got, [1.0, 3.0])):
        seen.add("verify", SCRATCH, torch.tensor(values), layer=1)
    found = compare(want, got, 0)
    assert found is not None and (found.operation, found.layer, found.expected) == (SCRATCH, 1, 2.0)


# ---- side by side -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["eager", "static"])
def test_healthy_sides_do_not_differ(mode: str) -> None:
    assert side_by_side(case_of(mode=mode, rows=2), case_of(mode="static", rows=2, page_size=16), open_toy) is None


@pytest.mark.parametrize("changes", [{"seed": 1}, {"budget": 3}, {"max_tokens": 3}, {"prompts": ((1,),)}])
def test_sides_that_differ_for_another_reason_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"different {next(iter(changes))} are not compared"):
        side_by_side(case_of(), case_of(**changes), open_toy)
    with pytest.raises(ValueError, match="fix the budget"):
        side_by_side(case_of(budget="auto"), case_of(budget="auto"), open_toy)


def test_a_number_frozen_in_a_graph_is_found_beside_static() -> None:
    """Without its birth test the graph serves: the first layer whose keys heard the wrong attention is named."""
    verdict = bisect(case_of(mode="staged", birth_test="off", plant="baked length"), HERE)
    assert verdict.first.kind == "tokens" and verdict.healed_by == "mode static"
    found = verdict.culprit
    assert found is not None and (found.stage, found.layer, found.round) == ("verify", 1, 0)
    assert found.against == "the healed configuration"


def test_memory_that_nobody_committed_is_noise_on_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    """A side that reads past its live length differs, although both sides hold the same garbage in a fresh cache."""
    from ratoon.ops import attention as attention_module
    from ratoon.spec import passes as passes_module

    healthy = passes_module.tree_mask

    def one_more(layout: Any, bits: Any, base_R: Any, context: int) -> Any:
        seen = healthy(layout, bits, base_R, context)
        return seen | (torch.arange(context) == int(layout.end_R.max())) if layout.end_R is not None else seen

    monkeypatch.setattr(passes_module, "tree_mask", one_more)
    read = attention_module._read
    monkeypatch.setattr(attention_module, "_read", lambda *args: read(args[0], replace(args[1], end_R=None), *args[2:]))
    found = HERE.descend(case_of(mode="static"), None)
    assert found is not None and (found.stage, found.operation) == ("verify", "attention")


def test_acceptance_outside_its_band_is_a_symptom() -> None:
    assert HERE.run(case_of(band=(1.0, 8.0))).is_healthy
    outcome = HERE.run(case_of(band=(6.0, 8.0)))
    assert outcome.kind == "acceptance" and "outside of 6..8" in outcome.detail


def test_a_nan_is_a_symptom_and_its_layer_is_named() -> None:
    def damaged(case: Case) -> Any:
        engine = open_toy(case)
        layer: Any = engine.runner.round.target.layers[1]
        layer.self_attn.o_proj.weight.data[0, 0] = torch.nan
        return engine

    worker = type(HERE)(damaged)
    verdict = bisect(case_of(mode="static"), worker)
    found = verdict.culprit
    assert verdict.first.kind == "nan" and found is not None
    assert (found.stage, found.operation, found.layer) == ("prefill", "keys and values of cache", 2)
    assert found.expected == "a finite number"


def test_a_nan_that_a_round_makes_is_named_by_its_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    from ratoon.spec.round import Round

    healthy = Round.verify

    def verify(*args: Any) -> Any:
        seen = healthy(*args)
        seen.hidden_TH[0, 5] = torch.nan
        return seen

    monkeypatch.setattr(Round, "verify", verify)
    found = HERE.descend(case_of(mode="static"), None)
    assert found is not None and (found.stage, found.operation, found.coordinate) == ("verify", "hidden", (0, 5))


# ---- children ---------------------------------------------------------------------------------------------


def test_a_stack_names_stage_and_line_of_the_engine_only() -> None:
    root = Path(child.__file__).resolve().parents[2]
    frames = [
        '  File "/somewhere/torch/nn.py", line 3 in linear',
        f'  File "{root}/lab/faults.py", line 9 in move',
        f'  File "{root}/spec/round.py", line 42 in _commit_cache',
        f'  File "{root}/spec/round.py", line 7 in accept_commit',
    ]
    assert place_of(frames) == ("commit", "spec/round.py:42 _commit_cache")
    assert place_of(frames[:2]) == (None, None)


def late(monkeypatch: pytest.MonkeyPatch, second: Outcome) -> tuple[Outcome, list[Mapping[str, str]]]:
    """A case whose first child dies of a late error."""
    asked: list[Mapping[str, str]] = []

    def run_once(case: Case, limit_s: float, environment: Mapping[str, str]) -> Outcome:
        asked.append(environment)
        first = Outcome("crash", "RuntimeError: CUDA error: an illegal memory access", "accept", "ops/sample.py:1 f")
        return second if environment else first

    monkeypatch.setattr(child, "_run_once", run_once)
    return child.run(case_of(device="cuda"), 9), asked


def test_a_late_error_is_looked_at_again_with_blocking_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    true = Outcome("crash", "RuntimeError: CUDA error: an illegal memory access", "verify", "ops/attention.py:2 g")
    outcome, asked = late(monkeypatch, true)
    assert asked == [{}, {"CUDA_LAUNCH_BLOCKING": "1"}]
    assert (outcome.stage, outcome.where) == ("verify", "ops/attention.py:2 g")
    outcome, _ = late(monkeypatch, WELL)
    assert outcome.stage == "accept" and "a race" in outcome.detail


def test_a_child_that_is_given_nonsense_is_bad_input(model: Path, drafter: Path) -> None:
    with pytest.raises(ValueError, match="page_size must be at least 1, got 0"):
        child.run(case_of(model=str(model), drafter=str(drafter), page_size=0), 60)


def test_a_child_that_says_nothing_crashed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child.sys, "executable", "/bin/false")
    try:
        outcome = child.run(case_of(), 60)
    except (BrokenPipeError, subprocess.SubprocessError):
        pytest.fail("the death of a child is a result")
    assert outcome.kind == "crash" and "ended with code 1" in outcome.detail


# ---- the command ------------------------------------------------------------------------------------------


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command's children are this process."""
    monkeypatch.setattr("ratoon.models.hub.resolve", lambda model, progress=None: model)
    monkeypatch.setattr(search_module, "Isolated", lambda limit_s: ToyPrompts())


class ToyPrompts:
    """Runs the command's case over a toy pair, on the toy's own prompts."""

    def run(self, case: Case) -> Outcome:
        return HERE.run(self._toy(case))

    def descend(self, case: Case, healed: Case | None) -> Difference | None:
        return HERE.descend(self._toy(case), healed and self._toy(healed))

    def _toy(self, case: Case) -> Case:
        return replace(case, prompts=case_of().prompts, max_model_len=case_of().max_model_len, max_tokens=16)


ARGUMENTS = ("bisect", "--dtype", "float32", "--device", "cpu", "--budget", "11", "--topk-cap", "0")


def test_the_command_names_a_planted_fault(here: None, tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    result = ratoon(*ARGUMENTS, "--plant", "scattered accept as prefix", "--json", str(out))
    assert result.exit_code == 1, result.output
    assert "culprit: stage commit, operation keys and values of cache, layer 0" in result.output
    assert "first wrong slot" in result.output and "error:" not in result.output
    found = json.loads(out.read_text())
    assert found["culprit"]["stage"] == "commit" and found["case"]["budget"] == 11 and not found["healthy"]


def test_the_command_calls_a_healthy_case_healthy(here: None) -> None:
    result = ratoon(*ARGUMENTS)
    assert result.exit_code == 0 and "healthy: tau" in result.output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--band", "high"), "--band must be LOW:HIGH"),
        (("--plant", "x"), "no fault 'x'"),
        (("--rows", "0"), "rows must be at least 1"),
        (("--time-limit", "0"), "--time-limit must be above 0"),
        (("--budget", "many"), "--budget must be"),
        (("--limit", "0"), "at least one prompt"),
        (("--prompts", "nowhere.jsonl"), "no such file"),
    ],
)
def test_bad_input_is_one_line(here: None, arguments: tuple[str, ...], words: str) -> None:
    result = ratoon("bisect", *arguments)
    assert result.exit_code == 2 and words in result.output, result.output


def test_planting_is_an_act_of_its_context() -> None:
    with planted("sibling rope"):
        assert HERE.descend(case_of(), None) is not None
    assert HERE.descend(case_of(), None) is None
