# Owns: simulated acceptance in real rounds, and the instruments and pieces of `make bench-gpu` on a toy shape.
# Promises: a replay repeats the measured rounds exactly; every piece runs on a CPU; what is done is not run again.
# Never: judges a time.
"""lab/gpu_bench.py, benchmarks/ and simulation through the engine."""

from __future__ import annotations

import json
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import cpu_step, gpu, limits, results
from ratoon.core.request import SamplingParams
from ratoon.lab import gpu_bench
from ratoon.models.random import drafter_shape, random_decoder, random_drafter, target_shape
from ratoon.runtime.engine import Engine
from ratoon.spec.simulate import Simulation
from ratoon.spec.state import RoundShape

CONFIGS = gpu.CONFIGS
PROMPTS = [[1, 2, 3], [4, 5, 6, 7]]


def engine(mode: str, simulation: Simulation | None = None, nodes: int = 15, **settings: Any) -> Engine:
    """A toy pair with fresh weights: an eager engine readies networks in a way that graphs do not take."""
    target = random_decoder(target_shape(CONFIGS / "toy.json"), torch.float32, "cpu")
    drafter = random_drafter(drafter_shape(CONFIGS / "toy-dflash-b8.json"), torch.float32, "cpu")
    shapes = [RoundShape(rows, rows * (n + 1), 8 * (n > 0), n, "argmax") for rows in (1, 2) for n in (0, nodes)]
    choice = {"max_rows": 2, "max_model_len": 300, "topk_cap": 16, "shapes": shapes, "mode": mode, **settings}
    return Engine.from_parts(target, drafter, simulation=simulation, **choice)


def asked(method: str, budget: int, tokens: int = 120) -> list[SamplingParams]:
    return gpu_bench.requests(2, method, budget, tokens)  # type: ignore[arg-type]


# ---- simulated acceptance in rounds -----------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["eager", "static", "graph", "staged"])
def test_every_mode_accepts_what_the_table_says(mode: str) -> None:
    with engine(mode, Simulation.of_table(7, "cpu")) as found:
        outputs = found.generate(PROMPTS, asked("tree", 15))
    with engine("eager", Simulation.of_table(7, "cpu")) as plain:
        want = plain.generate(PROMPTS, asked("tree", 15))
    assert [o.accepted for o in outputs] == [o.accepted for o in want]
    assert max(max(o.accepted) for o in outputs) > 5 and min(min(o.accepted) for o in outputs) == 0


def test_a_fixed_mean_goes_through_the_engine() -> None:
    with engine("static", Simulation.of_tau(4.5, 7, "cpu")) as found:
        outputs = found.generate(PROMPTS, asked("chain", 7))
        accepted = [count for output in outputs for count in output.accepted[:-1]]
        assert set(accepted) == {3, 4}
        with pytest.raises(ValueError, match="needs method chain"):
            found.generate(PROMPTS, asked("tree", 15))
        assert [o.tau for o in found.generate(PROMPTS, asked("ar", 0, 5))] == [1.0, 1.0]


def test_without_a_tokenizer_ids_go_in_and_out() -> None:
    with engine("eager") as found:
        output = found.generate([PROMPTS[0]], SamplingParams(max_tokens=4, ignore_eos=True))[0]
        assert len(output.token_ids) == 4 and output.text == ""
        with pytest.raises(ValueError, match="no tokenizer"):
            found.generate("text")


# ---- instruments ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mode", "run_ahead"), [("graph", 0), ("graph", 1), ("staged", 0)])
def test_a_replay_repeats_the_measured_rounds(mode: str, run_ahead: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_bench, "WARM_ROUNDS", 3)
    with engine(mode, Simulation.of_table(7, "cpu"), run_ahead=run_ahead) as found:
        starts: list[torch.Tensor] = []
        original = found.runner.launch

        def watched(*args: Any) -> Any:
            launch = original(*args)
            starts.append(found.runner.state.start_S.clone())
            return launch

        monkeypatch.setattr(found.runner, "launch", watched)
        shape = gpu_bench.shape_for(found, 2, 15)
        run = gpu_bench.steady(found, PROMPTS, asked("tree", 15, 250), shape, rounds=5)
        assert run.rounds >= 5 and run.wall_ms > 0 and run.tokens >= run.rounds
        first = len(starts) - run.rounds
        assert torch.equal(run.state["seat.start_S"], starts[first - 1])
        replay = gpu_bench.Replay(found, run)
        for _ in range(2):
            assert replay.graph_ms() > 0
            assert torch.equal(found.runner.state.start_S, starts[-1]), "the same rounds commit the same tokens"
        assert len(replay.stage_ms()) == (3 if mode == "staged" else 1)
        assert replay.kernels() is None


def test_a_request_that_ends_too_soon_is_no_measurement() -> None:
    with engine("static") as found, pytest.raises(RuntimeError, match="raise max_tokens"):
        gpu_bench.steady(found, PROMPTS, asked("ar", 0, 30), gpu_bench.shape_for(found, 2, 0), rounds=100)


def test_throughput_counts_what_a_long_run_has_beyond_a_short_one() -> None:
    with engine("static", Simulation.of_tau(4.0, 7, "cpu")) as found:
        run = gpu_bench.throughput(found, PROMPTS, "chain", 7, short=8, long=40, repeats=1)
        assert run.num_tokens == 2 * 32 and run.tau == 4.0
        assert run.tok_s == pytest.approx(1e3 * run.num_tokens / (run.round_ms * 8))


# ---- pieces -----------------------------------------------------------------------------------------------


def toy_run(folder: Path, *more: str) -> list[dict[str, Any]]:
    gpu.main(["--toy", "--out", str(folder), "--commit", "abc", *more])
    return [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("piece", ["limits", "smollm2-rounds", "qwen3-8b-stages", "qwen3-8b-c2"])
def test_a_piece_runs_on_a_toy_shape(piece: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_bench, "WARM_ROUNDS", 2)
    monkeypatch.setattr(gpu, "TOY", replace(gpu.TOY, contexts=(8,)))
    lines = toy_run(tmp_path, "--piece", piece)
    assert [line.get("error") for line in lines] == [None] * len(gpu.pieces(gpu.Bench(gpu.TOY, 0, ""))[piece])
    assert {line["commit"] for line in lines} == {"abc"}
    for line in lines:
        if piece.endswith("rounds"):
            assert line["idle"] == pytest.approx(1 - line["graph_ms"] / line["round_ms"]) and line["floor_bytes"]
        if piece.endswith("stages"):
            assert set(line["stage_ms"]) == {"draft_build", "verify", "accept_commit"}


def test_what_is_done_is_not_run_again_and_what_failed_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gone = ("--piece", "smollm2-text", "--smollm2", "nowhere")
    assert all("FileNotFoundError" in line["error"] for line in toy_run(tmp_path, *gone))
    assert "failed: smollm2-text/humaneval-t0" in capsys.readouterr().out
    assert len(toy_run(tmp_path, *gone)) == 8
    once = toy_run(tmp_path, "--piece", "limits")
    assert toy_run(tmp_path, "--piece", "limits") == once
    assert len(toy_run(tmp_path, "--piece", "limits", "--again")) == len(once) + 1
    assert len(toy_run(tmp_path, "--piece", "qwen3-8b-c1", "--seconds", "0")) == len(once) + 1
    about = json.loads((tmp_path / "provenance.jsonl").read_text().splitlines()[0])
    assert about["commit"] == "abc" and "--toy" in about["command"] and about["versions"]["torch"]
    with pytest.raises(SystemExit):
        toy_run(tmp_path, "--piece", "nothing")


def test_targets_are_judged_and_gaps_are_named(tmp_path: Path) -> None:
    kept = results.Results(tmp_path, {"commit": "abc"})
    kept.add("qwen3-8b-rounds", "ar", {"round_ms": 4.7, "idle": 0.01}, 1.0)
    kept.add("qwen3-8b-c32", "ar@128", {"tok_s": 6000.0}, 1.0)
    kept.add("qwen3-8b-c32", "auto@128", {"tok_s": 15000.0}, 1.0)
    lines = {line[:58].strip(): line for line in results.report(kept).splitlines()}
    assert lines["Qwen3-8B shape, C=1, context 1k: AR step, ms"].endswith("FAIL")
    assert lines["GPU idle, AR"].endswith("pass") and "2.5" in lines["auto over AR, table, C=32"]
    assert lines["GPU idle, tree-63"].endswith("not measured")
    kept.about["commit"] = "def"
    kept.add("qwen3-8b-rounds", "ar", {"round_ms": 4.5, "idle": 0.01}, 1.0)
    assert "several commits: abc, def" in results.report(results.Results(tmp_path, {"commit": "def"}))


def test_compiled_kernels_travel_in_a_tar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "one"))
    results.unpack_cache(tmp_path / "cache.tar.gz")
    (tmp_path / "one" / "key").mkdir(parents=True)
    (tmp_path / "one" / "key" / "kernel.cubin").write_bytes(b"abc")
    results.pack_cache(tmp_path / "cache.tar.gz")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "two"))
    results.unpack_cache(tmp_path / "cache.tar.gz")
    assert (tmp_path / "two" / "key" / "kernel.cubin").read_bytes() == b"abc"
    assert tarfile.is_tarfile(tmp_path / "cache.tar.gz")


def test_a_cpu_step_is_held_against_its_own_products() -> None:
    target = random_decoder(target_shape(CONFIGS / "toy.json"), torch.float32, "cpu")
    found = cpu_step.measure(target, num=12, prompt_len=9)
    assert found.num == 12 and found.step_ms > found.products_ms > 0 and found.ratio > 1


def test_limits_count_every_weight_of_a_step() -> None:
    config = target_shape(CONFIGS / "toy.json")
    _, size = limits.stack(config, torch.float32, torch.device("cpu"))
    target = random_decoder(config, torch.float32, "cpu")
    assert size == sum(p.numel() * 4 for n, p in target.named_parameters() if p.ndim == 2 and n != "embed.weight")
