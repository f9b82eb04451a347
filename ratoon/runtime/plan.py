# Owns: what lies in the device's memory, in bytes, and how many pages of K/V fit.
# Promises: a model that cannot serve one row is refused before a cache is allocated, with the numbers and the remedy.
# Never: allocates.
"""The memory plan."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace

import torch
from torch import nn

from ratoon.core.config import ModelConfig
from ratoon.core.drafter import DrafterConfig
from ratoon.runtime.buffers import BufferSpec
from ratoon.spec.state import Limits, RoundShape

GRAPH_BYTES = 12 << 20
"""Of one captured round beside its activations: an estimate until it is measured."""
_LOGIT_COPIES = 4


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes. weights and drafter_weights are counted on the loaded networks, pages and buffers by their shapes;
    logits (scratch of the head) and graphs (their pool) are estimates."""

    weights: int
    drafter_weights: int
    pages: int
    drafter_pages: int
    buffers: int
    logits: int
    graphs: int

    @property
    def total(self) -> int:
        return sum(asdict(self).values())

    @property
    def beside_pages(self) -> int:
        """What is yet to be allocated once the weights are loaded, the pages aside."""
        return self.buffers + self.logits + self.graphs

    def describe(self) -> str:
        """One line per part, in GB."""
        parts = asdict(self) | {"total": self.total}
        return "\n".join(f"{name.replace('_', ' '):>15}: {size / 1e9:.2f} GB" for name, size in parts.items() if size)


def module_bytes(module: nn.Module | None) -> int:
    """Bytes of a network's tensors; tied ones count once."""
    if module is None:
        return 0
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in module.state_dict().values()}
    return sum(storages.values())


def plan_memory(
    target: nn.Module,
    drafter: nn.Module | None,
    config: ModelConfig,
    specs: Iterable[BufferSpec],
    shapes: Sequence[RoundShape],
    limits: Limits,
) -> MemoryPlan:
    """specs: the engine's buffers; shapes: the rounds that it will capture (none in eager mode)."""
    by_role: dict[str, int] = {}
    for spec in specs:
        name = spec.name if spec.role == "kv" else "buffers"
        by_role[name] = by_role.get(name, 0) + spec.nbytes
    drafted = max((shape.rows * shape.block for shape in shapes), default=limits.max_rows * limits.max_block)
    places = max((shape.places for shape in shapes), default=0)
    size = next(target.parameters()).element_size()
    return MemoryPlan(
        weights=module_bytes(target),
        drafter_weights=module_bytes(drafter),
        pages=by_role.get("cache", 0),
        drafter_pages=by_role.get("draft_cache", 0),
        buffers=by_role.get("buffers", 0),
        logits=4 * config.vocab_size * (_LOGIT_COPIES * limits.sample_group + drafted),
        graphs=len(shapes) * GRAPH_BYTES + places * size * (6 * config.hidden_size + 3 * config.intermediate_size),
    )


def page_bytes(configs: Iterable[ModelConfig | DrafterConfig | None], page_size: int, dtype: torch.dtype) -> int:
    """Bytes of one page, the target's and the drafter's."""
    slot = sum(c.num_layers * 2 * c.num_kv_heads * c.head_dim for c in configs if c is not None)
    return slot * page_size * dtype.itemsize


def device_memory(device: torch.device) -> tuple[int, int]:
    """(free, total) bytes of a GPU; what the allocator keeps of a load is given back first."""
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)


def fit_pages(
    limits: Limits, plan: MemoryPlan, page: int, memory: tuple[int, int], gpu_memory_utilization: float
) -> Limits:
    """Limits with as many pages as fit, at most all rows at full length. `memory` is read after loading the weights.

    Raises MemoryError when not even one row of max_model_len fits.
    """
    free, total = memory
    room = int(total * gpu_memory_utilization) - (total - free) - plan.beside_pages
    fitting = room // page - 1  # page 0 is the dummy's
    if fitting < limits.pages_per_row:
        need = (limits.pages_per_row + 1) * page
        raise MemoryError(
            f"no room for the K/V of one row: {limits.max_model_len} tokens need {need / 1e9:.2f} GB, and of "
            f"{total / 1e9:.1f} GB, {gpu_memory_utilization:.0%} of which may be used, {max(room, 0) / 1e9:.2f} GB are "
            f"left beside {(total - free) / 1e9:.1f} GB in use and {plan.beside_pages / 1e9:.2f} GB of buffers and "
            "graphs: lower max_model_len or max_rows, or raise gpu_memory_utilization"
        )
    return replace(limits, num_pages=1 + min(fitting, limits.max_rows * limits.pages_per_row))


@contextmanager
def memory_remedy(what: str, remedy: str) -> Iterator[None]:
    """Turns the device's out-of-memory error into one message."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise MemoryError(f"out of GPU memory while {what}: {remedy}") from error
