# Owns: what `ratoon train` does from a model to a drafter: write or load the text, train, export, measure.
# Promises: a killed session continues with its own text and weights; provenance says what went in.
# Never: prints; progress goes through the same callback as the training loop's.
"""One whole training session in one folder: corpus/, state.pt, bf16/, int8/."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from ratoon.models.decoder import Decoder
from ratoon.models.weights import load_model
from ratoon.runtime.text import Tokenizer
from ratoon.train.data import Corpus
from ratoon.train.evaluate import evaluate
from ratoon.train.export import export_drafter
from ratoon.train.prompts import Seed, given_prompts, read_prompts, self_asked
from ratoon.train.train import STATE, Event, Recipe, Report, Run, drafter_config, train
from ratoon.train.write import write_corpus, write_heads

CORPUS = "corpus"
# Share of the minutes that goes into writing text: measured on a GPU, 21.7 M tokens in 5 of 21 minutes.
WRITE_SHARE = 0.25


def fitting_recipe(device: torch.device, **changes: Any) -> Recipe:
    """The recipe of the shipped drafter on a GPU; on a CPU one whose step takes seconds. `changes` win over both."""
    if device.type == "cuda":
        return replace(Recipe(attention="flex"), **changes)
    return replace(Recipe(rows=2, row_len=256, anchors=32, chunk=512, log_every=1), **changes)


def unused_token(tokenizer: Tokenizer) -> int:
    """A special token that no text of this model holds: the highest that neither ends a text nor stands in a chat.

    Raises ValueError where there is none.
    """
    chat = tokenizer.apply_chat([{"role": "user", "content": "x"}], add_generation_prompt=True)
    used = set(tokenizer.encode(chat, add_special=True)) | set(tokenizer.eos_ids)
    free = sorted(tokenizer.special_ids - used)
    if not free:
        raise ValueError("this model has no unused special token: name one with --mask-token-id")
    return free[-1]


def teach(
    model: Path,
    out: Path,
    recipe: Recipe,
    *,
    device: torch.device,
    dtype: torch.dtype,
    prompts: Path | None = None,
    resume: Path | None = None,
    held_out: int = 32,
    provenance: Mapping[str, Any] | None = None,
    report: Report = lambda event: None,
) -> dict[str, Any]:
    """Trains a drafter for `model` within `recipe.minutes` and writes it to out/bf16 and out/int8.

    Without `prompts` (JSONL) the target writes its own. `resume` names the folder of an earlier session, whose text and
    weights are taken over. Returns the provenance record with its held-out figures. Raises FileNotFoundError or
    ValueError naming what is missing or does not fit.
    """
    if resume is not None and not (resume / CORPUS).is_dir():
        raise FileNotFoundError(f"nothing to resume: no {CORPUS} folder in {resume}")
    if prompts is not None and resume is None:
        read_prompts(prompts)  # a bad line is told before the model loads
    target, tokenizer = load_model(model, dtype, device), Tokenizer.load(model)
    mask = unused_token(tokenizer) if recipe.mask_token_id is None else recipe.mask_token_id
    drafter_config(target.config, recipe, mask)  # a shape that cannot be is refused before minutes of writing
    text_seconds = recipe.minutes * 60 * WRITE_SHARE
    training = replace(recipe, minutes=recipe.minutes * (1 - WRITE_SHARE))
    if resume is not None:
        corpus = Corpus.load(resume / CORPUS)
    else:
        corpus = write_text(target, tokenizer, recipe, prompts, text_seconds, report)
        corpus.save(out / CORPUS)
    kept = min(held_out, len(corpus) // 4)
    taught, held = corpus.split(kept, seed=1) if kept else (corpus, corpus)
    state = resume if resume is not None and (resume / STATE).is_file() else None
    run = train(target, taught, training, mask, out=out, resume=state, report=report)
    record = _record(run, corpus, provenance or {})
    samples = [held.sample(index) for index in range(min(len(held), held_out))]
    record["held_out"] = evaluate(target, run.drafter, [(ids.tolist(), p) for ids, p in samples], budgets=(15, 63))
    masters = run.master_drafter()
    export_drafter(masters, out / "bf16", record)
    export_drafter(masters, out / "int8", record, int8=True)
    return record


def write_text(
    target: Decoder, tokenizer: Tokenizer, recipe: Recipe, prompts: Path | None, seconds: float, report: Report
) -> Corpus:
    """The session's text: the target's answers to a file of prompts, or to what it asks itself."""
    cuda = target.embed.weight.is_cuda
    rows = 2048 if cuda else 16
    row_len = min(768 if cuda else recipe.row_len, target.config.max_position)

    def tell(values: dict[str, Any]) -> None:
        report(Event("write", 0, values["elapsed_s"], values))

    seeds: Iterator[Seed]
    if prompts is not None:
        seeds = given_prompts(tokenizer, prompts, recipe.seed)
    else:
        heads = write_heads(target, tokenizer, 3 * rows, rows, recipe.seed + 100, seconds / 12)
        seeds = self_asked(tokenizer, recipe.seed, max_prompt=min(224, row_len // 2), heads=heads)
    corpus = write_corpus(
        target, tokenizer, seeds, seconds=seconds, rows=rows, row_len=row_len, seed=recipe.seed, progress=tell
    )
    corpus.notes["source"] = "self-written" if prompts is None else prompts.name
    return corpus


def _record(run: Run, corpus: Corpus, provenance: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **provenance,
        "data": corpus.notes,
        "recipe": asdict(run.recipe),
        "steps": run.step,
        "minutes": round(run.elapsed / 60, 2),
        "loss": None if math.isnan(run.loss) else run.loss,
        "skipped_steps": int(run.masters.skipped),
        "device": torch.cuda.get_device_name() if run.device.type == "cuda" else "cpu",
        "mask_token_id": run.drafter.config.mask_token_id,
    }
