# Owns: the training loop: recipe, schedule by time, master weights, checkpoints.
# Promises: a killed run resumes from its last checkpoint; progress goes through a callback, the memory plan first.
# Never: prints, touches the target's weights, falls back to a slower kernel by itself.
"""Teaching a DFlash drafter (arXiv 2602.06036) against a frozen target."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ratoon.core.config import ModelConfig
from ratoon.core.drafter import DrafterConfig, default_target_layer_ids
from ratoon.models.decoder import Decoder
from ratoon.models.dflash import DFlash
from ratoon.train.data import Corpus, Packed, pack
from ratoon.train.loss import BACKENDS, Batch, default_gamma, draw_blocks, step_loss

STATE, RECIPE = "state.pt", "recipe.json"
# What a resumed run may change: the rest would make it another run.
_FREE = {"minutes", "log_every", "checkpoint_seconds", "attention", "max_steps"}


@dataclass(frozen=True)
class Recipe:
    """Hyper-parameters of one run. `minutes` is the whole budget: the rate follows elapsed / budget."""

    minutes: float = 10.0
    block_size: int = 16
    layers: int = 5
    lr: float = 2e-3
    anchors: int = 128
    rows: int = 32
    row_len: int = 1024
    gamma: float | None = None
    warmup_steps: int = 100
    floor: float = 0.01
    weight_decay: float = 0.01
    beta2: float = 0.95
    clip: float = 1.0
    soft_labels: float = 0.0
    mask_token_id: int | None = None
    seed: int = 0
    attention: str = "explicit"
    chunk: int = 4096
    log_every: int = 20
    checkpoint_seconds: float = 60.0
    max_steps: int | None = None

    def __post_init__(self) -> None:
        if self.attention not in BACKENDS:
            raise ValueError(f"attention '{self.attention}' is unknown (known: {', '.join(BACKENDS)})")
        for name in ("minutes", "layers", "lr", "anchors", "rows", "row_len", "chunk"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        if self.block_size < 2:
            raise ValueError(f"block_size must be at least 2 (the anchor and one draft), got {self.block_size}")
        if self.anchors > self.row_len:
            raise ValueError(f"{self.anchors} anchors do not fit rows of {self.row_len} places")
        if not 0 <= self.soft_labels <= 1:
            raise ValueError(f"soft_labels must lie in 0..1, got {self.soft_labels}")

    @property
    def decay(self) -> float:
        """gamma of the slot weights."""
        return default_gamma(self.block_size) if self.gamma is None else self.gamma

    def rate(self, step: int, progress: float) -> float:
        """Learning rate: linear over the first `warmup_steps`, under a cosine over the budget down to `floor`.

        Warm-up counts steps, since the first of them may hold a minute of compilation.
        """
        turn = self.floor + (1.0 - self.floor) * 0.5 * (1.0 + math.cos(math.pi * min(1.0, progress)))
        return self.lr * turn * min(1.0, (step + 1) / max(self.warmup_steps, 1))


@dataclass(frozen=True)
class Event:
    """One report of a run: kind is 'plan', 'step', 'checkpoint' or 'end'."""

    kind: str
    step: int
    elapsed_s: float
    values: dict[str, Any] = field(default_factory=dict)


Report = Callable[[Event], None]


def drafter_config(target: ModelConfig, recipe: Recipe, mask_token_id: int) -> DrafterConfig:
    """A drafter in the target's own shape: same width, heads, head dim, RoPE and norm; default taps; full layers."""
    if not 0 <= mask_token_id < target.vocab_size:
        raise ValueError(f"mask_token_id must be below the vocabulary's {target.vocab_size}, got {mask_token_id}")
    taps = default_target_layer_ids(target.num_layers, recipe.layers)
    config = DrafterConfig(
        hidden_size=target.hidden_size,
        intermediate_size=target.intermediate_size,
        num_layers=recipe.layers,
        num_heads=target.num_heads,
        num_kv_heads=target.num_kv_heads,
        head_dim=target.head_dim,
        rms_norm_eps=target.rms_norm_eps,
        rope=replace(target.rope, original_max_position=target.rope.original_max_position or target.max_position),
        vocab_size=target.vocab_size,
        block_size=recipe.block_size,
        target_layer_ids=taps,
        mask_token_id=mask_token_id,
        windows=(None,) * recipe.layers,
        causal=(False,) * recipe.layers,
        num_target_layers=target.num_layers,
    )
    config.require_target(target.num_layers, target.hidden_size, target.vocab_size)
    return config


@torch.no_grad()
def initialise(drafter: DFlash, target: Decoder, seed: int) -> None:
    """N(0, 0.02), the two projections into the residual stream zero, the final norm the target's.

    A fresh drafter then repeats the block's embeddings through the target's own norm and head.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in drafter.named_parameters():
        if parameter.ndim == 1:
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            parameter.zero_()
        else:
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.02)
    drafter.norm.weight.copy_(target.norm.weight)


class Masters:
    """float32 copies of the drafter's weights under AdamW; the drafter itself stays in its compute dtype.

    What is trained is then exactly what is served: the rounded weights.
    """

    def __init__(self, drafter: DFlash, recipe: Recipe) -> None:
        self.names = [name for name, _ in drafter.named_parameters()]
        self.live = [parameter.requires_grad_(True) for parameter in drafter.parameters()]
        self.copies = [parameter.detach().float().clone() for parameter in self.live]
        decayed = [copy for copy in self.copies if copy.ndim > 1]
        plain = [copy for copy in self.copies if copy.ndim <= 1]
        groups = [{"params": decayed, "weight_decay": recipe.weight_decay}, {"params": plain, "weight_decay": 0.0}]
        self.clip = recipe.clip
        self.skipped = torch.zeros((), dtype=torch.int64, device=self.live[0].device)
        self.optimiser = torch.optim.AdamW(groups, lr=recipe.lr, betas=(0.9, recipe.beta2), fused=self.live[0].is_cuda)

    @torch.no_grad()
    def step(self, rate: float) -> Tensor:
        """Clips, updates, writes the rounded weights back; returns the gradient norm (a device scalar)."""
        for copy, parameter in zip(self.copies, self.live, strict=True):
            assert parameter.grad is not None
            copy.grad = parameter.grad.float()
            parameter.grad = None
        norm = torch.nn.utils.clip_grad_norm_(self.copies, self.clip)
        # One bad batch must not end a run: its gradient counts as zero, and it is counted.
        finite = torch.isfinite(norm)
        for copy in self.copies:
            assert copy.grad is not None
            copy.grad = torch.where(finite, copy.grad, 0.0)
        self.skipped += ~finite
        for group in self.optimiser.param_groups:
            group["lr"] = rate
        self.optimiser.step()
        for copy, parameter in zip(self.copies, self.live, strict=True):
            parameter.copy_(copy)
        return norm

    def state(self) -> dict[str, Any]:
        """Everything a resumed run needs, on the CPU side of torch.save."""
        return {"weights": dict(zip(self.names, self.copies, strict=True)), "optimiser": self.optimiser.state_dict()}

    @torch.no_grad()
    def restore(self, state: dict[str, Any]) -> None:
        """Takes a saved state; raises ValueError when it belongs to another drafter."""
        if set(state["weights"]) != set(self.names):
            raise ValueError("the checkpoint holds other weights than this drafter: resume with the same --layers")
        for name, copy, parameter in zip(self.names, self.copies, self.live, strict=True):
            copy.copy_(state["weights"][name])
            parameter.data.copy_(copy)
        self.optimiser.load_state_dict(state["optimiser"])


def memory_plan(target: ModelConfig, recipe: Recipe, compute_bytes: int) -> dict[str, int]:
    """Estimated device bytes of a step, by part."""
    context, blocks = recipe.rows * recipe.row_len, recipe.rows * recipe.anchors * recipe.block_size
    hidden, wide = target.hidden_size, target.intermediate_size
    heads = target.num_heads * target.head_dim + 2 * target.num_kv_heads * target.head_dim
    per_layer = 2 * hidden * hidden + hidden * heads + 3 * hidden * wide
    weights = recipe.layers * per_layer + (recipe.layers + 1) * hidden * hidden
    keys = context + recipe.anchors * recipe.rows * recipe.block_size
    masks = 0 if recipe.attention == "flex" else recipe.anchors * recipe.block_size * keys
    return {
        "target weights": compute_bytes * (target.vocab_size * hidden + target.num_layers * per_layer),
        "drafter weights, masters and AdamW": weights * (compute_bytes * 2 + 16),
        "taps and context K/V": compute_bytes * context * (recipe.layers * hidden + recipe.layers * heads),
        "block activations": compute_bytes * blocks * recipe.layers * (8 * hidden + 4 * heads + 4 * wide),
        "head chunk": recipe.chunk * target.vocab_size * (4 * 4 if recipe.attention != "flex" else 2 * compute_bytes),
        "masks": masks,
    }


class Feeder:
    """Endless batches of packed rows; every pass over the corpus is shuffled and packed anew."""

    def __init__(self, corpus: Corpus, recipe: Recipe, device: torch.device, epoch: int = 0) -> None:
        self.corpus, self.recipe, self.device, self.epoch = corpus, recipe, device, epoch

    def __iter__(self) -> Iterator[Batch]:
        while True:
            packed = pack(self.corpus, self.recipe.row_len, self.recipe.seed + self.epoch)
            yield from self._pass(packed)
            self.epoch += 1

    def _pass(self, packed: Packed) -> Iterator[Batch]:
        rows, size = len(packed.ids), self.recipe.rows
        on_device = [torch.from_numpy(x).to(self.device) for x in (packed.ids, packed.position, packed.document)]
        anchor = torch.from_numpy(packed.anchor).to(self.device)
        # A corpus smaller than a batch is repeated: shapes stay those of the recipe.
        for first in range(0, max(rows - size + 1, 1), size):
            pick = torch.arange(first, first + size, device=self.device) % rows
            ids, position, document = (x[pick].long() for x in on_device)
            yield Batch(ids, position, document, anchor[pick])


class Run:
    """One training run over its directory: recipe.json, config.json and state.pt live there."""

    def __init__(self, target: Decoder, recipe: Recipe, mask_token_id: int, out: Path | None, report: Report) -> None:
        self.target, self.recipe, self.out, self.report = target, recipe, out, report
        weight = target.embed.weight
        self.device, self.dtype = weight.device, weight.dtype
        config = drafter_config(target.config, recipe, mask_token_id)
        self.drafter = DFlash(config).to(device=self.device, dtype=self.dtype)
        initialise(self.drafter, target, recipe.seed)
        self.masters = Masters(self.drafter, recipe)
        self.step, self.elapsed, self.epoch, self.loss = 0, 0.0, 0, float("nan")

    def resume(self, folder: Path) -> None:
        """Continues from a folder's state; raises FileNotFoundError, or ValueError naming a setting that differs."""
        if not (folder / STATE).is_file():
            raise FileNotFoundError(f"nothing to resume: no {STATE} in {folder}")
        saved = json.loads((folder / RECIPE).read_text(encoding="utf-8"))
        present = asdict(self.recipe)
        different = sorted(key for key in present if key not in _FREE and present[key] != saved.get(key))
        if different:
            name = different[0]
            raise ValueError(f"resume with the run's own settings: {name} was {saved.get(name)}, not {present[name]}")
        state = torch.load(folder / STATE, map_location=self.device, weights_only=True)
        self.masters.restore(state)
        self.step, self.elapsed, self.epoch = state["step"], state["elapsed"], state["epoch"] + 1

    def save(self) -> None:
        """Writes the state beside the old one and then in its place: a kill leaves one whole file."""
        if self.out is None:
            return
        self.out.mkdir(parents=True, exist_ok=True)
        (self.out / RECIPE).write_text(json.dumps(asdict(self.recipe), indent=1), encoding="utf-8")
        (self.out / "config.json").write_text(json.dumps(self.drafter.config.to_hf(), indent=1), encoding="utf-8")
        state = {**self.masters.state(), "step": self.step, "elapsed": self.elapsed, "epoch": self.epoch}
        partial = self.out / (STATE + ".partial")
        torch.save(state, partial)
        os.replace(partial, self.out / STATE)
        self._tell("checkpoint", {})

    def master_drafter(self) -> DFlash:
        """A float32 copy with the master weights: they quantise better than their rounded copies."""
        wide = DFlash(self.drafter.config).to(self.device)
        for parameter, copy in zip(wide.parameters(), self.masters.copies, strict=True):
            parameter.data.copy_(copy)
        return wide

    def _tell(self, kind: str, values: dict[str, Any]) -> None:
        self.report(Event(kind, self.step, self.elapsed, values))

    def go(self, corpus: Corpus, seconds: float | None = None) -> DFlash:
        """Trains until the budget (or `seconds` of this call, or max_steps) is spent; saves and returns the drafter."""
        recipe, budget = self.recipe, self.recipe.minutes * 60.0
        bytes_each = torch.finfo(self.dtype).bits // 8
        self._tell("plan", memory_plan(self.target.config, recipe, bytes_each))
        torch.manual_seed(recipe.seed + self.step)
        feeder = Feeder(corpus, recipe, self.device, self.epoch)
        begun, before = time.monotonic(), self.elapsed
        saved = begun
        for batch in feeder:
            now = time.monotonic()
            self.elapsed, self.epoch = before + now - begun, feeder.epoch
            if self._over(budget, seconds, now - begun):
                break
            if now - saved > recipe.checkpoint_seconds:
                self.save()
                saved = time.monotonic()
            self._one(batch, self.elapsed / budget)
        self.save()
        self._tell("end", {"loss": self.loss, "skipped_steps": int(self.masters.skipped)})
        return self.drafter

    def _over(self, budget: float, seconds: float | None, here: float) -> bool:
        if self.recipe.max_steps is not None and self.step >= self.recipe.max_steps:
            return True
        return self.elapsed >= budget or (seconds is not None and here >= seconds)

    def _one(self, batch: Batch, progress: float) -> None:
        recipe = self.recipe
        if recipe.max_steps is not None:
            progress = self.step / recipe.max_steps
        blocks = draw_blocks(batch, self.drafter.config, recipe.anchors, recipe.decay)
        loss, hits = step_loss(
            self.drafter,
            self.target,
            batch,
            blocks,
            backend=recipe.attention,
            chunk=recipe.chunk,
            soft_labels=recipe.soft_labels,
        )
        loss.backward()
        rate = recipe.rate(self.step, progress)
        norm = self.masters.step(rate)
        self.step += 1
        if self.step % recipe.log_every == 0 or self.step == 1:
            # The one host read of the loop: it also keeps the launch queue short.
            self.loss = float(loss.detach())
            values = {"loss": self.loss, "rate": rate, "norm": float(norm)}
            self._tell("step", {**values, "hits": [round(hit, 3) for hit in hits.tolist()]})


def train(
    target: Decoder,
    corpus: Corpus,
    recipe: Recipe,
    mask_token_id: int,
    *,
    out: Path | None = None,
    resume: Path | None = None,
    seconds: float | None = None,
    report: Report = lambda event: None,
) -> Run:
    """Trains a drafter for `target` on its own text and returns the finished run (`run.drafter`).

    The target's device and dtype are the run's. Checkpoints go to `out`; `resume` continues such a folder.
    Raises FileNotFoundError or ValueError for a folder that does not fit.
    """
    run = Run(target, recipe, mask_token_id, out, report)
    if resume is not None:
        run.resume(resume)
    run.go(corpus, seconds)
    return run
