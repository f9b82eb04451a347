# Owns: tests of what the commands do with their options, their errors and their exit codes.
# Promises: each runs the real command line over a fake engine, or a real child process.
# Never: loads a model.
"""The commands."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ratoon.train.train import Event
from tests.cpu import fake_engine
from tests.cpu.fake_engine import WORDS, FakeEngine, ratoon
from tests.cpu.hub_server import HubServer

TEXT = " ".join(WORDS)
RANDOM = ["bench", "--random-weights", "t.json", "--drafter-config", "d.json"]


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> type[FakeEngine]:
    return fake_engine.install(monkeypatch)


def in_a_child(
    *arguments: str, stdin: bytes = b"", environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "ratoon.cli", *arguments]
    variables = {**os.environ, **(environment or {})}
    return subprocess.run(command, input=stdin, capture_output=True, env=variables, check=False)


# -- generate ---------------------------------------------------------------------------------------------------------


def test_generate_streams_the_answer(engines: type[FakeEngine]) -> None:
    result = ratoon("generate", "hello there")
    assert result.exit_code == 0 and result.stdout == TEXT + " \n"
    [engine] = engines.made
    assert engine.closed and engine.model == "smollm2"
    assert engine.calls[0][0] == [[901]], "through the chat template"


def test_generate_passes_every_option_on(engines: type[FakeEngine]) -> None:
    options = "--model m --drafter d --method chain --budget 7 --topk-cap 4 --dtype float32 --device cpu --mode static"
    options += " --max-model-len 99 --run-ahead 2 --gpu-memory-utilization 0.5 --birth-test full"
    options += " --temperature 0.5 --top-k 5 --top-p 0.9 --min-p 0.1 --repetition-penalty 1.1"
    options += " --presence-penalty 0.2 --frequency-penalty 0.3 --logit-bias 3=-1.5 --logit-bias 4=2 --seed 9"
    options += " --stop END --stop STOP --max-tokens 6 --ignore-eos --raw"
    ratoon("generate", "hello there", *options.split())
    [engine] = engines.made
    assert engine.model == "m" and callable(engine.settings.pop("progress"))
    assert engine.settings == {
        "drafter": "d",
        "method": "chain",
        "budget": 7,
        "topk_cap": 4,
        "dtype": "float32",
        "device": "cpu",
        "mode": "static",
        "max_rows": 1,
        "max_model_len": 99,
        "run_ahead": 2,
        "gpu_memory_utilization": 0.5,
        "birth_test": "full",
    }
    [(prompts, params)] = engine.calls
    assert prompts == [[900, 0, 1]], "raw"
    assert (params.temperature, params.top_k, params.top_p, params.min_p, params.seed) == (0.5, 5, 0.9, 0.1, 9)
    assert (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) == (1.1, 0.2, 0.3)
    assert dict(params.logit_bias) == {3: -1.5, 4: 2.0}
    assert (params.stop, params.max_tokens, params.ignore_eos) == (("END", "STOP"), 6, True)


def test_what_is_not_given_is_left_to_the_engine(engines: type[FakeEngine]) -> None:
    ratoon("generate", "hello")
    assert not {"method", "max_model_len", "run_ahead", "gpu_memory_utilization"} & set(engines.made[0].settings)


def test_kernels_are_chosen_before_the_engine_is_made(
    engines: type[FakeEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen: list[str] = []
    monkeypatch.setattr("ratoon.ops.launch.use_kernels", chosen.append)
    monkeypatch.setattr(engines, "describe", lambda self: chosen[-1])
    assert ratoon("generate", "hello", "--kernels", "torch", "--stats").stderr.endswith("torch\n")
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    refused = ratoon("generate", "hello", "--kernels", "triton", "--device", "cpu")
    assert refused.exit_code == 2 and "--kernels triton needs a GPU" in refused.stderr and len(engines.made) == 1
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert ratoon("generate", "hello", "--kernels", "triton", "--device", "cpu").exit_code == 0


def test_the_memory_plan_is_shown_with_stats(engines: type[FakeEngine]) -> None:
    options = ["--prompts", "random:5", "--limit", "1", "--methods", "ar"]
    for command in (["generate", "hi"], ["bench", *options]):
        assert "2 GB" not in ratoon(*command).stderr
        assert "weights: 2 GB" in ratoon(*command, "--stats").stderr


def test_plain_decoding_takes_no_drafter(engines: type[FakeEngine]) -> None:
    ratoon("generate", "hello", "--method", "ar")
    assert engines.made[0].settings["drafter"] == "none"


def test_a_model_without_a_known_drafter_is_said_to_have_none(
    engines: type[FakeEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "drafter", property(lambda self: None, lambda self, value: None), raising=False)
    result = ratoon("generate", "hello", "--model", "other")
    assert result.exit_code == 0 and "no drafter is known for other" in result.stderr


def test_generate_reads_standard_input(engines: type[FakeEngine]) -> None:
    ratoon("generate", "-", "--raw", stdin="one two three")
    assert engines.made[0].calls[0][0] == [[900, 0, 1, 2]]


def test_generate_without_a_template_takes_the_text_alone(
    engines: type[FakeEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fake_engine.FakeTokenizer, "chat_template", None)
    ratoon("generate", "hello there")
    assert engines.made[0].calls[0][0] == [[900, 0, 1]]


def test_show_tree_draws_each_round_and_then_the_text(engines: type[FakeEngine]) -> None:
    shown = ratoon("generate", "hi", "--show-tree", "--max-tokens", "3").stdout
    assert "┡━" in shown or "┗━" in shown, "the accepted path in heavy strokes"
    assert shown.rstrip().endswith(" ".join(WORDS[:3]))


def test_stats_go_to_stderr(engines: type[FakeEngine]) -> None:
    result = ratoon("generate", "hi", "--stats")
    assert "tau 2.75" in result.stderr and "smollm2 with auto" in result.stderr
    assert result.stdout == TEXT + " \n"


# -- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", ""], "error: the prompt is empty"),
        (["generate", "  "], "error: the prompt is empty"),
        (["generate", "x", "--budget", "-1"], "error: --budget must be from 0 (autoregressive) to the engine's limit"),
        (["generate", "x", "--budget", "128"], "error: --budget must be from 0 (autoregressive) to the engine's limit"),
        (["generate", "x", "--budget", "many"], "error: --budget must be 'auto' or a whole number"),
        (["generate", "x", "--topk-cap", "-1"], "error: --topk-cap must be a whole number from 0 to 127"),
        (["generate", "x", "--topk-cap", "128"], "error: --topk-cap must be a whole number from 0 to 127"),
        (["generate", "x", "--method", "tree", "--drafter", "none"], "error: --method tree needs a drafter"),
        (["generate", "x", "--max-model-len", "1"], "error: --max-model-len must be at least 2"),
        (["generate", "x", "--run-ahead", "-1"], "error: --run-ahead must be at least 0"),
        (["generate", "x", "--gpu-memory-utilization", "0"], "error: --gpu-memory-utilization must be above 0"),
        (["generate", "x", "--gpu-memory-utilization", "1.5"], "error: --gpu-memory-utilization must be above 0"),
        (["generate", "x", "--kernels", "triton", "--device", "cpu"], "error: --kernels triton needs a GPU"),
        (["chat", "--method", "chain", "--drafter", "none"], "error: --method chain needs a drafter"),
        (["chat", "--temperature", "-1"], "error: temperature must be a number"),
        (["chat", "--budget", "x"], "error: --budget must be 'auto' or a whole number"),
        (["demo", "--drafter", "none"], "error: --drafter none leaves the demo nothing to show"),
        (["demo", "--max-tokens", "0"], "error: max_tokens must be"),
        (["demo", "--budget", "-2"], "error: --budget must be from 0"),
        (["generate", "x", "--logit-bias", "a=b"], "error: --logit-bias must be ID=BIAS"),
        (["generate", "x", "--top-p", "2"], "error: top_p must be a number, from 0 to 1"),
        (["generate", "x", "--max-tokens", "0"], "error: max_tokens must be"),
        (["bench", "--methods", "ar,beam"], "error: --methods takes ar, chain, tree"),
        (["bench", "--budgets", "8,-2"], "error: --budgets (beside auto) takes numbers from 0"),
        (["bench", "--concurrency", "0"], "error: --concurrency takes numbers from 1"),
        (["bench", "--repeats", "0"], "error: --repeats must be at least 1"),
        (["bench", "--max-tokens", "0"], "error: max_tokens must be"),
        (["bench", "--limit", "0"], "error: a limit of 0 prompts"),
        (["bench", "--temperature", "0,1e-7"], "error: temperature 1e-07 is too small"),
        (["bench", "--seed", "99999999999999999999"], "error: seed must be"),
        (["bench", "--run-ahead", "-1"], "error: --run-ahead must be at least 0"),
        (["bench", "--drafter", "none"], "error: --drafter none has nothing to draft with"),
        (["bench", "--prompts", "random:0"], "error: random prompts are 'random:LENGTH'"),
        (["bench", "--prompts", "random:x"], "error: random prompts are 'random:LENGTH'"),
        (["bench", "--simulate"], "error: --simulate needs --random-weights"),
        (["bench", "--simulate-tau", "0"], "error: --simulate-tau needs --random-weights"),
        (["bench", "--drafter-config", "c.json"], "error: --drafter-config needs --random-weights"),
        (["bench", "--random-weights", "c.json"], "error: --random-weights without --drafter-config"),
        ([*RANDOM, "--prompts", "humaneval"], "error: --random-weights has no tokenizer"),
        ([*RANDOM, "--simulate", "--simulate-tau", "2"], "error: give --simulate (a table) or --simulate-tau"),
        ([*RANDOM, "--simulate-tau", "2"], "error: --simulate-tau 2 needs --methods ar,chain"),
        ([*RANDOM, "--simulate-tau", "6.5", "--methods", "chain", "--budgets", "15,5"], "error: --simulate-tau 6.5"),
        ([*RANDOM, "--simulate-tau", "6.5", "--methods", "ar,chain"], "error: --simulate-tau 6.5"),
        ([*RANDOM, "--simulate-tau", "0.5", "--methods", "ar"], "error: --simulate-tau must be at least 1"),
        (["bench", "--prompts", "random", "--json", "nowhere/o.jsonl"], "error: No such file or directory: nowhere"),
        (["train", "--prompts", "nowhere.jsonl"], "error: prompts 'nowhere.jsonl': no such file"),
        (["train", "--minutes", "0"], "error: minutes must be positive"),
        (["train", "--block-size", "1"], "error: block_size must be at least 2"),
        (["train", "--out", "README.md"], "error: --out must be a folder, but README.md is a file"),
        (["bench", "--prompts", "nowhere.jsonl"], "error: prompts 'nowhere.jsonl': no such file"),
        (["pull", "not an id"], "error: 'not an id' is neither 'smollm2' nor a hub id"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    engines: type[FakeEngine], monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    result = ratoon(*arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith(message) and result.stderr.count("\n") == 1
    assert not engines.made, "told before a model is loaded"


def test_a_drafter_that_is_not_there_is_told_before_the_model_loads(
    engines: type[FakeEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    def resolve(name: str, progress: object = None) -> str:
        if name == "gone":
            raise FileNotFoundError(f"model '{name}' is not there")
        return name

    monkeypatch.setattr("ratoon.models.hub.resolve", resolve)
    for arguments in (["generate", "x"], ["chat"], ["bench", "--prompts", "random"], ["demo"]):
        result = ratoon(*arguments, "--drafter", "gone")
        assert (result.exit_code, result.stderr) == (2, "error: model 'gone' is not there\n")
    assert [engine.settings["drafter"] for engine in engines.made] == ["none"], "the demo's baseline"


def test_a_prompt_file_without_the_right_to_read_it_is_named(
    engines: type[FakeEngine], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def closed(self: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(self))

    (tmp_path / "p.jsonl").write_text("{}")
    monkeypatch.setattr(Path, "read_bytes", closed)
    result = ratoon("bench", "--prompts", str(tmp_path / "p.jsonl"))
    assert result.exit_code == 2 and "p.jsonl': no right to read this file" in result.stderr


@pytest.mark.parametrize("what", ["a file", "below a file"])
def test_a_cache_that_cannot_be_is_told_with_the_remedy(tmp_path: Path, what: str) -> None:
    (tmp_path / "f").write_text("")
    cache = tmp_path / "f" if what == "a file" else tmp_path / "f" / "below"
    done = in_a_child("generate", "hi", environment={"RATOON_CACHE": str(cache)})
    assert done.returncode == 2 and done.stderr.count(b"\n") == 1
    assert b"set RATOON_CACHE to a directory" in done.stderr


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (ValueError("the prompt has 9 tokens,\n the context 8"), 2, "error: the prompt has 9 tokens, the context 8"),
        (FileNotFoundError(2, "No such file or directory", "/x"), 2, "error: No such file or directory: /x"),
        (OSError("the line broke"), 1, "error: the line broke"),
        (RuntimeError("out of memory"), 1, "error: out of memory"),
        (KeyboardInterrupt(), 130, "\ninterrupted"),
    ],
)
def test_what_an_engine_raises_becomes_a_line_and_a_code(
    engines: type[FakeEngine], error: BaseException, code: int, line: str
) -> None:
    def fail(ids: list[int]) -> None:
        raise error

    engines.behaviour = staticmethod(fail)
    result = ratoon("generate", "hi")
    assert (result.exit_code, result.stderr) == (code, line + "\n")
    assert engines.made[0].closed


def test_a_bug_keeps_its_traceback(engines: type[FakeEngine]) -> None:
    def fail(ids: list[int]) -> None:
        raise AssertionError("an invariant")

    engines.behaviour = staticmethod(fail)
    with pytest.raises(AssertionError):
        ratoon("generate", "hi")


def test_ratoon_traceback_shows_where_an_error_comes_from(
    engines: type[FakeEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RATOON_TRACEBACK", "1")
    with pytest.raises(ValueError, match="prompt is empty"):
        ratoon("generate", "")


@pytest.mark.parametrize("where", ["argument", "stdin"])
def test_a_prompt_that_is_not_utf8_is_refused(where: str) -> None:
    bad = b"caf\xe9"
    if where == "argument":
        command = [os.fsencode(sys.executable), b"-m", b"ratoon.cli", b"generate", bad]
        done = subprocess.run(command, capture_output=True, check=False)
    else:
        done = in_a_child("generate", "-", stdin=bad)
    assert done.returncode == 2
    assert done.stderr.startswith(b"error: the") and b"not UTF-8" in done.stderr and done.stderr.count(b"\n") == 1


def test_missing_models_are_named() -> None:
    done = in_a_child("generate", "hi", "--model", "./nowhere.gguf")
    assert done.returncode == 2 and done.stderr.startswith(b"error: model './nowhere.gguf' is not there")


# -- pull -------------------------------------------------------------------------------------------------------------


def test_pull_fetches_from_the_hub_that_hf_endpoint_names(tmp_path: Path) -> None:
    server = HubServer("acme/tiny", {"config.json": b"{}", "model.safetensors": b"w" * 5000})
    try:
        settings = {"HF_ENDPOINT": server.url, "RATOON_CACHE": str(tmp_path)}
        done = in_a_child("pull", "acme/tiny", environment=settings)
        again = in_a_child("pull", "acme/absent", environment=settings)
    finally:
        server.close()
    path = Path(done.stdout.decode().strip())
    assert done.returncode == 0, done.stderr
    assert path.is_relative_to(tmp_path) and (path / "model.safetensors").read_bytes() == b"w" * 5000
    assert again.returncode == 1 and b"has no model 'acme/absent'" in again.stderr


# -- chat -------------------------------------------------------------------------------------------------------------


def test_chat_remembers_forgets_and_leaves(engines: type[FakeEngine]) -> None:
    result = ratoon("chat", "--system", "be brief", stdin="hello\n\nand now\n/reset\nagain\n/exit\nnever\n")
    assert result.exit_code == 0
    lengths = [len(prompts[0]) for prompts, _ in engines.made[0].calls]
    assert lengths == [2, 4, 2], "system and question; then with the answer between; then afresh"
    assert engines.made[0].closed


def test_ctrl_c_cuts_an_answer_and_the_talk_goes_on(engines: type[FakeEngine]) -> None:
    seen: list[list[int]] = []

    def interrupt_first(ids: list[int]) -> None:
        seen.append(ids)
        if len(seen) == 1:
            raise KeyboardInterrupt

    engines.behaviour = staticmethod(interrupt_first)
    result = ratoon("chat", stdin="hello\nagain\n")
    assert result.exit_code == 0 and "cut short" in result.stdout
    assert [len(ids) for ids in seen] == [1, 1], "the cut turn is forgotten"


# -- train ------------------------------------------------------------------------------------------------------------


def test_train_hands_its_options_over_and_shows_the_outcome(
    engines: type[FakeEngine], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen: dict[str, Any] = {}

    def teach(model: Any, out: Path, recipe: Any, report: Any, **rest: Any) -> dict[str, Any]:
        seen.update(rest, model=model, out=out, recipe=recipe)
        report(Event("write", 0, 1.0, {"tokens": 5}))
        report(Event("plan", 0, 1.0, {"weights": 2_000_000_000}))
        report(Event("step", 3, 1.0, {"loss": 4.5}))
        return {"steps": 3, "loss": 4.5, "held_out": {"tau": {"chain": 2.5, "tree-63": 4.0}, "samples": 8}}

    monkeypatch.setattr("ratoon.train.session.teach", teach)
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"prompt": "x"}\n')
    options = "--model m --minutes 2 --layers 3 --lr 0.01 --mask-token-id 9 --seed 4 --device cpu"
    result = ratoon("train", *options.split(), "--prompts", str(prompts), "--out", str(tmp_path))
    assert result.exit_code == 0, result.stderr
    recipe = seen["recipe"]
    assert (recipe.minutes, recipe.layers, recipe.lr, recipe.mask_token_id, recipe.seed) == (2.0, 3, 0.01, 9, 4)
    assert (seen["model"], seen["out"], seen["prompts"], seen["resume"]) == ("m", tmp_path, prompts, None)
    assert "memory plan in GB: weights 2.00" in result.stderr
    assert "chain 2.50, tree-63 4.00" in result.stdout and str(tmp_path / "int8") in result.stdout


def test_train_resumes_in_place(engines: type[FakeEngine], tmp_path: Path) -> None:
    result = ratoon("train", "--resume", str(tmp_path), "--device", "cpu")
    assert result.exit_code == 2 and result.stderr.startswith("error: nothing to resume")


# -- the process ------------------------------------------------------------------------------------------------------


def test_a_reader_that_leaves_early_gets_no_traceback() -> None:
    script = "from ratoon import cli\nfrom ratoon.cli.errors import command\n"
    script += "@cli.app.command()\n@command\ndef flood() -> None:\n"
    script += "    [print('x' * 1000) for _ in range(1000)]\ncli.main()"
    child = subprocess.Popen([sys.executable, "-c", script, "flood"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert child.stdout and child.stderr
    child.stdout.close()
    assert child.wait(timeout=20) == 1
    assert io.TextIOWrapper(child.stderr).read() == ""


def test_version() -> None:
    from ratoon import __version__

    assert in_a_child("--version").stdout.decode().strip() == f"ratoon {__version__}"
