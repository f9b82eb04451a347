# Owns: writing a trained drafter: the z-lab layout in bfloat16, its 8-bit form, and where it came from.
# Promises: load_drafter reads back what is written here; files appear whole or not at all.
# Never: trains, evaluates.
"""Export of a DFlash drafter."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from ratoon.models.dflash import DFlash
from ratoon.models.weights import DRAFTER_RULES, INT8_QUANTIZATION, expand

PROVENANCE = "provenance.json"


def checkpoint_tensors(drafter: DFlash) -> dict[str, Tensor]:
    """The drafter's weights under their z-lab names, q, k, v, gate and up apart again."""
    config = drafter.config
    q, kv, wide = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim, config.intermediate_size
    parts = {
        "q": slice(0, q),
        "k": slice(q, q + kv),
        "v": slice(q + kv, q + 2 * kv),
        "gate": slice(0, wide),
        "up": slice(wide, 2 * wide),
    }
    slots = expand(drafter, DRAFTER_RULES)
    return {
        name: (parameter.detach() if part is None else parameter.detach()[parts[part]]).cpu()
        for name, (parameter, part) in slots.items()
    }


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """int8 values and their float32 scale per output row [out, 1]; symmetric, the row's largest value is 127."""
    weight = weight.float()
    scale = (weight.abs().amax(1, keepdim=True) / 127.0).clamp(min=1e-12)
    return (weight / scale).round().clamp(-127, 127).to(torch.int8), scale


def export_drafter(
    drafter: DFlash,
    folder: Path,
    provenance: Mapping[str, Any],
    *,
    weights: Mapping[str, Tensor] | None = None,
    int8: bool = False,
) -> Path:
    """Writes config.json, model.safetensors and provenance.json; returns the folder.

    Plain weights are bfloat16; with `int8` every matrix is 8-bit with per-channel scales (compressed-tensors names)
    and norms stay bfloat16. `weights` (z-lab names) replaces the drafter's own: float32 masters quantise better than
    their rounded copies.
    """
    tensors: dict[str, Tensor] = {}
    for name, tensor in (weights or checkpoint_tensors(drafter)).items():
        if int8 and tensor.ndim == 2:
            tensors[name], tensors[f"{name}_scale"] = quantise(tensor)
        else:
            tensors[name] = tensor.to(torch.bfloat16).contiguous()
    config = drafter.config.to_hf()
    config["dtype"] = "bfloat16"
    if int8:
        config["quantization_config"] = INT8_QUANTIZATION
    folder.mkdir(parents=True, exist_ok=True)
    _replace(folder / "model.safetensors", lambda path: save_file(tensors, path, metadata={"format": "pt"}))
    _replace(folder / "config.json", lambda path: path.write_text(json.dumps(config, indent=2) + "\n", "utf-8"))
    record = {**provenance, "versions": versions(), "format": "int8 per channel" if int8 else "bfloat16"}
    _replace(folder / PROVENANCE, lambda path: path.write_text(json.dumps(record, indent=2) + "\n", "utf-8"))
    return folder


def versions() -> dict[str, str]:
    """Versions that a provenance file records."""
    return {"torch": torch.__version__, "python": platform.python_version(), "cuda": str(torch.version.cuda)}


def _replace(path: Path, write: Any) -> None:
    partial = path.with_name(path.name + ".partial")
    write(partial)
    os.replace(partial, path)
