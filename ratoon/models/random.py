# Owns: networks of a true shape with random weights, for measuring without a checkpoint.
# Promises: weights are made where they stay, in their final dtype, the same for a seed and device.
# Never: reads a tensor file.
"""Random weights: normal with standard deviation 0.02, norms one."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from ratoon.core.config import ModelConfig
from ratoon.core.drafter import DrafterConfig
from ratoon.models.decoder import Decoder
from ratoon.models.dflash import DFlash
from ratoon.models.layers import RMSNorm
from ratoon.models.weights import _build, read_json

STD = 0.02


def target_shape(path: Path | str) -> ModelConfig:
    """A target's shape from a Hugging Face config: a .json file, or a directory with config.json.

    Raises FileNotFoundError, or ValueError for what is not supported.
    """
    return ModelConfig.from_hf(read_json(_config_file(path)))


def drafter_shape(path: Path | str) -> DrafterConfig:
    """A z-lab DFlash drafter's shape, from the same places."""
    return DrafterConfig.from_hf(read_json(_config_file(path)))


def random_decoder(config: ModelConfig, dtype: torch.dtype, device: torch.device | str, seed: int = 0) -> Decoder:
    """A target with random weights."""
    target = _build(lambda: Decoder(config), dtype, device)
    randomise(target, seed)
    return target


def random_drafter(config: DrafterConfig, dtype: torch.dtype, device: torch.device | str, seed: int = 0) -> DFlash:
    """A drafter with random weights, ready to serve; `config.require_target` is the caller's."""
    drafter = _build(lambda: DFlash(config), dtype, device)
    randomise(drafter, seed)
    drafter.stack_context()
    return drafter


def randomise(network: nn.Module, seed: int) -> None:
    """Fills every parameter in place: ones in norms, normal noise elsewhere."""
    generator = None
    with torch.no_grad():
        for module in network.modules():
            for parameter in module.parameters(recurse=False):
                if isinstance(module, RMSNorm):
                    parameter.fill_(1.0)
                    continue
                if generator is None:
                    generator = torch.Generator(parameter.device).manual_seed(seed)
                parameter.normal_(0.0, STD, generator=generator)


def _config_file(path: Path | str) -> Path:
    path = Path(path)
    return path / "config.json" if path.is_dir() else path
