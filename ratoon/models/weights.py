# Owns: which checkpoint tensor fills which parameter (one table per network), and the files that hold them.
# Promises: every tensor is used once or ignored for a stated reason, every parameter row is filled once.
# Never: runs code of a checkpoint, unpickles beyond tensors, guesses at a shape.
"""Loading targets and drafters. Names on the left are Hugging Face's and z-lab's, on the right our fused ones."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from ratoon.core.config import ModelConfig
from ratoon.core.drafter import DrafterConfig
from ratoon.models.decoder import Decoder
from ratoon.models.dflash import DFlash
from ratoon.models.gguf import open_gguf

Net = TypeVar("Net", bound=nn.Module)
_KINDS = ("weight", "bias")


@dataclass(frozen=True)
class Rule:
    """`source` fills `parameter`, or only its rows `part`; `*` stands for the same layer number on both sides."""

    source: str
    parameter: str
    part: str | None = None


def _layer_rules(prefix: str) -> tuple[Rule, ...]:
    """The layer of a decoder; drafters use the same names without a prefix. A bias exists where its parameter does."""
    attention, mlp = "layers.*.self_attn", "layers.*.mlp"
    fused = [Rule(f"{attention}.{p}_proj.{kind}", f"{attention}.qkv_proj.{kind}", p) for p in "qkv" for kind in _KINDS]
    fused += [Rule(f"{mlp}.{p}_proj.weight", f"{mlp}.gate_up_proj.weight", p) for p in ("gate", "up")]
    plain = [f"{attention}.o_proj.{kind}" for kind in _KINDS]
    plain += [f"{attention}.{norm}.weight" for norm in ("q_norm", "k_norm")]
    plain += [f"layers.*.{norm}.weight" for norm in ("input_layernorm", "post_attention_layernorm")]
    rules = fused + [Rule(name, name) for name in (*plain, f"{mlp}.down_proj.weight")]
    return tuple(Rule(prefix + rule.source, rule.parameter, rule.part) for rule in rules)


TARGET_RULES = (
    Rule("model.embed_tokens.weight", "embed.weight"),
    Rule("model.norm.weight", "norm.weight"),
    Rule("lm_head.weight", "head.weight"),
    *_layer_rules("model."),
)
DRAFTER_RULES = (
    *(Rule(name, name) for name in ("fc.weight", "hidden_norm.weight", "norm.weight")),
    *_layer_rules(""),
)
_IGNORED = {
    r"(.*\.)?rotary_emb\.inv_freq": "recomputed from the config",
    r"lm_head\.weight": "only a tied model has no parameter for it, and there it repeats the embedding",
}

# What `load_drafter` dequantises and exporters write: 8-bit symmetric weights, one scale per output row.
INT8_QUANTIZATION: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"},
            "input_activations": None,
            "output_activations": None,
        }
    },
    "ignore": [],
}


def load_config(path: Path) -> ModelConfig:
    """The target's config from a model directory or a .gguf file; raises as `load_model` does."""
    if path.is_dir():
        generation = path / "generation_config.json"
        settings = read_json(generation) if generation.exists() else {}
        return ModelConfig.from_hf(read_json(path / "config.json"), settings)
    return open_gguf(path).config()


def load_model(path: Path | str, dtype: torch.dtype, device: torch.device | str = "cpu") -> Decoder:
    """A target from a Hugging Face directory (safetensors) or a .gguf file.

    Raises FileNotFoundError for a missing file or shard, ValueError for everything that does not fit.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"no such model: {path}")
    config = load_config(path)
    tensors = _read_folder(path) if path.is_dir() else open_gguf(path).tensors()
    model = _build(lambda: Decoder(config), dtype, device)
    fill(model, TARGET_RULES, _parts(config), _unquantised(tensors), _IGNORED, path.name)
    return model


def load_drafter(path: Path | str, dtype: torch.dtype, device: torch.device | str, target: ModelConfig) -> DFlash:
    """A z-lab DFlash checkpoint directory for `target`, plain or with 8-bit weights (INT8_QUANTIZATION).

    Raises FileNotFoundError for a missing file, ValueError naming what does not fit this target or this format.
    """
    path = Path(path)
    raw = read_json(path / "config.json")
    config = DrafterConfig.from_hf(raw)
    config.require_target(target.num_layers, target.hidden_size, target.vocab_size)
    tensors = _read_folder(path)
    if raw.get("quantization_config"):
        _check_int8(raw["quantization_config"])
        tensors = _dequantised(dict(tensors))
    drafter = _build(lambda: DFlash(config), dtype, device)
    fill(drafter, DRAFTER_RULES, _parts(config), _checked_fc(_unquantised(tensors), config), {}, path.name)
    if (path / "mask_embedding.pt").exists():
        drafter.set_mask_embedding(_read_mask_embedding(path / "mask_embedding.pt"))
    drafter.stack_context()
    return drafter


def fill(
    module: nn.Module,
    rules: Iterable[Rule],
    parts: Mapping[str, slice],
    tensors: Iterable[tuple[str, Tensor]],
    ignored: Mapping[str, str],
    where: str,
) -> None:
    """Copies every tensor into its parameter (dtype and device of the parameter).

    `ignored` maps a pattern of tensor names to the reason. Raises ValueError for a tensor that has no place or comes
    twice, a shape mismatch, and parameters left unfilled.
    """
    open_slots, done = expand(module, rules), set()
    for name, tensor in tensors:
        if name in done:
            raise ValueError(f"{where}: tensor {name} appears twice")
        if name not in open_slots:
            if any(re.fullmatch(pattern, name) for pattern in ignored):
                continue
            raise ValueError(f"{where}: unused tensor {name} {list(tensor.shape)}: this network has no place for it")
        parameter, part = open_slots.pop(name)
        done.add(name)
        into = parameter.data if part is None else parameter.data[parts[part]]
        if into.shape != tensor.shape:
            raise ValueError(
                f"{where}: tensor {name} has shape {list(tensor.shape)}, the config asks for {list(into.shape)}"
            )
        into.copy_(tensor)
    if open_slots:
        names = sorted(open_slots)
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        raise ValueError(f"{where}: missing tensor {', '.join(names[:3])}{more}")


def expand(module: nn.Module, rules: Iterable[Rule]) -> dict[str, tuple[nn.Parameter, str | None]]:
    """Checkpoint name -> (parameter, part) for every parameter of the module. A parameter without a rule is a bug."""
    by_parameter: dict[str, list[Rule]] = {}
    for rule in rules:
        by_parameter.setdefault(rule.parameter, []).append(rule)
    slots: dict[str, tuple[nn.Parameter, str | None]] = {}
    for name, parameter in module.named_parameters():
        layer = re.search(r"(?<=layers\.)\d+", name)
        number = layer[0] if layer else ""
        pattern = re.sub(r"(?<=layers\.)\d+", "*", name)
        assert pattern in by_parameter, f"no rule fills {name}"
        for rule in by_parameter[pattern]:
            slots[rule.source.replace("*", number)] = (parameter, rule.part)
    return slots


def _parts(config: ModelConfig | DrafterConfig) -> dict[str, slice]:
    """Rows of the fused parameters, in the order that models/layers.py and the attentions read."""
    q, kv, wide = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim, config.intermediate_size
    return {
        "q": slice(0, q),
        "k": slice(q, q + kv),
        "v": slice(q + kv, q + 2 * kv),
        "gate": slice(0, wide),
        "up": slice(wide, 2 * wide),
    }


def _build(make: Callable[[], Net], dtype: torch.dtype, device: torch.device | str) -> Net:
    """Makes the network at once in its final dtype and place: a float32 copy of a large model may not fit."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            return make().eval()
    finally:
        torch.set_default_dtype(before)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; raises FileNotFoundError, or ValueError naming the file."""
    if not path.is_file():
        raise FileNotFoundError(f"no {path.name} in {path.parent}")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error


def _read_folder(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a directory's safetensors files, one at a time."""
    for file in _safetensors_files(folder):
        with _open_safetensors(file) as opened:
            for name in opened.keys():  # noqa: SIM118 (the handle is no mapping)
                yield name, opened.get_tensor(name)


def _safetensors_files(folder: Path) -> list[Path]:
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index.exists():
        shards = sorted(set(read_json(index).get("weight_map", {}).values()))
        missing = [shard for shard in shards if not (folder / shard).is_file()]
        if missing:
            names = ", ".join(missing)
            raise FileNotFoundError(f"{folder}: missing shard {names} named by {index.name}: fetch it again")
        return [folder / shard for shard in shards]
    if single.exists():
        return [single]
    others = sorted(file.name for suffix in ("*.bin", "*.pt", "*.pth") for file in folder.glob(suffix))
    hint = f" (found {', '.join(others)}: pickled weights are not read, convert them to safetensors)" if others else ""
    raise FileNotFoundError(f"no model.safetensors in {folder}{hint}")


@contextlib.contextmanager
def _open_safetensors(file: Path) -> Iterator[Any]:
    try:
        opened = safe_open(file, framework="pt")
    except SafetensorError as error:
        raise ValueError(f"{file} is cut short or no safetensors file, fetch it again ({error})") from error
    with opened as handle:
        yield handle


def _unquantised(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Passes tensors of 16 bits and more; raises ValueError for the first that holds quantised values."""
    for name, tensor in tensors:
        if not tensor.is_floating_point() or tensor.element_size() < 2:
            raise ValueError(f"tensor {name} has dtype {tensor.dtype}: quantised weights not supported here")
        yield name, tensor


def _checked_fc(tensors: Iterable[tuple[str, Tensor]], config: DrafterConfig) -> Iterator[tuple[str, Tensor]]:
    """Says what a wrong `fc` means, since its width is the only trace of how many layers were tapped."""
    for name, tensor in tensors:
        if name == "fc.weight" and tensor.ndim == 2 and tensor.shape[1] != config.tap_size:
            raise ValueError(
                f"fc.weight takes {tensor.shape[1]} features, but {len(config.target_layer_ids)} taps "
                f"(target_layer_ids) of hidden_size {config.hidden_size} give {config.tap_size}"
            )
        yield name, tensor


def _check_int8(settings: Mapping[str, Any]) -> None:
    """Refuses, by name, a quantisation other than INT8_QUANTIZATION's kind."""
    method, form = settings.get("quant_method"), settings.get("format")
    if method != "compressed-tensors" or form != "int-quantized":
        raise ValueError(f"drafter quantised with '{method}' (format '{form}') not supported, only 8-bit int-quantized")
    expected = INT8_QUANTIZATION["config_groups"]["group_0"]["weights"]
    groups = settings.get("config_groups")
    if not groups:
        raise ValueError("the drafter's quantization_config has no config_groups: its number format is not stated")
    for group in groups.values():
        weights = group.get("weights") or {}
        wrong = {key: weights.get(key) for key, value in expected.items() if weights.get(key) != value}
        if wrong or group.get("input_activations"):
            raise ValueError(
                f"drafter quantisation not supported: {wrong or 'input_activations'}; "
                "needs 8-bit symmetric int weights per channel and plain activations"
            )


def _dequantised(tensors: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Turns each int8 `X.weight` [out, in] with its `X.weight_scale` [out, 1] into one float32 tensor."""
    for name, tensor in tensors.items():
        if name.endswith(".weight_scale"):
            if tensors.get(name.removesuffix("_scale"), tensor).dtype != torch.int8:
                raise ValueError(f"unused tensor {name}: there is no int8 {name.removesuffix('_scale')}")
            continue
        if tensor.dtype == torch.int8:
            scale = tensors.get(f"{name}_scale")
            if scale is None:
                raise ValueError(f"missing tensor {name}_scale: {name} is int8")
            if list(scale.shape) != [tensor.shape[0], 1]:
                raise ValueError(f"tensor {name}_scale has shape {list(scale.shape)}, not [{tensor.shape[0]}, 1]")
            tensor = tensor.float() * scale.float()
        yield name, tensor


def _read_mask_embedding(file: Path) -> Tensor:
    """The learned mask row, bare or under one name of a dict; unpickles tensors only."""
    try:
        loaded = torch.load(file, map_location="cpu", weights_only=True)
    except (UnpicklingError, RuntimeError, EOFError) as error:
        raise ValueError(f"{file} is not a plain torch tensor: {str(error).splitlines()[0]}") from error
    if isinstance(loaded, Mapping) and len(loaded) == 1:
        loaded = next(iter(loaded.values()))
    if not isinstance(loaded, Tensor) or not loaded.is_floating_point():
        raise ValueError(f"{file} holds {type(loaded).__name__}, expected one tensor [hidden]")
    return loaded
