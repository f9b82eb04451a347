# Owns: the most memory that was held while something ran.
# Promises: a peak of that time, not of the process's life; None where the system cannot tell.
# Never: estimates.
"""Peak memory: of the allocator on a GPU, of the process (resident) on a CPU."""

from __future__ import annotations

from pathlib import Path

_SELF = Path("/proc/self")


def reset_peak(device: str) -> None:
    """From here on the peak counts."""
    if device.startswith("cuda"):
        import torch

        torch.cuda.reset_peak_memory_stats(device)
    elif _SELF.exists():
        (_SELF / "clear_refs").write_text("5")


def peak_bytes(device: str) -> int | None:
    """The most bytes held since `reset_peak`."""
    if device.startswith("cuda"):
        import torch

        return torch.cuda.max_memory_allocated(device)
    if not _SELF.exists():
        return None
    [line] = [line for line in (_SELF / "status").read_text().splitlines() if line.startswith("VmHWM:")]
    return 1024 * int(line.split()[1])
