# Owns: a toy target, toy drafters, the plainest text they can be held against, and a bench that runs real rounds.
# Promises: the target hears its whole history, so a wrong key, value, mask or position shows in the tokens.
# Never: tests anything itself, or goes around Runner.
"""Toy pairs. V: vocabulary, P: positions, L: drafted depths, N: drafted places, B: block, R: rows."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as HFTokenizer
from torch import Tensor, nn

from ratoon.core.config import ModelConfig
from ratoon.core.drafter import DrafterConfig
from ratoon.core.request import SamplingParams, batch_sampler_kind
from ratoon.models.decoder import Decoder
from ratoon.models.dflash import DFlash
from ratoon.models.layers import Attend
from ratoon.ops.sample import Draw, SamplerState, draw, penalise, write_seat
from ratoon.runtime.pages import PagePool
from ratoon.runtime.results import RowResult
from ratoon.runtime.runner import Launch, Mode, Runner
from ratoon.spec.state import Limits, RoundShape
from tests.dense import DenseCausal

VOCAB, LAYERS, BLOCK, MAX_LEN = 48, 3, 8, 96
TAPS = (1, 0)  # list order, not layer order
NEAR_TIE = 1e-4

TARGET = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
DRAFTER = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
    "max_position_embeddings": 512,
    "hidden_act": "silu",
    "block_size": BLOCK,
    "num_target_layers": LAYERS,
    "dflash_config": {"target_layer_ids": list(TAPS), "mask_token_id": VOCAB - 1},
}


def randomise(net: nn.Module, seed: int, gain: float) -> Any:
    """Every weight random; matrices keep the size of what passes through them, times `gain`."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in net.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.data = 1 + 0.2 * noise if parameter.ndim == 1 else gain * noise * parameter.shape[1] ** -0.5
    return net.eval()


def make_target(seed: int = 0, gain: float = 1.8, **changes: Any) -> Decoder:
    """A random Llama whose next token depends on all tokens before it."""
    return randomise(Decoder(ModelConfig.from_hf({**TARGET, **changes})), seed, gain)


def drafter_config(**changes: Any) -> DrafterConfig:
    """Keys of `dflash_config` and of the top level alike."""
    inner = {key: changes.pop(key) for key in ("target_layer_ids", "mask_token_id", "anchor_first") if key in changes}
    return DrafterConfig.from_hf({**DRAFTER, **changes, "dflash_config": {**DRAFTER["dflash_config"], **inner}})  # type: ignore[dict-item]


def make_drafter(seed: int = 1, **changes: Any) -> DFlash:
    """A random DFlash: it is heard everywhere, and seldom right."""
    return stacked(randomise(DFlash(drafter_config(**changes)), seed, 1.0))


def stacked(drafter: Any) -> Any:
    """As a loader leaves it."""
    drafter.stack_context()
    return drafter


class Prophet(DFlash):
    """A random DFlash that has been told the texts to come, and says so with a known error.

    At every position and depth the true token gets rank 0, 1, 2, ... or none that a tree can hold, by fixed lots, so
    accepted paths of all lengths and all shapes occur. What the network itself computes is still added, small.
    """

    truth_PVL: Tensor
    rank_PL: Tensor
    order_LV: Tensor

    def __init__(self, config: DrafterConfig, lots: Sequence[float], slope: float, seed: int) -> None:
        super().__init__(config)
        self.slope = slope
        generator = torch.Generator().manual_seed(seed)
        depths, vocab = config.num_drafts, config.vocab_size
        ranks = torch.multinomial(torch.tensor(lots), MAX_LEN * depths, replacement=True, generator=generator)
        order = torch.stack([torch.randperm(vocab, generator=generator) for _ in range(depths)])
        self.register_buffer("truth_PVL", torch.full((MAX_LEN, vocab, depths), -1), persistent=False)
        self.register_buffer("rank_PL", ranks.view(MAX_LEN, depths), persistent=False)
        self.register_buffer("order_LV", order, persistent=False)

    def learn(self, tokens: Sequence[int]) -> None:
        """A text, prompt included: what follows each of its positions."""
        for position, anchor in enumerate(tokens[:MAX_LEN]):
            ahead = list(tokens[position + 1 : position + 1 + self.truth_PVL.shape[2]])
            self.truth_PVL[position, anchor, : len(ahead)] = torch.tensor(ahead, dtype=torch.int64)

    def forget(self) -> None:
        """Unlearns all texts."""
        self.truth_PVL.fill_(-1)

    def block_embeddings(self, embed_weight_VH: Tensor, anchor_R: Tensor, block_size: int) -> Tensor:
        self._anchor_R, self._block = anchor_R, block_size
        return super().block_embeddings(embed_weight_VH, anchor_R, block_size)

    def forward(self, x_TH: Tensor, position_T: Tensor, attend: Attend) -> Tensor:
        self._start_R = position_T.view(-1, self._block)[:, 0]
        return super().forward(x_TH, position_T, attend)

    def logits(self, h_NH: Tensor, head: Callable[[Tensor], Tensor]) -> Tensor:
        start_R = self._start_R.clamp(max=MAX_LEN - 1)
        depths = h_NH.shape[0] // start_R.shape[0]
        true_NL = self.truth_PVL[start_R, self._anchor_R][:, :depths]
        true_N1, rank_N1 = true_NL.reshape(-1, 1), self.rank_PL[start_R][:, :depths].reshape(-1, 1)
        place_NV = self.order_LV[:depths].repeat(start_R.shape[0], 1)
        known_N1, at_N1 = true_N1 >= 0, place_NV.gather(1, true_N1.clamp(min=0))
        swapped_NV = torch.where(place_NV == rank_N1, at_N1, place_NV).scatter(1, true_N1.clamp(min=0), rank_N1)
        heard_NV = super().logits(h_NH, head).tanh()
        return 0.05 * heard_NV - self.slope * torch.where(known_N1, swapped_NV, place_NV)


def make_prophet(
    seed: int = 2, lots: Sequence[float] = (0.78, 0.1, 0.06, 0.03, 0, 0, 0.03), slope: float = 0.9, **changes: Any
) -> Prophet:
    """lots: weights of ranks 0, 1, ... of the true token; slope: how much less likely each next rank is."""
    return stacked(randomise(Prophet(drafter_config(**changes), lots, slope, seed), seed, 1.0))


# ---- on disk ----------------------------------------------------------------------------------------------


def hf_weights(target: Decoder) -> dict[str, Tensor]:
    """The target's weights under their Hugging Face names."""
    config, own = target.config, {name: parameter.data for name, parameter in target.named_parameters()}
    weights = {"model.embed_tokens.weight": own["embed.weight"], "model.norm.weight": own["norm.weight"]}
    weights["lm_head.weight"] = own["head.weight"]
    for i in range(config.num_layers):
        for name in ("input_layernorm", "post_attention_layernorm", "self_attn.o_proj", "mlp.down_proj"):
            weights[f"model.layers.{i}.{name}.weight"] = own[f"layers.{i}.{name}.weight"]
        sizes = [config.head_dim * count for count in (config.num_heads, config.num_kv_heads, config.num_kv_heads)]
        for name, part in zip("qkv", own[f"layers.{i}.self_attn.qkv_proj.weight"].split(sizes), strict=True):
            weights[f"model.layers.{i}.self_attn.{name}_proj.weight"] = part.contiguous()
        gate, up = own[f"layers.{i}.mlp.gate_up_proj.weight"].chunk(2)
        weights[f"model.layers.{i}.mlp.gate_proj.weight"] = gate.contiguous()
        weights[f"model.layers.{i}.mlp.up_proj.weight"] = up.contiguous()
    return weights


EOS, MASK = 2, VOCAB - 1
MERGES = ("th", "he", "in", "er", "an", "on", "re")
# Single letters, a space, a line feed, the two halves of an e with an acute accent, and pairs of letters.
TOKENS = [*"abcdefghijklmnopqrstuvwxyzABCDEFG.,", "\u0120", "\u010a", "\u00c3", "\u00a9", *MERGES]
TOKENS.insert(EOS, "<eos>")
TOKENS.append("<mask>")


def save_target(target: Decoder, folder: Path, **changes: Any) -> Path:
    """A model directory with a byte-level tokenizer of 48 tokens."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(hf_weights(target), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**TARGET, **changes}))
    bpe = models.BPE(vocab={token: i for i, token in enumerate(TOKENS)}, merges=[(pair[0], pair[1]) for pair in MERGES])
    backend = HFTokenizer(bpe)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in ("<eos>", "<mask>")])
    backend.save(str(folder / "tokenizer.json"))
    return folder


# ---- what the texts must be -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ask:
    """One request as the runner knows it."""

    prompt: tuple[int, ...]
    num: int = 24
    budget: int = 0
    cap: int = 0
    params: SamplingParams = field(default_factory=SamplingParams)
    stop_ids: tuple[int, ...] = ()
    seed: int = 0

    def ar(self) -> Ask:
        return replace(self, budget=0)


@dataclass
class Text:
    """What came of it: tokens, gap per token (nearest change of any kind), nodes accepted per round."""

    tokens: list[int] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    num_nodes: list[int] = field(default_factory=list)
    done: bool = False

    def add(self, result: RowResult) -> None:
        self.tokens += result.tokens
        self.gaps += [min(pair) for pair in zip(result.gaps, result.edge_gaps, strict=True)]
        self.accepted.append(result.accepted)
        self.num_nodes.append(result.num_nodes)
        self.done = result.done
        assert not result.bad, "the target gave a NaN"


def dense_text(target: Decoder, ask: Ask) -> Text:
    """The same request without pages, trees, seats or batches: one dense cache, one token at a time.

    Penalties see the output as one path of drafted tokens, so nothing is ever committed to counts.
    """
    state = SamplerState.allocate(1, target.config.vocab_size, 8, penalties=True)
    write_seat(state, 0, ask.params, torch.tensor(ask.prompt), ask.seed)
    cache, text, seat_T = DenseCausal(target.config.num_layers), Text(), torch.zeros(1, dtype=torch.int64)
    ids = list(ask.prompt)
    with torch.inference_mode():
        while not text.done:
            position_T = torch.arange(cache.length, len(ids))
            hidden, _ = target(torch.tensor(ids[cache.length :]), position_T, cache)
            path = torch.tensor([text.tokens or [-1]])
            logits = penalise(target.logits(hidden[-1:]), state, seat_T, path)
            drawn: Draw = draw(logits, state, seat_T, torch.tensor([len(ids)]), "general")
            ids.append(int(drawn.token_T))
            text.tokens.append(ids[-1])
            text.gaps.append(min(float(drawn.gap_T), float(drawn.edge_gap_T)))
            text.done = ids[-1] in ask.stop_ids or len(text.tokens) >= ask.num
    return text


def assert_same_text(want: Text, got: Text, what: str = "") -> None:
    """Equal tokens, or a first divergence where AR was undecided (METHOD section 5), which is printed."""
    for index, (ours, theirs) in enumerate(zip(want.tokens, got.tokens, strict=False)):
        if ours != theirs:
            near = want.gaps[index] <= NEAR_TIE
            line = f"{what}: token {index} is {theirs} instead of {ours}, AR's gap there is {want.gaps[index]:.2e}"
            assert near, f"{line}\nwant {want.tokens}\ngot  {got.tokens}\naccepted {got.accepted}"
            print("near-tie", line)
            return
    assert len(got.tokens) == len(want.tokens), f"{what}: {len(got.tokens)} tokens instead of {len(want.tokens)}"


# ---- real rounds ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Seat:
    """A joined request."""

    number: int
    ask: Ask
    pages: list[int]
    text: Text


class Bench:
    """A runner with its pages, and rounds over asks.

    buckets: (rows, nodes, sampler) to capture where the mode has graphs, and to fit rounds to.
    """

    def __init__(
        self,
        target: Decoder,
        drafter: DFlash | None,
        mode: Mode = "eager",
        *,
        rows: int = 4,
        nodes: int = 63,
        page_size: int = 16,
        max_len: int = MAX_LEN,
        run_ahead: int = 0,
        max_ranks: int = 0,
        spare_pages: int = 0,
        sample_group: int = 16,
        forecast: tuple[tuple[int, int], ...] = (),
        captured: Sequence[tuple[int, int, str]] = (),
    ) -> None:
        config = drafter.config if drafter else None
        limits = Limits(
            max_rows=rows,
            max_nodes=nodes if config else 0,
            max_block=config.block_size if config else 0,
            max_depth=config.num_drafts if config else 0,
            max_ranks=max_ranks or max(nodes, 1),
            max_model_len=max_len,
            page_size=page_size,
            num_pages=2,
            run_ahead=run_ahead,
            forecast=forecast,
            sample_group=sample_group,
        )
        limits = replace(limits, num_pages=1 + rows * limits.pages_per_row + spare_pages)
        self.limits = limits
        self.runner = Runner(target, drafter, limits, target.embed.weight.device, mode, debug=True)
        self.pool = PagePool(limits.num_pages)
        self.free = list(range(1, rows + 1))
        if self.runner.graphs is not None:
            self.runner.capture([self.shape(*bucket) for bucket in captured])

    def shape(self, rows: int, nodes: int, sampler: str = "general") -> RoundShape:
        """The shape of a round over `rows` rows of up to `nodes` nodes each, as this mode runs it."""
        block = self.limits.max_block if nodes else 0
        return self.runner.fit(RoundShape(rows, rows * (nodes + 1), block, nodes, sampler))

    def join(self, ask: Ask, pages: list[int] | None = None, computed: int = 0) -> Seat:
        """Seats a request. pages: its page table; the first `computed` tokens' K/V are in them already."""
        needed = -(-(len(ask.prompt) + ask.num + self.limits.scratch) // self.limits.page_size)
        pages = self.pool.take(needed) if pages is None else pages
        seat = Seat(self.free.pop(0), ask, pages, Text())
        limit = len(ask.prompt) + ask.num
        self.runner.join(seat.number, ask.prompt, pages, ask.params, ask.stop_ids, ask.seed, limit, ask.budget, ask.cap)
        # Two chunks, so that the second one starts from a context.
        last = len(ask.prompt) - 1
        middle = computed + (last - computed) // 2
        self.runner.prefill(seat.number, ask.prompt, computed, middle)
        self.runner.prefill(seat.number, ask.prompt, middle, last)
        return seat

    def leave(self, seat: Seat) -> None:
        self.runner.stop(seat.number)
        self.pool.give_back(seat.pages)
        self.free.append(seat.number)

    def launch(self, seats: Sequence[Seat], shape: RoundShape | None = None) -> Launch:
        return self.runner.launch([seat.number for seat in seats], shape or self.natural(seats))

    def natural(self, seats: Sequence[Seat]) -> RoundShape:
        """The smallest shape that gives every seat its budget, with the cheapest sampler."""
        kind = batch_sampler_kind([seat.ask.params.sampler_kind for seat in seats])
        return self.shape(len(seats), max(seat.ask.budget for seat in seats), kind)

    def read(self, seats: Sequence[Seat], launch: Launch) -> None:
        for seat, result in zip(seats, self.runner.read(launch), strict=True):
            seat.text.add(result)

    def run(
        self,
        asks: Sequence[Ask],
        shape: RoundShape | None = None,
        before: Callable[[Sequence[Seat]], None] | None = None,
        after: Callable[[Sequence[Seat]], None] | None = None,
    ) -> list[Text]:
        """Texts of asks that start together; a row leaves when it is done. Hooks run around every round."""
        seats = [self.join(ask) for ask in asks]
        self.finish(seats, shape, before, after)
        return [seat.text for seat in seats]

    def finish(
        self,
        seats: Sequence[Seat],
        shape: RoundShape | None = None,
        before: Callable[[Sequence[Seat]], None] | None = None,
        after: Callable[[Sequence[Seat]], None] | None = None,
    ) -> None:
        """Rounds until all are done."""
        live, rounds = list(seats), 0
        while live:
            rounds += 1
            assert rounds <= sum(seat.ask.num for seat in seats), "a row that never ends"
            if before:
                before(live)
            self.read(live, self.launch(live, shape))
            if after:
                after(live)
            for seat in live:
                if seat.text.done:
                    self.leave(seat)
            live = [seat for seat in live if not seat.text.done]
