# Owns: matrix products with what surrounds them in a layer: norm before, gate, bias and residual after.
# Promises: the reference computes in float32 throughout and rounds its result once.
# Never: reads a value on the host.
"""Products. T: places, H: inputs, O: rows of the weight, I: intermediate (O = 2 I where gated)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from ratoon.ops.launch import wants_kernel


def project(
    x_TH: Tensor,
    weight_OH: Tensor,
    bias_O: Tensor | None = None,
    *,
    norm_H: Tensor | None = None,
    eps: float = 0.0,
    residual_TO: Tensor | None = None,
    gated: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """rms_norm(x; norm, eps) W^T + b + residual, [T, O], in x's dtype.

    gated: the first half of the rows are gates, the second half what they open, and silu(gate) * up, [T, I], takes
    the product's place; the residual then has that shape. `out` (of the result's shape and dtype) is written and
    returned; it may be the residual itself, not x.
    """
    if wants_kernel(x_TH):
        from ratoon.ops.kernels import linear

        return linear.project(
            x_TH, weight_OH, bias_O, norm_H=norm_H, eps=eps, residual_TO=residual_TO, gated=gated, out=out
        )
    wide_TH = x_TH.float()
    if norm_H is not None:
        wide_TH = F.rms_norm(wide_TH, (wide_TH.shape[-1],), norm_H.float(), eps)
    y = F.linear(wide_TH, weight_OH.float(), None if bias_O is None else bias_O.float())
    if gated:
        gate_TI, up_TI = y.chunk(2, dim=-1)
        y = F.silu(gate_TI) * up_TI
    if residual_TO is not None:
        y = y + residual_TO.float()
    return y.to(x_TH.dtype) if out is None else out.copy_(y)
