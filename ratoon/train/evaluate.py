# Owns: the offline figure of a drafter: rounds simulated over known greedy text, without an engine.
# Promises: METHOD section 5's tau: committed tokens per round, the new anchor included, from the end of the prompt.
# Never: samples, trains, prints.
"""Offline tau and recall of a drafter on given texts (prompt and greedy answer). L: depths, C: rank cap."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ratoon.models.decoder import Decoder
from ratoon.models.dflash import DFlash
from ratoon.spec.ddtree import build_tree
from ratoon.train.loss import Batch, blocks_at, rank_drafts, target_pass

Sample = tuple[Sequence[int], int]


@dataclass
class Draft:
    """What the drafter offers at one anchor: candidates and their log-probabilities [L, C], true ranks [L']."""

    token: np.ndarray
    logprob: np.ndarray
    rank: np.ndarray


@dataclass
class Count:
    """Rounds of one method."""

    rounds: int = 0
    tokens: int = 0
    accepted: list[int] = field(default_factory=list)


def evaluate(
    target: Decoder,
    drafter: DFlash,
    samples: Sequence[Sample],
    topk_cap: int = 8,
    budgets: Sequence[int] = (15, 31, 63),
    *,
    backend: str = "explicit",
    rows: int = 8,
    anchors: int = 16,
) -> dict[str, Any]:
    """tau of the chain and of trees with the given node budgets, accuracy and recall@C per drafted position.

    `samples` are (ids, prompt_len), the ids ending with the target's own greedy answer. A round starts at the last
    prompt token; the answer's last token ends the row. Accuracy and recall are over the chain's rounds.
    """
    methods = ["chain", *(f"tree-{budget}" for budget in budgets)]
    counts = {name: Count() for name in methods}
    depths = drafter.config.num_drafts
    right, recalled, seen = np.zeros(depths), np.zeros(depths), np.zeros(depths)
    for group in _groups(samples, rows):
        offers = Offers(target, drafter, group, topk_cap, backend, anchors)
        state = {(name, row): prompt_len - 1 for name in methods for row, (_, prompt_len) in enumerate(group)}
        while state:
            offers.fetch({(row, at) for (_, row), at in state.items()})
            for (name, row), at in list(state.items()):
                draft, left = offers.known[row, at], len(group[row][0]) - 1 - at
                accepted = _accepted(draft, name, left, topk_cap)
                if name == "chain":
                    reach = min(depths, left)
                    right[:reach] += draft.rank[:reach] == 0
                    recalled[:reach] += draft.rank[:reach] < topk_cap
                    seen[:reach] += 1
                _move(state, counts[name], name, row, at, accepted, left)
    total = np.maximum(seen, 1)
    return {
        "tau": {name: round(count.tokens / max(count.rounds, 1), 4) for name, count in counts.items()},
        "rounds": {name: count.rounds for name, count in counts.items()},
        "accept_per_position": {name: _per_position(count, depths) for name, count in counts.items()},
        "accuracy": [round(float(value), 4) for value in right / total],
        f"recall_at_{topk_cap}": [round(float(value), 4) for value in recalled / total],
        "samples": len(samples),
        "topk_cap": topk_cap,
    }


def _groups(samples: Sequence[Sample], rows: int) -> Iterator[list[Sample]]:
    """Samples of like length together: a group is padded to its longest."""
    usable = [sample for sample in samples if len(sample[0]) > sample[1] >= 1]
    ordered = sorted(usable, key=lambda sample: len(sample[0]))
    for first in range(0, len(ordered), rows):
        yield ordered[first : first + rows]


def _accepted(draft: Draft, method: str, left: int, topk_cap: int) -> int:
    """How many drafted tokens of a round are right: the chain's prefix, or the true path's depth inside the tree."""
    depths = min(len(draft.rank), left)
    if method == "chain":
        wrong = np.flatnonzero(draft.rank[:depths] != 0)
        return int(wrong[0]) if len(wrong) else depths
    tree = build_tree(draft.logprob, draft.token, int(method.removeprefix("tree-")), topk_cap)
    here, depth = 0, 0
    while depth < depths:
        child = np.flatnonzero((tree.parent == here) & (tree.rank == draft.rank[depth]))
        if not len(child):
            break
        here, depth = int(child[0]) + 1, depth + 1
    return depth


def _move(
    state: dict[tuple[str, int], int], count: Count, name: str, row: int, at: int, accepted: int, left: int
) -> None:
    committed = min(accepted + 1, left)
    count.rounds += 1
    count.tokens += committed
    count.accepted.append(accepted)
    if committed >= left:
        del state[name, row]
    else:
        state[name, row] = at + committed


def _per_position(count: Count, depths: int) -> list[float]:
    accepted = np.array(count.accepted)
    return [round(float((accepted >= depth).mean()), 4) if len(accepted) else 0.0 for depth in range(1, depths + 1)]


class Offers:
    """Drafts at any place of a group of texts; the target runs over the group once."""

    def __init__(
        self, target: Decoder, drafter: DFlash, group: Sequence[Sample], cap: int, backend: str, anchors: int
    ) -> None:
        self.target, self.drafter, self.cap, self.backend, self.anchors = target, drafter, cap, backend, anchors
        self.device = target.embed.weight.device
        longest = max(len(ids) for ids, _ in group)
        length = -(-longest // 128) * 128 if backend == "flex" else longest
        ids = torch.zeros(len(group), length, dtype=torch.long)
        document = torch.full_like(ids, -1)
        for row, (tokens, _) in enumerate(group):
            ids[row, : len(tokens)] = torch.as_tensor(np.asarray(tokens, dtype=np.int64))
            document[row, : len(tokens)] = 0
        position = torch.arange(length).expand_as(ids)
        places = (ids, position, document, document == 0)
        self.batch = Batch(*(x.to(self.device) for x in places))
        _, self.taps_TX = target_pass(target, self.batch, drafter.config.target_layer_ids, backend)
        self.known: dict[tuple[int, int], Draft] = {}

    def fetch(self, wanted: set[tuple[int, int]]) -> None:
        """Drafts at (row, place) pairs that are not known yet."""
        missing = sorted(wanted - self.known.keys())
        while missing:
            index = torch.zeros(self.batch.ids.shape[0], self.anchors, dtype=torch.long)
            used = [0] * self.batch.ids.shape[0]
            placed, later = [], []
            for row, at in missing:
                if used[row] < self.anchors:
                    index[row, used[row]] = at
                    placed.append((row, at, used[row]))
                    used[row] += 1
                else:
                    later.append((row, at))
            valid = torch.arange(self.anchors) < torch.tensor(used)[:, None]
            self._run(index.to(self.device), valid.to(self.device), placed)
            missing = later

    def _run(self, index: Tensor, valid: Tensor, placed: Sequence[tuple[int, int, int]]) -> None:
        blocks = blocks_at(self.batch, self.drafter.config, index, valid, gamma=1.0)
        found = rank_drafts(self.drafter, self.target, self.taps_TX, self.batch, blocks, self.cap, self.backend)
        token, logprob, rank = (tensor.cpu().numpy() for tensor in found)
        for row, at, column in placed:
            self.known[row, at] = Draft(token[row, column], logprob[row, column], rank[row, column])
