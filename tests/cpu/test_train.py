# Owns: the trainer: masks, loss, data writing, packing, resuming, and the overfit gate.
# Promises: a toy drafter that is trained, exported and loaded gets a whole block accepted.
# Never: needs a real model.
from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ratoon.core.config import ModelConfig
from ratoon.models.decoder import Decoder
from ratoon.models.dflash import DFlash, visible
from ratoon.models.layers import Apart
from ratoon.models.weights import load_drafter
from ratoon.train import session
from ratoon.train.data import Corpus, pack
from ratoon.train.evaluate import evaluate
from ratoon.train.export import checkpoint_tensors, export_drafter, quantise
from ratoon.train.loss import (
    Batch,
    HeadShape,
    blocks_at,
    build_mask,
    draft_mask,
    draft_pass,
    draw_blocks,
    head_loss,
    slot_weights,
    step_loss,
    target_pass,
)
from ratoon.train.prompts import Seed, given_prompts, read_prompts, self_asked
from ratoon.train.train import Event, Recipe, Run, drafter_config, initialise, train
from ratoon.train.write import loop_start, write_corpus

VOCAB, EOS, MASK = 96, 2, 3


@pytest.fixture(scope="module")
def target() -> Decoder:
    config = ModelConfig.from_hf(
        {
            "architectures": ["LlamaForCausalLM"],
            "vocab_size": VOCAB,
            "hidden_size": 48,
            "intermediate_size": 96,
            "num_hidden_layers": 6,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e4,
            "max_position_embeddings": 512,
            "tie_word_embeddings": True,
            "eos_token_id": EOS,
        }
    )
    torch.manual_seed(0)
    model = Decoder(config)
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.25) if parameter.ndim > 1 else parameter.data.fill_(1.0)
    return model


def recipe(**changes: Any) -> Recipe:
    base = Recipe(layers=2, anchors=8, rows=2, row_len=64, block_size=8, chunk=64, log_every=1, minutes=5)
    return dataclasses.replace(base, **changes)


def corpus(lengths: Sequence[tuple[int, int]] = ((40, 5), (30, 1), (55, 20), (12, 3)), seed: int = 0) -> Corpus:
    rng = np.random.default_rng(seed)
    return Corpus.from_samples([(rng.integers(4, VOCAB, n), p) for n, p in lengths])


def batch_of(data: Corpus, row_len: int = 64) -> Batch:
    packed = pack(data, row_len, 0)
    ids, position, document, anchor = (
        torch.from_numpy(x) for x in (packed.ids, packed.position, packed.document, packed.anchor)
    )
    return Batch(ids.long(), position.long(), document.long(), anchor)


def fresh(target: Decoder, seed: int = 1, **changes: Any) -> DFlash:
    """A drafter whose every weight matters."""
    config = dataclasses.replace(drafter_config(target.config, recipe(), MASK), **changes)
    drafter = DFlash(config)
    torch.manual_seed(seed)
    for parameter in drafter.parameters():
        parameter.data.normal_(0, 0.2) if parameter.ndim > 1 else parameter.data.uniform_(0.5, 1.5)
    return drafter


def alone(drafter: DFlash, target: Decoder, ids: Tensor, anchor: int) -> Tensor:
    """One block by the plain rule: context before the anchor, nothing packed, no mask builder."""
    position = torch.arange(len(ids))
    single = Batch(ids[None], position[None], torch.zeros(1, len(ids), dtype=torch.long), position[None] >= 0)
    _, taps = target_pass(target, single, drafter.config.target_layer_ids, "explicit")
    keys, values = drafter.context_kv(drafter.context_feature(taps[:anchor]), position[:anchor])
    block = torch.arange(anchor, anchor + drafter.config.block_size)
    groups = drafter.config.num_heads // drafter.config.num_kv_heads

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = torch.cat((keys[layer], k)), torch.cat((values[layer], v))
        where = torch.cat((position[:anchor], block))
        mask = visible(block[:, None], where, drafter.config.windows[layer], drafter.config.causal[layer])
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        score = torch.einsum("tnd,snd->nts", q, k) * drafter.config.head_dim**-0.5
        return torch.einsum("nts,snd->tnd", score.masked_fill(~mask, -torch.inf).softmax(-1), v)

    x = drafter.block_embeddings(target.embed.weight, ids[anchor : anchor + 1], drafter.config.block_size)
    return drafter(x, block, Apart(attend))[drafter.config.first_prediction :]


@pytest.mark.parametrize("kind", [{}, {"windows": (5, None), "causal": (True, False)}, {"anchor_first": True}])
@torch.no_grad()
def test_packed_blocks_equal_blocks_alone(target: Decoder, kind: dict[str, Any]) -> None:
    drafter, data = fresh(target, **kind), corpus()
    batch = batch_of(data)
    blocks = draw_blocks(batch, drafter.config, 8, 4.0)
    _, taps = target_pass(target, batch, drafter.config.target_layer_ids, "explicit")
    got = draft_pass(drafter, target.embed.weight, taps, batch, blocks, "explicit")
    checked = 0
    for row in range(batch.ids.shape[0]):
        for column in range(8):
            if blocks.document[row, column] < 0:
                continue
            mine = batch.document[row] == blocks.document[row, column]
            ids = batch.ids[row][mine]
            want = alone(drafter, target, ids, int(blocks.start[row, column]))
            torch.testing.assert_close(got[row, column], want, rtol=0, atol=2e-5)
            checked += 1
    assert checked >= 12


def test_blocks_carry_the_following_tokens(target: Decoder) -> None:
    config = fresh(target).config
    batch = batch_of(corpus(((20, 5),)))
    index = torch.tensor([[4, 17]])
    blocks = blocks_at(batch, config, index, torch.tensor([[True, True]]), gamma=4.0)
    assert blocks.label[0, 0].tolist() == batch.ids[0, 5:12].tolist()
    torch.testing.assert_close(blocks.weight[0, 0], torch.exp(-torch.arange(7) / 4.0))
    assert (blocks.weight[0, 1] > 0).tolist() == [True, True] + [False] * 5
    shifted = blocks_at(batch, dataclasses.replace(config, anchor_first=True), index, index > 0, gamma=4.0)
    assert shifted.label[0, 0].tolist() == batch.ids[0, 5:13].tolist()


def test_anchors_lie_from_the_last_prompt_token_to_the_last_but_one(target: Decoder) -> None:
    config = fresh(target).config
    batch = batch_of(corpus(((20, 5),)))
    blocks = draw_blocks(batch, config, 20, 4.0)
    assert sorted(blocks.start[blocks.document >= 0].tolist()) == list(range(4, 19))
    torch.testing.assert_close(slot_weights(3, 7.0), torch.tensor([1.0, 0.866878, 0.751477]))


def test_flex_and_explicit_masks_are_one_function(target: Decoder) -> None:
    """The block-sparse mask, unfolded, is the explicit one (its kernel runs only on a GPU)."""
    from torch.nn.attention.flex_attention import create_mask

    batch = batch_of(corpus())
    blocks = draw_blocks(batch, fresh(target).config, 8, 4.0)
    for window, causal in ((None, False), (5, True), (5, False)):
        rule = draft_mask(batch, blocks, window, causal)
        rows, keys = batch.ids.shape[0], 64 + 64
        dense = build_mask(rule, rows, 64, keys, torch.device("cpu"), "explicit")
        flex = create_mask(rule, rows, None, 64, keys, device="cpu")  # type: ignore[arg-type]
        assert torch.equal(dense, flex)


@pytest.mark.parametrize("shape", [HeadShape(), HeadShape(0.5, 3.0), HeadShape(soft_labels=0.4)])
@pytest.mark.parametrize("chunk", [7, 100])
def test_head_loss_and_gradient_equal_autograd(shape: HeadShape, chunk: int) -> None:
    torch.manual_seed(0)
    hidden, head = torch.randn(30, 16, requires_grad=True), torch.randn(VOCAB, 16)
    teacher = torch.randn(30, 16) if shape.soft_labels else None
    label, weight = torch.randint(VOCAB, (30,)), torch.rand(30)
    got, hit = head_loss(hidden, head, label, weight, shape, teacher_PH=teacher, chunk=chunk)
    (grad,) = torch.autograd.grad(got * 2, hidden)
    logits = hidden @ head.T * shape.multiplier
    logits = logits if shape.softcap is None else shape.softcap * torch.tanh(logits / shape.softcap)
    aim = torch.nn.functional.one_hot(label, VOCAB).float() * (1 - shape.soft_labels)
    if teacher is not None:
        aim = aim + shape.soft_labels * (teacher @ head.T).softmax(-1)
    want = -(weight[:, None] * aim * logits.log_softmax(-1)).sum()
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(grad, torch.autograd.grad(want * 2, hidden)[0], rtol=1e-4, atol=1e-5)
    assert torch.equal(hit, logits.argmax(-1) == label)


def test_soft_labels_use_the_target_at_the_place_before(target: Decoder) -> None:
    """A drafter's loss under full soft labels is the cross-entropy with the target's distribution of that token."""
    drafter, data = fresh(target), corpus(((40, 5),))
    batch = batch_of(data)
    index, valid = torch.tensor([[10]]), torch.tensor([[True]])
    blocks = blocks_at(batch, drafter.config, index, valid, gamma=4.0)
    loss, _ = step_loss(drafter, target, batch, blocks, backend="explicit", soft_labels=1.0)
    hidden, taps = target_pass(target, batch, drafter.config.target_layer_ids, "explicit")
    teacher = target.logits(hidden[10:17]).softmax(-1)
    drafted = draft_pass(drafter, target.embed.weight, taps, batch, blocks, "explicit")[0, 0]
    each = -(teacher * drafter.logits(drafted, target.logits).log_softmax(-1)).sum(-1)
    torch.testing.assert_close(loss, (each * blocks.weight[0, 0]).sum() / blocks.weight.sum())


# Data -----------------------------------------------------------------------------------------------------------------


class Letters:
    """A tokenizer of single characters; 'E' ends a text, token 5 is a triple quote."""

    eos_ids = (EOS,)
    special_ids = frozenset((0, 1, EOS, MASK))

    @classmethod
    def load(cls, path: Path) -> Letters:
        return cls()

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        return [EOS if c == "E" else 4 + (ord(c) % 90) for c in text]

    def decode(self, ids: list[int]) -> str:
        return "".join('"""' if i == 5 else "x" for i in ids)

    def apply_chat(self, messages: Any, **kwargs: Any) -> str:
        return f"u{messages[0]['content']}Ea"


def greedy(target: Decoder, ids: list[int], stop: int) -> list[int]:
    ids = list(ids)
    while len(ids) < stop and (ids[-1] != EOS):
        single = torch.tensor([ids])
        place = torch.arange(len(ids))[None]
        batch = Batch(single, place, torch.zeros_like(single), place >= 0)
        hidden, _ = target_pass(target, batch, (1,), "explicit")
        ids.append(int(target.logits(hidden[-1:]).argmax()))
    return ids


def test_given_prompts_are_answered_greedily(target: Decoder, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    records = [{"prompt": "abc"}, {"messages": [{"role": "user", "content": "hi"}]}, {"prompt": "zz"}]
    file.write_text("\n".join(json.dumps(record) for record in records))
    seeds = given_prompts(Letters(), file, seed=0)
    written = write_corpus(target, Letters(), seeds, seconds=60, rows=2, row_len=48, min_answer=1, poll=8)
    assert len(written) == 3
    for index in range(3):
        ids, prompt_len = written.sample(index)
        assert ids.tolist() == greedy(target, ids[:prompt_len].tolist(), 48)[: len(ids)]
    assert {written.prompt_len[i] for i in range(3)} == {2, 3, 5}


@pytest.mark.parametrize(
    "line",
    [
        b'{"text": "abc"}',
        b'{"prompt": "abc", "messages": []}',
        b'{"prompt": ""}',
        b'{"prompt": [{"role": "user", "content": "x"}]}',
        b'{"messages": "abc"}',
        b'{"messages": [{"role": "user"}]}',
        b'["abc"]',
        b'{"prompt": "a"',
        b'{"prompt": "caf\xe9"}',
    ],
)
def test_a_bad_prompt_line_is_named(tmp_path: Path, line: bytes) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_bytes(b'{"prompt": "good", "id": 1}\n\n' + line + b"\n")
    with pytest.raises(ValueError, match=r"prompts\.jsonl, line 3"):
        read_prompts(file)


def test_bad_prompts_and_shapes_are_told_before_anything_is_written(
    target: Decoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object) -> None:
        raise AssertionError("too late")

    arguments: dict[str, Any] = {"device": torch.device("cpu"), "dtype": torch.float32}
    monkeypatch.setattr(session, "load_model", never)
    (tmp_path / "p.jsonl").write_text("{}\n")
    with pytest.raises(ValueError, match="line 1"):
        session.teach(Path("toy"), tmp_path, recipe(), prompts=tmp_path / "p.jsonl", **arguments)
    with pytest.raises(FileNotFoundError, match="no such file"):
        session.teach(Path("toy"), tmp_path, recipe(), prompts=tmp_path / "q.jsonl", **arguments)
    monkeypatch.setattr(session, "load_model", lambda *_: target)
    monkeypatch.setattr(session, "Tokenizer", Letters)
    monkeypatch.setattr(session, "write_text", never)
    with pytest.raises(ValueError, match="mask_token_id"):
        session.teach(Path("toy"), tmp_path, recipe(mask_token_id=VOCAB), **arguments)
    with pytest.raises(ValueError, match="block_size must be at least 2"):
        recipe(block_size=1)


def test_self_asked_prompts_end_with_the_suffix_and_greedy_answers(target: Decoder) -> None:
    suffix = tuple(Letters().encode("Ea"))
    seeds = iter([Seed("chat", (9, 8), suffix, 12, 0, 0.0) for _ in range(6)])
    written = write_corpus(target, Letters(), seeds, seconds=60, rows=3, row_len=48, min_answer=1, poll=8)
    assert len(written) >= 3 and written.notes["kinds"]["chat"] == len(written)
    prompts = set()
    for index in range(len(written)):
        ids, prompt_len = written.sample(index)
        assert tuple(ids[prompt_len - 2 : prompt_len]) == suffix and prompt_len <= 12 + 2
        assert ids.tolist() == greedy(target, ids[:prompt_len].tolist(), 48)[: len(ids)]
        prompts.add(tuple(ids[:prompt_len]))
    assert len(prompts) > 1


def test_a_docstring_ends_the_prompt(target: Decoder) -> None:
    newline = tuple(Letters().encode("\n"))
    table_token = 5
    seeds = iter([Seed("docstring", (9, 8), newline, 30, 1, 0.0) for _ in range(24)])
    written = write_corpus(target, Letters(), seeds, seconds=60, rows=8, row_len=64, min_answer=1, poll=8)
    ended = 0
    for index in range(len(written)):
        ids, prompt_len = written.sample(index)
        quotes = np.flatnonzero(ids[: prompt_len - 1] == table_token)
        if len(quotes):
            assert quotes.tolist() == [prompt_len - 2] and ids[prompt_len - 1] == newline[0]
            ended += 1
    assert ended


def test_the_mask_is_a_special_token_that_no_text_holds() -> None:
    tokenizer: Any = Letters()
    assert session.unused_token(tokenizer) == MASK
    tokenizer.special_ids = frozenset((EOS,))
    with pytest.raises(ValueError, match="mask-token-id"):
        session.unused_token(tokenizer)


def test_seeds_are_a_function_of_the_seed() -> None:
    def first(seed: int) -> list[Seed]:
        stream = self_asked(Letters(), seed)
        return [next(stream) for _ in range(40)]

    assert first(3) == first(3) != first(4)
    assert {seed.kind for seed in first(3)} >= {"chat", "docstring"}
    chat = next(seed for seed in first(3) if seed.kind == "chat")
    assert chat.suffix == tuple(Letters().encode("Ea")) and chat.prefix[0] == Letters().encode("u")[0]


def test_loops_are_found() -> None:
    assert loop_start(np.arange(200)) is None
    looping = np.concatenate((np.arange(50), np.tile(np.arange(10), 10)))
    found = loop_start(looping)
    assert found is not None and 50 < found < 100


def test_corpus_survives_parts(tmp_path: Path) -> None:
    data = corpus()
    paths = data.save(tmp_path, part_bytes=100)
    assert len(paths) > 1
    again = Corpus.load(tmp_path)
    assert len(again) == len(data) and np.array_equal(again.tokens, data.tokens)
    for index in range(len(data)):
        assert np.array_equal(again.sample(index)[0], data.sample(index)[0])
        assert again.sample(index)[1] == data.sample(index)[1]
    with pytest.raises(FileNotFoundError, match="corpus"):
        Corpus.load(tmp_path / "nowhere")


def test_packing_keeps_every_sample_once() -> None:
    data = corpus(((40, 5), (30, 1), (55, 20), (12, 3), (90, 8)))
    packed = pack(data, 64, 0)
    found = []
    for row in range(len(packed.ids)):
        for number in range(packed.document[row].max() + 1):
            place = np.flatnonzero(packed.document[row] == number)
            assert packed.position[row, place].tolist() == list(range(len(place)))
            found.append(packed.ids[row, place].tolist())
    assert sorted(found) == sorted(data.sample(i)[0][:64].tolist() for i in range(5))
    assert packed.anchor.sum() == sum(min(n, 64) - p for n, p in ((40, 5), (30, 1), (55, 20), (12, 3), (90, 8)))


# Training -------------------------------------------------------------------------------------------------------------


def test_overfit_export_load_whole_block_accepted(target: Decoder, tmp_path: Path) -> None:
    """The gate: if this fails, layout, masks, loss, export or loader disagree, and no real training can work."""
    sample = corpus(((26, 4),), seed=5)
    plan = recipe(max_steps=220, lr=1e-2, rows=1, anchors=16, row_len=32, warmup_steps=20, log_every=100)
    run = train(target, sample, plan, MASK)
    ids, prompt_len = sample.sample(0)
    for int8 in (False, True):
        folder = export_drafter(run.drafter, tmp_path / str(int8), {"data": "one sample"}, int8=int8)
        loaded = load_drafter(folder, torch.float32, torch.device("cpu"), target.config)
        result = evaluate(target, loaded, [(ids.tolist(), prompt_len)], topk_cap=4, budgets=(7,))
        # 22 answer tokens in blocks of 8: three whole rounds.
        assert result["rounds"] == {"chain": 3, "tree-7": 3}, result
        assert result["accuracy"][0] == 1.0 and result["tau"]["chain"] == pytest.approx(22 / 3, abs=1e-3)
    assert json.loads((tmp_path / "True" / "provenance.json").read_text())["data"] == "one sample"


def test_fresh_drafter_starts_from_the_targets_norm(target: Decoder) -> None:
    drafter = DFlash(drafter_config(target.config, recipe(), MASK))
    initialise(drafter, target, seed=0)
    assert torch.equal(drafter.norm.weight, target.norm.weight)
    for name, parameter in drafter.named_parameters():
        zero = name.endswith(("o_proj.weight", "down_proj.weight"))
        assert bool((parameter == 0).all()) == zero, name
    assert 0.015 < float(drafter.fc.weight.std()) < 0.025


def test_resumed_run_continues(target: Decoder, tmp_path: Path) -> None:
    events: list[Event] = []
    plan = recipe(max_steps=3)
    train(target, corpus(), plan, MASK, out=tmp_path, report=events.append)
    assert events[0].kind == "plan" and events[0].values["head chunk"] > 0
    assert [event.step for event in events if event.kind == "step"] == [1, 2, 3]
    before = Run(target, plan, MASK, None, events.append)
    before.resume(tmp_path)
    assert before.step == 3
    run = train(target, corpus(), recipe(max_steps=5), MASK, resume=tmp_path)
    assert run.step == 5 and run.masters.optimiser.state_dict()["state"][0]["step"] == 5
    with pytest.raises(ValueError, match="lr was"):
        train(target, corpus(), recipe(lr=1.0), MASK, resume=tmp_path)
    with pytest.raises(FileNotFoundError, match="resume"):
        train(target, corpus(), plan, MASK, resume=tmp_path / "nowhere")


def test_target_is_frozen(target: Decoder) -> None:
    before = {name: value.clone() for name, value in target.state_dict().items()}
    train(target, corpus(), recipe(max_steps=2), MASK)
    assert all(torch.equal(value, before[name]) for name, value in target.state_dict().items())


def test_masters_are_what_was_trained(target: Decoder) -> None:
    run = train(target, corpus(), recipe(max_steps=2), MASK)
    wide = run.master_drafter()
    for (name, master), live in zip(wide.named_parameters(), run.drafter.parameters(), strict=True):
        assert master.dtype == torch.float32 and torch.equal(master.to(live.dtype), live), name


def test_a_session_leaves_a_drafter_and_resumes(
    target: Decoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "load_model", lambda *_: target)
    monkeypatch.setattr(session, "Tokenizer", Letters)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("\n".join(json.dumps({"prompt": word}) for word in ("abc", "dog", "cat", "tree", "house")))
    plan = recipe(max_steps=2, mask_token_id=MASK)
    kinds = []
    arguments: dict[str, Any] = {"device": torch.device("cpu"), "dtype": torch.float32}
    first = session.teach(
        Path("toy"), tmp_path / "out", plan, prompts=prompts, report=lambda e: kinds.append(e.kind), **arguments
    )
    assert (
        kinds[0] == "write" and kinds.index("plan") < kinds.index("step") and first["data"]["source"] == "prompts.jsonl"
    )
    for form in ("bf16", "int8"):
        folder = tmp_path / "out" / form
        load_drafter(folder, torch.float32, torch.device("cpu"), target.config)
        assert json.loads((folder / "provenance.json").read_text())["held_out"]["tau"]["chain"] >= 1.0
    more = dataclasses.replace(plan, max_steps=4)
    again = session.teach(Path("toy"), tmp_path / "out", more, resume=tmp_path / "out", **arguments)
    assert again["steps"] == 4 and again["data"] == first["data"]
    with pytest.raises(FileNotFoundError, match="resume"):
        session.teach(Path("toy"), tmp_path / "out", plan, resume=tmp_path / "nowhere", **arguments)


def test_a_broken_gradient_is_skipped_and_counted(target: Decoder) -> None:
    run = Run(target, recipe(), MASK, None, lambda event: None)
    for parameter in run.masters.live:
        parameter.grad = torch.ones_like(parameter)
    run.masters.live[0].grad = torch.full_like(run.masters.live[0], torch.nan)
    before = [copy.clone() for copy in run.masters.copies]
    run.masters.optimiser.param_groups[0]["weight_decay"] = 0.0
    run.masters.step(0.1)
    assert int(run.masters.skipped) == 1
    assert all(torch.equal(copy, old) for copy, old in zip(run.masters.copies, before, strict=True))


def test_schedule_follows_the_budget() -> None:
    plan = recipe(lr=1.0, warmup_steps=10, floor=0.01)
    assert plan.rate(0, 0.0) == pytest.approx(0.1) and plan.rate(9, 0.0) == pytest.approx(1.0)
    assert plan.rate(500, 0.5) == pytest.approx(0.505) and plan.rate(500, 1.0) == pytest.approx(0.01)
    assert plan.rate(500, 2.0) == pytest.approx(0.01)
    assert recipe(block_size=16).decay == 7.0 and recipe(block_size=8).decay == 4.0
    with pytest.raises(ValueError, match="attention"):
        recipe(attention="magic")


def test_int8_rounds_by_row() -> None:
    weight = torch.randn(8, 32) * torch.logspace(-3, 3, 8)[:, None]
    values, scale = quantise(weight)
    assert values.dtype == torch.int8 and values.abs().amax(1).eq(127).all()
    assert ((values.float() * scale - weight).abs() <= scale * 0.5001).all()


def test_exported_tensors_are_the_z_lab_set(target: Decoder) -> None:
    names = set(checkpoint_tensors(fresh(target)))
    assert (
        len(names) == 11 * 2 + 3
        and "layers.1.self_attn.k_proj.weight" in names
        and "layers.0.mlp.up_proj.weight" in names
    )
