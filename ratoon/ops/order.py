# Owns: the order of values: by value, equal values by lower position.
# Promises: no tie is left open.
# Never: sorts a whole vocabulary.
"""Best values of each row. T: places, V: vocabulary, N: blocks, W: their width, K: candidates."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

_WORD = 0xFFFFFFFF
_NEG_INF = float("-inf")


def sortable(x: Tensor) -> Tensor:
    """int32 that orders as the float32 does; -0.0 equals 0.0."""
    bits = (x + 0.0).view(torch.int32)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def _best_positions(x_TN: Tensor, k: int) -> Tensor:
    """Positions [T, k] of the k largest, equal values by lower position.

    torch.topk leaves ties open, so value and position are packed into one int64 that has none.
    """
    place_N = torch.arange(x_TN.shape[1], device=x_TN.device)
    ranked_TN = (sortable(x_TN).to(torch.int64) << 32) | (_WORD - place_N)
    return ranked_TN.topk(k, dim=1).indices


def _blocks(x_TV: Tensor, width: int) -> Tensor:
    """[T, V / width, width], padded with -inf where the width does not divide V."""
    surplus = -x_TV.shape[1] % width
    padded = F.pad(x_TV, (0, surplus), value=_NEG_INF) if surplus else x_TV
    return padded.unflatten(1, (-1, width))


def top_ordered(x_TV: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """(values, ids) [T, k], by value and then lower id. k <= V.

    The k best elements lie in the k blocks with the best maxima, so only those are ranked.
    """
    width = 32
    if x_TV.shape[1] <= 4 * k * width:
        position_Tk = _best_positions(x_TV, k)
        return x_TV.gather(1, position_Tk), position_Tk
    x_TNW = _blocks(x_TV, width)
    block_Tk = _best_positions(x_TNW.amax(-1), k).sort(dim=1).values
    inner_TK = x_TNW.gather(1, block_Tk.unsqueeze(-1).expand(-1, -1, width)).flatten(1)
    position_Tk = _best_positions(inner_TK, k)
    id_Tk = block_Tk.gather(1, position_Tk // width) * width + position_Tk % width
    return inner_TK.gather(1, position_Tk), id_Tk


def top_three(x_TV: Tensor) -> tuple[Tensor, Tensor]:
    """(values, ids) [T, 3], by value and then lower id: one pass over V, then short argmaxes.

    Where V < 3 the surplus has value -inf and any id, maybe not below V.
    """
    width = 128
    x_TNW = _blocks(x_TV, width)
    best_TN = x_TNW.amax(-1)
    place_W = torch.arange(width, device=x_TV.device)
    values: list[Tensor] = []
    ids: list[Tensor] = []
    for _ in range(3):
        block_T1 = best_TN.argmax(1, keepdim=True)
        inner_TW = _block_at(x_TNW, block_T1)
        for id_T1 in ids:
            inner_TW = inner_TW.masked_fill(id_T1 == block_T1 * width + place_W, _NEG_INF)
        place_T1 = inner_TW.argmax(1, keepdim=True)
        values.append(inner_TW.gather(1, place_T1))
        ids.append(block_T1 * width + place_T1)
        if len(ids) < 3:
            rest_T1 = inner_TW.scatter(1, place_T1, _NEG_INF).amax(1, keepdim=True)
            best_TN = best_TN.scatter(1, block_T1, rest_T1)
    return torch.cat(values, 1), torch.cat(ids, 1)


def _block_at(x_TNW: Tensor, block_T1: Tensor) -> Tensor:
    return x_TNW.gather(1, block_T1.unsqueeze(-1).expand(-1, -1, x_TNW.shape[-1])).squeeze(1)
