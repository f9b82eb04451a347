# Owns: samples as they are stored (Corpus) and as they are trained on (Packed).
# Promises: what was saved loads alike; a sample stays whole in its row or is cut at the row's end.
# Never: writes text, needs a model or torch.
"""Training samples on disk and in rows. N: rows, S: places per row."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file


@dataclass(frozen=True)
class Corpus:
    """Samples end to end: sample i is tokens[offsets[i]:offsets[i+1]], its first prompt_len[i] tokens the prompt."""

    tokens: np.ndarray
    offsets: np.ndarray
    prompt_len: np.ndarray
    notes: dict[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.prompt_len)

    def sample(self, index: int) -> tuple[np.ndarray, int]:
        """Token ids and prompt length of one sample."""
        return self.tokens[self.offsets[index] : self.offsets[index + 1]], int(self.prompt_len[index])

    @classmethod
    def from_samples(cls, samples: Sequence[tuple[np.ndarray, int]], notes: dict[str, Any] | None = None) -> Corpus:
        """Joins (ids, prompt_len) pairs; uint16 where the ids allow it."""
        if not samples:
            raise ValueError("no training sample was written: give generation more time or more prompts")
        lengths = np.array([len(ids) for ids, _ in samples], dtype=np.int64)
        tokens = np.concatenate([ids for ids, _ in samples]).astype(np.int64)
        kind = np.uint16 if tokens.max() < 2**16 else np.uint32
        offsets = np.concatenate(([0], np.cumsum(lengths)))
        return cls(tokens.astype(kind), offsets, np.array([p for _, p in samples], dtype=np.int32), notes or {})

    def select(self, indices: Iterable[int]) -> Corpus:
        """The named samples, in that order."""
        return Corpus.from_samples([self.sample(i) for i in indices], self.notes)

    def split(self, num_held_out: int, seed: int = 0) -> tuple[Corpus, Corpus]:
        """Training and held-out parts by a seeded permutation."""
        order = np.random.default_rng(seed).permutation(len(self))
        return self.select(order[num_held_out:]), self.select(order[:num_held_out])

    def save(self, folder: Path, part_bytes: int = 14 << 20) -> list[Path]:
        """Writes corpus-000.safetensors and so on, each below about `part_bytes`; returns the paths."""
        folder.mkdir(parents=True, exist_ok=True)
        paths, first = [], 0
        while first < len(self):
            limit = self.offsets[first] + part_bytes // self.tokens.itemsize
            last = max(first + 1, int(np.searchsorted(self.offsets, limit, side="right")) - 1)
            base = self.offsets[first]
            arrays = {
                "tokens": self.tokens[base : self.offsets[last]],
                "offsets": self.offsets[first : last + 1] - base,
                "prompt_len": self.prompt_len[first:last],
            }
            paths.append(folder / f"corpus-{len(paths):03d}.safetensors")
            save_file(arrays, paths[-1], metadata={"notes": json.dumps(self.notes)})
            first = last
        return paths

    @classmethod
    def load(cls, folder: Path) -> Corpus:
        """Reads every corpus-*.safetensors of a folder; raises FileNotFoundError when there is none."""
        paths = sorted(folder.glob("corpus-*.safetensors"))
        if not paths:
            raise FileNotFoundError(f"no corpus-*.safetensors in {folder}: write the data first")
        parts: dict[str, list[np.ndarray]] = {"tokens": [], "lengths": [], "prompt_len": []}
        notes: dict[str, Any] = {}
        for path in paths:
            with safe_open(path, "numpy") as part:
                notes = json.loads((part.metadata() or {}).get("notes", "{}"))
                parts["tokens"].append(part.get_tensor("tokens"))
                parts["lengths"].append(np.diff(part.get_tensor("offsets")))
                parts["prompt_len"].append(part.get_tensor("prompt_len"))
        joined = {name: np.concatenate(arrays) for name, arrays in parts.items()}
        offsets = np.concatenate(([0], np.cumsum(joined["lengths"])))
        return cls(joined["tokens"], offsets, joined["prompt_len"], notes)


@dataclass(frozen=True)
class Packed:
    """Rows [N, S] of whole samples side by side: ids, position in the sample, sample number in the row (-1: padding),
    and whether the place may be an anchor (last prompt token up to the last but one)."""

    ids: np.ndarray
    position: np.ndarray
    document: np.ndarray
    anchor: np.ndarray


def pack(corpus: Corpus, row_len: int, seed: int) -> Packed:
    """Packs a shuffled corpus into rows, first fit over the last few open rows; longer samples are cut to the row."""
    order = np.random.default_rng(seed).permutation(len(corpus))
    rows: list[list[int]] = []
    free: list[int] = []
    window = 64
    lengths = np.minimum(np.diff(corpus.offsets), row_len)
    for index in order:
        need = int(lengths[index])
        for row in range(max(0, len(rows) - window), len(rows)):
            if free[row] >= need:
                rows[row].append(int(index))
                free[row] -= need
                break
        else:
            rows.append([int(index)])
            free.append(row_len - need)
    shape = (len(rows), row_len)
    packed = Packed(
        np.zeros(shape, np.int32), np.zeros(shape, np.int32), np.full(shape, -1, np.int32), np.zeros(shape, np.bool_)
    )
    for row, members in enumerate(rows):
        at = 0
        for number, index in enumerate(members):
            ids, prompt_len = corpus.sample(index)
            end = at + int(lengths[index])
            packed.ids[row, at:end] = ids[: end - at]
            packed.position[row, at:end] = np.arange(end - at)
            packed.document[row, at:end] = number
            packed.anchor[row, at + prompt_len - 1 : max(end - 1, at + prompt_len - 1)] = True
            at = end
    return packed
