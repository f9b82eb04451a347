# Owns: the checks of checkpoints as files: shards, index, sizes, names, and whom a drafter was made for.
# Promises: reads headers and configs only; a damaged file is named.
# Never: loads a weight.
"""Checks that come before anything is loaded."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ratoon.core.config import ModelConfig
from ratoon.core.drafter import DrafterConfig
from ratoon.lab.doctor.check import Check, judged

_INDEX = "model.safetensors.index.json"
_FETCH = "fetch it again (`ratoon pull`)"
_COMMIT = re.compile(r"[0-9a-f]{40}")


def check_checkpoint(name: str, path: Path, is_target: bool) -> Check:
    """Every file that the checkpoint needs is there and whole."""
    faults = _folder_faults(path, is_target) if path.is_dir() else _gguf_faults(path)
    size = sum(file.stat().st_size for file in (path.iterdir() if path.is_dir() else (path,)) if file.is_file())
    return judged(
        name, not faults, "; ".join(faults) or f"{path.name}: {size / 1e9:.2f} GB", "every file whole", _FETCH
    )


def _gguf_faults(path: Path) -> list[str]:
    from ratoon.models.gguf import open_gguf

    try:
        open_gguf(path)
    except (ValueError, FileNotFoundError) as error:
        return [str(error)]
    return []


def _folder_faults(folder: Path, is_target: bool) -> list[str]:
    needed = ("config.json", "tokenizer.json") if is_target else ("config.json",)
    faults = [f"no {name}" for name in needed if not (folder / name).is_file()]
    index = folder / _INDEX
    named: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"] if index.is_file() else {}
    shards = sorted(set(named.values())) or ["model.safetensors"]
    found: dict[str, list[str]] = {}
    for shard in shards:
        if not (folder / shard).is_file():
            faults.append(f"no {shard}")
            continue
        names, fault = read_header(folder / shard)
        faults += [fault] if fault else []
        for name in names:
            found.setdefault(name, []).append(shard)
    faults += [f"{name} lies in {' and '.join(at)}" for name, at in found.items() if len(at) > 1]
    if not faults:
        faults += [f"{name} is not in {shard}, as {_INDEX} says" for name, shard in named.items() if name not in found]
    return faults[:5]


def read_header(file: Path) -> tuple[list[str], str | None]:
    """Tensor names of a safetensors file, and what is wrong with its size."""
    size = file.stat().st_size
    with file.open("rb") as opened:
        head = opened.read(8)
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else size
        if 8 + length > size:
            return [], f"{file.name} is cut short within its header"
        try:
            header = json.loads(opened.read(length))
        except ValueError:
            return [], f"{file.name} has a damaged header"
    tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
    end = 8 + length + max((entry["data_offsets"][1] for entry in tensors.values()), default=0)
    fault = None if end == size else f"{file.name} has {size} bytes, its header says {end}"
    return list(tensors), fault


def check_made_for(target: ModelConfig, drafter: DrafterConfig, record: Mapping[str, Any], path: Path) -> Check:
    """The drafter fits this target, and its provenance names no other revision of it."""
    expected = "a drafter that was made for this target"
    try:
        drafter.require_target(target.num_layers, target.hidden_size, target.vocab_size)
    except ValueError as error:
        return Check("made for", "fail", str(error), expected, "use the drafter of this model, or train one")
    revision, wanted = revision_of(path), record.get("target_revision")
    fits = f"layers, hidden size and vocabulary fit; made for {record.get('target', 'a target that is not recorded')}"
    if wanted and revision and wanted != revision:
        seen = f"made for revision {wanted}, the target is {revision}"
        return Check("made for", "warn", seen, expected, f"pull the target at revision {wanted}")
    said = f", revision {wanted}" if wanted else ", no revision recorded"
    return Check("made for", "ok", fits + said, expected)


def revision_of(path: Path | str) -> str | None:
    """The commit of a pulled target, None for any other file or folder."""
    name = Path(path).name
    return name if _COMMIT.fullmatch(name) else None


def read_provenance(folder: Path) -> dict[str, Any]:
    """The drafter's provenance.json, {} where there is none."""
    file = folder / "provenance.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
