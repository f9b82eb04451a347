# Owns: bringing results to the host: the pinned ring, its copies and their events.
# Promises: reading a round waits for that round alone, never for one queued behind it.
# Never: looks into a result.
"""The host side of the result ring."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ratoon.runtime.staging import EventMaker


class Readback:
    """Host copies of result places, each with the event behind its copies.

    results: tensors [places, rows, ...], the device's ring. Without `make_event` they lie in host memory and are read
    there.
    """

    def __init__(self, results: Sequence[Tensor], make_event: EventMaker | None) -> None:
        self._events = [make_event() for _ in range(len(results[0]))] if make_event else []
        with torch.inference_mode(False):
            host = [torch.zeros(x.shape, dtype=x.dtype, pin_memory=x.is_cuda) if make_event else x for x in results]
        self._pairs = list(zip(host, results, strict=True))
        self._numpy = [tensor.numpy() for tensor in host]

    def queue(self, place: int, rows: int) -> None:
        """Behind a round on the current stream: its first `rows` rows start for the host."""
        if self._events:
            for host, device in self._pairs:
                host[place, :rows].copy_(device[place, :rows], non_blocking=True)
            self._events[place].record()

    def wait(self, place: int, rows: int) -> list[np.ndarray]:
        """The rows of a place, once its copies have run. Valid until the place is queued again."""
        if self._events:
            self._events[place].synchronize()
        return [tensor[place, :rows] for tensor in self._numpy]
