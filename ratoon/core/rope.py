# Owns: what a checkpoint says about rotary position embedding, read or refused.
# Promises: every key that changes the angles or the amplitude ends in a field here.
# Never: computes an angle (ops/fused.py does).
"""Rotary embedding settings of a checkpoint."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

KINDS = ("default", "linear", "llama3", "yarn")
_READ = {
    "default": set(),
    "linear": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
    "yarn": {
        "factor",
        "original_max_position_embeddings",
        "beta_fast",
        "beta_slow",
        "attention_factor",
        "mscale",
        "mscale_all_dim",
        "truncate",
    },
}


@dataclass(frozen=True)
class RopeConfig:
    """Half-split RoPE over the whole head. `amplitude` multiplies cos and sin (YaRN)."""

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    amplitude: float = 1.0

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> RopeConfig:
        """Reads `rope_theta` + `rope_scaling`, or `rope_parameters`.

        Raises ValueError naming the key for a scaling that we do not compute.
        """
        parameters = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
        theta = float(parameters.pop("rope_theta", config.get("rope_theta", 10000.0)))
        kind = parameters.pop("rope_type", None) or parameters.pop("type", None) or "default"
        parameters.pop("type", None)
        if parameters.pop("partial_rotary_factor", 1.0) != 1.0 or config.get("partial_rotary_factor", 1.0) != 1.0:
            raise ValueError("partial_rotary_factor is not supported: RoPE must cover the whole head")
        if kind not in KINDS:
            raise ValueError(f"rope scaling '{kind}' is not supported (known: {', '.join(KINDS)})")
        unknown = set(parameters) - _READ[kind]
        if unknown:
            raise ValueError(f"rope scaling '{kind}' has keys that nobody reads: {sorted(unknown)}")
        original = parameters.get("original_max_position_embeddings") or config.get(
            "original_max_position_embeddings", config.get("max_position_embeddings", 0)
        )
        return cls(
            theta=theta,
            kind=kind,
            factor=float(parameters.get("factor", 1.0)),
            original_max_position=int(original),
            low_freq_factor=float(parameters.get("low_freq_factor", 1.0)),
            high_freq_factor=float(parameters.get("high_freq_factor", 4.0)),
            beta_fast=float(parameters.get("beta_fast") or 32.0),
            beta_slow=float(parameters.get("beta_slow") or 1.0),
            truncate=bool(parameters.get("truncate", True)),
            amplitude=_amplitude(kind, parameters),
        )


def _amplitude(kind: str, parameters: Mapping[str, Any]) -> float:
    """Factor on cos and sin. An explicit `attention_factor` wins (public transformers convention)."""
    if kind != "yarn":
        return 1.0
    if parameters.get("attention_factor") is not None:
        return float(parameters["attention_factor"])
    factor = float(parameters.get("factor", 1.0))
    mscale, mscale_all = parameters.get("mscale"), parameters.get("mscale_all_dim")
    if mscale and mscale_all:
        return _mscale(factor, float(mscale)) / _mscale(factor, float(mscale_all))
    return _mscale(factor, 1.0)


def _mscale(factor: float, scale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0
