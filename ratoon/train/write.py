# Owns: the target's own text: writing it in large batches, and what of it is kept.
# Promises: every sample is the target's own text; seeds fix the draw on one machine; what was dropped is counted.
# Never: chooses what is asked, prints.
"""Self-written training text. R: rows, S: slots per row, K: key/value heads, G: query heads per K, D: head dim."""

from __future__ import annotations

import re
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ratoon.models.decoder import Decoder
from ratoon.models.layers import Apart
from ratoon.train.data import Corpus
from ratoon.train.prompts import CODE_OPENINGS, QUOTES, Encoder, Seed

MIN_P = 0.05


def quote_table(tokenizer: Encoder, vocab_size: int) -> Tensor:
    """How many triple quotes each token's text holds, int64 [V]: a docstring ends at the second."""
    return torch.tensor([tokenizer.decode([token]).count(QUOTES) for token in range(vocab_size)])


class Writer:
    """Autoregressive writing in a fixed batch, one CUDA graph a step where there is a GPU.

    Rows are forced, sampled or answered token by token by device state alone, so a step reads nothing on the host.
    """

    SUFFIX = 16

    def __init__(self, target: Decoder, rows: int, row_len: int, quotes_V: Tensor, eos_ids: Sequence[int]) -> None:
        config, device = target.config, target.embed.weight.device
        self.target, self.rows, self.row_len, self.device = target, rows, row_len, device
        shape = (config.num_layers, rows, config.num_kv_heads, row_len, config.head_dim)
        self.keys = torch.zeros(shape, dtype=target.embed.weight.dtype, device=device)
        self.values = torch.zeros_like(self.keys)
        self.groups = config.num_heads // config.num_kv_heads

        def integers(*size: int) -> Tensor:
            return torch.zeros(size, dtype=torch.int64, device=device)

        self.tokens, self.suffix = integers(rows, row_len + self.SUFFIX), integers(rows, self.SUFFIX)
        self.position, self.filled, self.prompt_len = integers(rows), integers(rows), integers(rows)
        self.suffix_len, self.prompt_limit, self.need_quotes, self.seen_quotes = (integers(rows) for _ in range(4))
        self.answering = torch.zeros(rows, dtype=torch.bool, device=device)
        self.done = torch.ones(rows, dtype=torch.bool, device=device)
        self.temperature = torch.zeros(rows, device=device)
        self.quotes_V = quotes_V.to(device)
        self.eos = torch.tensor(list(eos_ids), device=device)
        self.row = torch.arange(rows, device=device)
        self.slot = torch.arange(row_len, device=device)
        self.graph: torch.cuda.CUDAGraph | None = None

    def _attend(self, bias: Tensor) -> Callable[[int, Tensor, Tensor, Tensor], Tensor]:
        def attend(layer: int, q_TND: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
            keys, values = self.keys[layer], self.values[layer]
            keys[self.row, :, self.position] = k_TKD
            values[self.row, :, self.position] = v_TKD
            # A group's query heads stand in the query dim: no copy of K/V per head.
            q_RKGD = q_TND.unflatten(1, (-1, self.groups))
            return F.scaled_dot_product_attention(q_RKGD, keys, values, attn_mask=bias).flatten(1, 2)

        return attend

    @torch.no_grad()
    def _step(self) -> None:
        seen_RS = self.slot <= self.position[:, None]
        bias = torch.zeros(seen_RS.shape, dtype=self.keys.dtype, device=self.device)
        bias = bias.masked_fill(~seen_RS, float("-inf"))[:, None, None, :].expand(-1, -1, self.groups, -1)
        token = self.tokens.gather(1, self.position[:, None])[:, 0]
        hidden, _ = self.target(token, self.position, Apart(self._attend(bias.contiguous())))
        self._advance(self._draw(self.target.logits(hidden)))

    def _draw(self, logits_RV: Tensor) -> Tensor:
        """Greedy where the row's present temperature is 0, else a Gumbel draw above a min-p floor."""
        temperature = torch.where(self.answering, self.temperature, 1.0)
        greedy = logits_RV.argmax(-1)
        scaled = logits_RV / temperature.clamp(min=0.05)[:, None]
        floor = scaled.amax(-1, keepdim=True) + float(np.log(MIN_P))
        noise = torch.empty_like(scaled).exponential_().log()
        sampled = (scaled - noise).masked_fill(scaled < floor, float("-inf")).argmax(-1)
        return torch.where(temperature > 0, sampled, greedy)

    def _advance(self, drawn: Tensor) -> None:
        """Writes the next token of every row and moves its state."""
        after = self.position + 1
        forced = after < self.filled
        # A finished row writes its own last token again.
        token = torch.where(forced | self.done, self.tokens.gather(1, after[:, None])[:, 0], drawn)
        self.tokens.scatter_(1, after[:, None], token[:, None])
        self.filled.copy_(torch.maximum(self.filled, after + 1))
        ended = (token[:, None] == self.eos).any(-1) & ~forced & ~self.done
        self.seen_quotes.add_(torch.where(forced | self.answering, 0, self.quotes_V[token]))
        quoted = (self.need_quotes > 0) & (self.seen_quotes >= self.need_quotes)
        stop = (ended | quoted | (after + 1 >= self.prompt_limit)) & ~self.answering & (after + 1 >= self.filled)
        # A chat suffix begins with the end mark itself, so it goes over a drawn one and after any other token.
        first = torch.where(ended, after, after + 1)
        column = first[:, None] + torch.arange(self.SUFFIX, device=self.device)
        column = column.clamp(max=self.tokens.shape[1] - 1)
        inside = torch.arange(self.SUFFIX, device=self.device) < self.suffix_len[:, None]
        kept = self.tokens.gather(1, column)
        self.tokens.scatter_(1, column, torch.where(stop[:, None] & inside, self.suffix, kept))
        end = torch.where(ended & (self.suffix_len == 0), after + 1, first + self.suffix_len)
        self.filled.copy_(torch.where(stop, end, self.filled))
        self.prompt_len.copy_(torch.where(stop, end, self.prompt_len))
        dead = stop & ended & (self.suffix_len == 0)
        self.done.logical_or_((ended & self.answering) | dead | (after + 1 >= self.row_len))
        self.answering.logical_or_(stop)
        self.position.copy_(torch.where(self.done, self.position, after))

    def steps(self, count: int) -> None:
        """Advances every row by up to `count` tokens."""
        if self.device.type == "cuda" and self.graph is None:
            self._capture()
        for _ in range(count):
            if self.graph is not None:
                self.graph.replay()
            else:
                self._step()

    def _capture(self) -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                self._step()
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self._step()

    def start(self, rows: Sequence[int], seeds: Sequence[Seed]) -> None:
        """Puts new seeds into finished rows."""
        count = len(rows)
        tokens = np.zeros((count, self.tokens.shape[1]), dtype=np.int64)
        suffix = np.zeros((count, self.SUFFIX), dtype=np.int64)
        for i, seed in enumerate(seeds):
            if len(seed.suffix) > self.SUFFIX or len(seed.prefix) + len(seed.suffix) >= self.row_len:
                raise ValueError(f"a prompt of {len(seed.prefix)} tokens does not fit rows of {self.row_len}")
            tokens[i, : len(seed.prefix)] = seed.prefix
            suffix[i, : len(seed.suffix)] = seed.suffix
        where = torch.tensor(list(rows), device=self.device)

        def put(name: str, values: Any) -> None:
            state: Tensor = getattr(self, name)
            state[where] = torch.as_tensor(values, dtype=state.dtype).to(self.device)

        put("tokens", tokens)
        put("suffix", suffix)
        put("suffix_len", [len(s.suffix) for s in seeds])
        put("filled", [len(s.prefix) for s in seeds])
        # A prompt that is wholly given is answered at once.
        given = [s.prompt_limit <= len(s.prefix) and not s.suffix for s in seeds]
        put("answering", given)
        put("prompt_len", [len(s.prefix) if whole else 0 for s, whole in zip(seeds, given, strict=True)])
        put("prompt_limit", [min(s.prompt_limit, self.row_len // 2) for s in seeds])
        put("need_quotes", [s.num_quotes for s in seeds])
        put("temperature", [s.temperature for s in seeds])
        for name in ("position", "seen_quotes", "done"):
            put(name, [0] * count)


@dataclass
class _Desk:
    """The rows at work: who sits in each, and the seeds drawn ahead so that the GPU never waits for them."""

    writer: Writer
    seeds: Iterator[Seed]
    live: dict[int, Seed] = field(default_factory=dict)
    ahead: deque[Seed] = field(default_factory=deque)

    def draw(self) -> None:
        while len(self.ahead) < self.writer.rows:
            following = next(self.seeds, None)
            if following is None:
                return
            self.ahead.append(following)

    def take(self, rows: Sequence[int]) -> list[tuple[np.ndarray, int, str]]:
        """Texts of the given rows that hold one, which leaves those rows empty."""
        if not rows:
            return []
        where = torch.tensor(list(rows), device=self.writer.device)
        tokens = self.writer.tokens[where].cpu().numpy()
        lengths, prompts = self.writer.filled[where].cpu().numpy(), self.writer.prompt_len[where].cpu().numpy()
        texts = []
        for i, row in enumerate(rows):
            if row in self.live:
                length = min(int(lengths[i]), self.writer.row_len)
                texts.append((tokens[i, :length], int(prompts[i]), self.live.pop(row).kind))
        return texts

    def seat(self, rows: Sequence[int]) -> None:
        """New seeds into empty rows, as far as there are any."""
        rows = rows[: len(self.ahead)]
        if rows:
            fresh = [self.ahead.popleft() for _ in rows]
            self.writer.start(rows, fresh)
            self.live.update(zip(rows, fresh, strict=True))


def write_corpus(
    target: Decoder,
    tokenizer: Encoder,
    seeds: Iterator[Seed],
    *,
    seconds: float,
    rows: int,
    row_len: int = 768,
    seed: int = 0,
    max_tokens: int | None = None,
    min_answer: int = 8,
    poll: int = 32,
    cut_loops: bool = True,
    progress: Callable[[dict[str, Any]], None] | None = None,
) -> Corpus:
    """Lets the target write for `seconds` (or to `max_tokens`, or until the seeds end), rows refilled as they finish.

    `cut_loops` shortens every second text that loops. The returned notes hold counts by kind, what was dropped, seed,
    time and speed.
    """
    torch.manual_seed(seed)
    writer = Writer(target, rows, row_len, quote_table(tokenizer, target.config.vocab_size), tokenizer.eos_ids)
    desk, harvest, steps, begun = _Desk(writer, seeds), Harvest(cut_loops), 0, time.monotonic()
    desk.draw()
    while True:
        empty = np.flatnonzero(writer.done.cpu().numpy()).tolist()
        texts = desk.take(empty)
        desk.seat(empty)
        elapsed = time.monotonic() - begun
        over = elapsed > seconds or (max_tokens is not None and harvest.num_tokens >= max_tokens) or not desk.live
        if not over:
            writer.steps(poll)
            steps += poll
        # The host reads texts and draws seeds while the GPU writes.
        for ids, prompt_len, kind in texts:
            harvest.add(ids, prompt_len, kind, min_answer)
        desk.draw()
        if progress:
            progress({"elapsed_s": elapsed, "tokens": harvest.num_tokens, "samples": len(harvest.samples)})
        if over:
            break
    # What is half written when the time ends is still the target's own text.
    for ids, prompt_len, kind in desk.take(list(desk.live)):
        harvest.add(ids, prompt_len, kind, max(min_answer, 64))
    spent = time.monotonic() - begun
    notes = {"seed": seed, "rows": rows, "row_len": row_len, "seconds": round(spent, 1), "steps": steps}
    notes["row_steps_per_s"] = round(steps * rows / max(spent, 1e-9))
    return Corpus.from_samples(harvest.samples, {**harvest.notes(), **notes})


@dataclass
class Harvest:
    """Finished samples and what became of the rest."""

    cut_loops: bool = True
    samples: list[tuple[np.ndarray, int]] = field(default_factory=list)
    kinds: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)
    num_tokens: int = 0
    seen: set[bytes] = field(default_factory=set)

    def add(self, ids: np.ndarray, prompt_len: int, kind: str, min_answer: int) -> None:
        """Keeps one text unless it is short or known; a loop is cut short in half of the cases."""
        if prompt_len < 1 or len(ids) - prompt_len < min_answer:
            self.dropped["short"] += 1
            return
        mark = ids[: prompt_len + min_answer].tobytes()
        if mark in self.seen:
            self.dropped["duplicate"] += 1
            return
        self.seen.add(mark)
        loop = loop_start(ids[prompt_len:])
        if loop is not None:
            self.kinds["looping"] += 1
            if self.cut_loops and len(self.samples) % 2:
                ids = ids[: prompt_len + loop + 48]
                self.dropped["loop tails"] += 1
        self.samples.append((ids, prompt_len))
        self.kinds[kind] += 1
        self.num_tokens += len(ids)

    def notes(self) -> dict[str, Any]:
        """Counts for the provenance file."""
        return {
            "kinds": dict(self.kinds),
            "dropped": dict(self.dropped),
            "samples": len(self.samples),
            "tokens": self.num_tokens,
        }


def loop_start(ids: np.ndarray, gram: int = 8, repeats: int = 4) -> int | None:
    """Index of the first 8-gram that was seen `repeats` times before, or None. Greedy text of a small model loops."""
    if len(ids) < gram * repeats:
        return None
    key = np.zeros(len(ids) - gram + 1, dtype=np.uint64)
    for offset in range(gram):
        key = key * np.uint64(1000003) + ids[offset : len(ids) - gram + 1 + offset].astype(np.uint64)
    order = np.argsort(key, kind="stable")
    ordered = key[order]
    same = ordered[repeats:] == ordered[:-repeats]
    return int(order[repeats:][same].min()) if same.any() else None


# Heads of functions ---------------------------------------------------------------------------------------------------

HEAD = re.compile(r"\s*(?:(?:from|import) .*\n|\n)*def ([A-Za-z_]\w*)\([^\n]*\)[^\n]*:(?=\n)")


def write_heads(
    target: Decoder, tokenizer: Encoder, count: int, rows: int, seed: int, seconds: float = 30.0
) -> list[str]:
    """Openings of documented functions, all sampled from the target: its first `def` line and what stands above it,
    the docstring opened; and as many again where a first docstring line and a call as example are there too."""
    openings = [str(opening) for opening in np.random.default_rng(seed).choice(CODE_OPENINGS, 2 * count)]
    heads = {}
    for text in _sampled(target, tokenizer, openings, rows, 64, seed, seconds):
        found = HEAD.match(text)
        if found:
            heads[found[0] + f"\n    {QUOTES}"] = found[1]
    examples = set()
    for text in _sampled(target, tokenizer, list(heads)[:count], rows, 112, seed + 1, seconds):
        found = HEAD.match(text)
        body = text[found.end() :].lstrip().removeprefix(QUOTES) if found else ""
        line = body.split(QUOTES)[0].strip().split("\n")[0]
        if found and len(line) > 15:
            name = found[1]
            examples.add(f"{found[0]}\n    {QUOTES} {line}\n    >>> {name}(")
            examples.add(f"{found[0]}\n    {QUOTES}\n    {line}\n    >>> {name}(")
    return sorted(heads)[:count] + sorted(examples)[:count]


def _sampled(
    target: Decoder, tokenizer: Encoder, openings: Sequence[str], rows: int, row_len: int, seed: int, seconds: float
) -> list[str]:
    """The target's continuations of the openings at temperature 1, as text."""
    encoded = [tuple(tokenizer.encode(text, add_special=False)) for text in openings]
    seeds = iter(Seed("head", ids, (), len(ids), 0, 1.0) for ids in encoded if len(ids) + Writer.SUFFIX < row_len)
    raw = write_corpus(target, tokenizer, seeds, seconds=seconds, rows=rows, row_len=row_len, seed=seed, min_answer=4)
    return [tokenizer.decode(raw.sample(index)[0].tolist()) for index in range(len(raw))]
