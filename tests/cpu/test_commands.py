# Owns: tests of the commands over the real engine, on a tiny random pair written to disk.
# Promises: bad input of every kind is one line and an exit code; the methods agree token by token.
# Never: judges speed.
"""generate, demo and bench end to end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from typer.testing import CliRunner, Result

from ratoon.cli import app
from ratoon.models.dflash import DFlash
from ratoon.models.weights import load_model
from ratoon.train.export import export_drafter
from ratoon.train.train import Recipe, drafter_config, initialise
from tests.cpu import tiny

CHAT = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A tiny Llama with a byte tokenizer and a chat template, and a random drafter for it."""
    folder = tmp_path_factory.mktemp("pair")
    target = tiny.save(tiny.make("llama"), folder / "target")
    _save_tokenizer(target)
    decoder = load_model(target, torch.float32, torch.device("cpu"))
    drafter = DFlash(drafter_config(decoder.config, Recipe(layers=2, block_size=4), mask_token_id=tiny.VOCAB - 1))
    initialise(drafter, decoder, seed=0)
    return target, export_drafter(drafter, folder / "drafter", {"data": "none"})


def _save_tokenizer(folder: Path) -> None:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2, **{letter: i + 3 for i, letter in enumerate(letters)}}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    backend.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHAT}))


def ratoon(pair: tuple[Path, Path], command: str, *arguments: str) -> Result:
    target, drafter = pair
    fixed = ["--model", str(target), "--drafter", str(drafter)]
    return CliRunner().invoke(app, [command, *arguments, *fixed], catch_exceptions=False)


def test_generate_gives_the_same_text_with_every_method(pair: tuple[Path, Path]) -> None:
    options = "--dtype float32 --max-tokens 24 --ignore-eos --raw --temperature 1 --seed 3"
    texts = set()
    for method in ("ar", "chain", "tree"):
        result = ratoon(pair, "generate", "def f", "--method", method, "--budget", "5", *options.split())
        assert result.exit_code == 0, result.stderr
        texts.add(result.stdout)
    assert len(texts) == 1 and len(texts.pop()) > 10


def test_show_tree_draws_real_trees(pair: tuple[Path, Path]) -> None:
    result = ratoon(pair, "generate", "def f", "--show-tree", "--budget", "5", "--max-tokens", "4", "--ignore-eos")
    assert result.exit_code == 0, result.stderr
    assert result.stdout.count("●") >= 1 and ("├─" in result.stdout or "└─" in result.stdout)


def test_demo_runs_and_its_methods_agree(pair: tuple[Path, Path]) -> None:
    result = ratoon(pair, "demo", "--dtype", "float32", "--budget", "5", "--max-tokens", "6")
    assert result.exit_code == 0, result.stderr
    records = json.loads(result.stdout.strip().splitlines()[-1].removeprefix("RESULT "))["records"]
    assert [r["method"] for r in records] == ["ar", "chain", "tree"]
    assert all(r["identical_prompts"] + r["near_tie_prompts"] == 3 and r["fallbacks"] == 0 for r in records)


def test_bench_finds_no_difference_between_methods_and_rows(pair: tuple[Path, Path], tmp_path: Path) -> None:
    prompts, out = tmp_path / "p.jsonl", tmp_path / "o.jsonl"
    lines = [{"prompt": "def f(x):"}, {"messages": [{"role": "user", "content": "hi"}]}, {"prompt": "ab " * 20}]
    prompts.write_text("\n".join(json.dumps(line) for line in lines))
    options = "--budgets 5,auto --topk-caps 2 --concurrency 1,2 --graphs off --temperature 0,1 --max-tokens 8"
    files = ["--prompts", str(prompts), "--json", str(out)]
    result = ratoon(pair, "bench", *files, "--dtype", "float32", *options.split())
    assert result.exit_code == 0, result.stderr
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(records) == 2 * 2 * 5 and {r["mode"] for r in records} == {"eager"}
    for row in records:
        assert row["identical_prompts"] + row["near_tie_prompts"] == 3, row
        assert row["tau"] >= 1 and row["fallbacks"] == 0


@pytest.mark.parametrize("acceptance", [["--simulate"], ["--simulate-tau", "2.5"], []])
def test_bench_measures_random_weights_of_a_shape(
    pair: tuple[Path, Path], tmp_path: Path, acceptance: list[str]
) -> None:
    target, drafter = (folder / "config.json" for folder in pair)
    methods = "ar,chain" if "--simulate-tau" in acceptance else "ar,chain,tree"
    options = f"--methods {methods} --budgets 3 --prompts random:8 --limit 8 --max-tokens 40 --max-model-len 900"
    shapes = ["--random-weights", str(target), "--drafter-config", str(drafter), "--json", str(tmp_path / "o")]
    result = CliRunner().invoke(app, ["bench", *shapes, *acceptance, *options.split(), "--dtype", "float32"])
    assert result.exit_code == 0, result.stderr
    plain, *drafted = (json.loads(line) for line in (tmp_path / "o").read_text().splitlines())
    assert plain["tau"] == 1.0 and plain["output_tokens"] == 8 * 40
    for row in drafted:
        assert row["output_tokens"] == 8 * 40 and row["speedup_vs_ar"] > 0
        if acceptance:
            assert row["identical_prompts"] is None and row["simulated"] in ("table", 2.5)
            assert 2.0 < row["tau"] < 3.5
        else:
            assert row["identical_prompts"] + row["near_tie_prompts"] == 8 and row["simulated"] is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["x" * 600], "the prompt has 6"),
        (["x", "--budget", "128"], "127"),
        (["x", "--topk-cap", "-1"], "--topk-cap"),
        (["x", "--max-model-len", "100000"], "max_model_len must be"),
        (["x", "--dtype", "float32", "--logit-bias", "99999=1"], "the vocabulary has 320 tokens"),
    ],
)
def test_input_that_the_engine_refuses(pair: tuple[Path, Path], arguments: list[str], message: str) -> None:
    result = ratoon(pair, "generate", *arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ") and message in result.stderr and result.stderr.count("\n") == 1


@pytest.mark.parametrize("what", ["unknown architecture", "truncated", "wrong drafter", "no config", "bad gguf"])
def test_models_that_cannot_be_loaded(pair: tuple[Path, Path], tmp_path: Path, what: str) -> None:
    target, drafter = (Path(str(tmp_path / name)) for name in ("target", "drafter"))
    for source, copy in zip(pair, (target, drafter), strict=True):
        copy.mkdir()
        for file in source.iterdir():
            (copy / file.name).write_bytes(file.read_bytes())
    model, expected = _spoil(what, target, drafter)
    result = ratoon((model, drafter), "generate", "x", "--dtype", "float32")
    assert result.exit_code == 2, result.stderr
    assert result.stderr.startswith("error: ") and expected in result.stderr and result.stderr.count("\n") == 1


def _spoil(what: str, target: Path, drafter: Path) -> tuple[Path, str]:
    """Damages the copied pair; returns the model to ask for and a word of the message."""
    config = json.loads((target / "config.json").read_text())
    if what == "unknown architecture":
        (target / "config.json").write_text(json.dumps({**config, "architectures": ["MambaForCausalLM"]}))
        return target, "MambaForCausalLM"
    if what == "truncated":
        os.truncate(target / "model.safetensors", 4000)
        return target, "model.safetensors"
    if what == "wrong drafter":
        theirs = json.loads((drafter / "config.json").read_text())
        (drafter / "config.json").write_text(json.dumps({**theirs, "num_target_layers": 9}))
        return target, "9"
    if what == "no config":
        (target / "config.json").unlink()
        return target, "config.json"
    bad = target.with_suffix(".gguf")
    bad.write_bytes(b"not a gguf file at all" * 10)
    return bad, "target.gguf"


def test_ctrl_c_while_generating_is_one_clean_line(pair: tuple[Path, Path]) -> None:
    target, drafter = pair
    options = "--raw --ignore-eos --max-tokens 480 --dtype float32 --budget 5"
    command = [sys.executable, "-m", "ratoon.cli", "generate", "x", "--model", str(target), "--drafter", str(drafter)]
    # A shell that runs the tests in its background has its children ignore the signal.
    hears = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    child = subprocess.Popen(
        [*command, *options.split()], stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=hears
    )
    assert child.stdout and child.stdout.read(1), "the answer has begun"
    child.send_signal(signal.SIGINT)
    _, errors = child.communicate(timeout=60)
    assert (child.returncode, errors.decode().strip()) == (130, "interrupted")
