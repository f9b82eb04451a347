# Owns: the checks of how a drafter is wired to its target: taps, masks, block input, rotary, pair.
# Promises: each judges the running engine against the checkpoint's own config by an independent dense pass.
# Never: needs a trained drafter: random weights are judged alike.
"""Wiring checks. Each takes a `Pair`; names of tensors are those of trial.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields

import torch
from torch import Tensor

from ratoon.core.drafter import DrafterConfig
from ratoon.lab.doctor.check import Check, judged
from ratoon.lab.doctor.reference import context_kv, draft_hidden, layer_states, mask_of, relative_error
from ratoon.lab.doctor.trial import Pair, seen_keys
from ratoon.models.dflash import visible
from ratoon.models.layers import Rotary

_FEW_KEYS = 24


def check_config(pair: Pair) -> Check:
    """The target is the one that the drafter was made for, and the drafter runs by the config of its checkpoint."""
    target, expected, running = pair.target.config, pair.expected, pair.drafter.config
    try:
        expected.require_target(target.num_layers, target.hidden_size, target.vocab_size)
    except ValueError as error:
        return Check("pair", "fail", str(error), "a drafter of this target", "use the drafter that was made for it")
    names = [field.name for field in fields(DrafterConfig)]
    differing = [name for name in names if getattr(running, name) != getattr(expected, name)]
    seen = [f"{name} {getattr(running, name)}, not {getattr(expected, name)}" for name in differing]
    return judged(
        "pair",
        not differing,
        "; ".join(seen) or f"{target.num_layers} layers, hidden {target.hidden_size}, vocabulary {target.vocab_size}",
        "the drafter runs by its own config.json, for this target",
        "the engine changed the drafter's settings: read them from the checkpoint",
    )


def check_taps(pair: Pair) -> Check:
    """Each tap is the residual stream after its 0-based layer (METHOD section 2)."""
    trial, ids = pair.trial, pair.expected.target_layer_ids
    with torch.inference_mode():
        states = layer_states(pair.target, trial.ids[:-1])
    taps, size = trial.taps_PX.float(), pair.expected.hidden_size
    if taps.shape[1] != len(ids) * size:
        seen = f"{taps.shape[1]} features reach the drafter"
        return Check("taps", "fail", seen, f"{len(ids)} taps of {size}", "check target_layer_ids")
    wrong, worst = [], 0.0
    for place, (layer, tap) in enumerate(zip(ids, taps.split(size, dim=1), strict=True)):
        errors = [relative_error(tap, state) for state in states]
        nearest = min(range(len(errors)), key=errors.__getitem__) - 1
        worst = max(worst, errors[layer + 1])
        if nearest != layer or errors[layer + 1] > pair.tolerance:
            wrong.append(_tap_fault(place, layer, nearest, errors[nearest + 1] <= pair.tolerance))
    return judged(
        "taps",
        not wrong,
        "; ".join(wrong) or f"layers {', '.join(map(str, ids))} as a dense pass gives them (worst error {worst:.1e})",
        f"the stream after layers {', '.join(map(str, ids))}, counted from 0",
        "target_layer_ids are 0-based; files that store id + 1 must be converted",
    )


def _tap_fault(place: int, layer: int, nearest: int, is_state: bool) -> str:
    if not is_state:
        return f"tap {place} is the stream after no layer"
    name = "the embeddings" if nearest < 0 else f"the stream after layer {nearest}"
    hint = " (off by one)" if abs(nearest - layer) == 1 else ""
    return f"tap {place} is {name} instead of layer {layer}{hint}"


def check_masks(pair: Pair) -> Check:
    """Every draft layer sees by the window and causality of the checkpoint, in the engine and in `visible`."""
    expected, limits = pair.expected, pair.runner.limits
    widest = max((window for window in expected.windows if window), default=_FEW_KEYS)
    start = min(widest + 3, limits.max_model_len - 1)
    seen_LBNS = seen_keys(pair, start)
    block, wrong = seen_LBNS.shape[1], []
    for layer, kind in enumerate(zip(expected.windows, expected.causal, strict=True)):
        want_BS = mask_of(start, block, *kind)
        position = torch.arange(start + block)
        if not torch.equal(visible(position[start:, None], position, *kind), want_BS):
            wrong.append(f"models/dflash.visible says otherwise for window {kind[0]}, causal {kind[1]}")
        if not torch.equal(seen_LBNS[layer], want_BS.unsqueeze(1).expand_as(seen_LBNS[layer])):
            wrong.append(f"layer {layer} {_mask_fault(seen_LBNS[layer], start, *kind)}")
    beyond = f"; a window of {widest} is longer than this engine's context" if start < widest else ""
    return judged(
        "masks",
        not wrong,
        "; ".join(wrong) or f"{len(expected.windows)} layers over {start} context tokens and the block{beyond}",
        "; ".join(_kinds(expected)),
        "compare layer_types, sliding_window, is_causal and dflash_config of the checkpoint with what the engine runs",
    )


def _mask_fault(seen_BNS: Tensor, start: int, window: int | None, causal: bool) -> str:
    """What the layer runs as, tried by the ways in which masks go wrong."""
    tried = {
        "is run as full, its window is ignored": (None, causal),
        f"is run {'bidirectional' if causal else 'causal'}": (window, not causal),
        f"is run full and {'bidirectional' if causal else 'causal'}": (None, not causal),
    }
    for text, kind in tried.items():
        mask_BS = mask_of(start, seen_BNS.shape[0], *kind)
        if torch.equal(seen_BNS, mask_BS.unsqueeze(1).expand_as(seen_BNS)):
            return text
    differing = seen_BNS != mask_of(start, seen_BNS.shape[0], window, causal).unsqueeze(1)
    row, _, key = differing.nonzero()[0].tolist()
    return f"differs at {int(differing.sum())} places, first where block position {row} looks at position {key}"


def _kinds(config: DrafterConfig) -> list[str]:
    """The layers' masks in words, equal neighbours together."""
    kinds: list[tuple[str, list[int]]] = []
    for layer, (window, causal) in enumerate(zip(config.windows, config.causal, strict=True)):
        text = f"{'causal' if causal else 'bidirectional'}, {f'window {window}' if window else 'full'}"
        if kinds and kinds[-1][0] == text:
            kinds[-1][1].append(layer)
        else:
            kinds.append((text, [layer]))
    return [f"layers {layers[0]}-{layers[-1]}: {text}" for text, layers in kinds]


def check_anchor(pair: Pair) -> Check:
    """Block position 0 holds the anchor's raw embedding, at the anchor's position."""
    trial = pair.trial
    embed, scale = pair.target.embed.weight, pair.expected.input_embedding_scale
    start, block = len(trial.ids) - 1, len(trial.x_BH)
    error = relative_error(trial.x_BH[0], scale * embed[trial.ids[-1]].float())
    in_place = trial.position_B.tolist() == list(range(start, start + block))
    seen = f"embedding of the anchor (error {error:.1e}) at position {int(trial.position_B[0])}"
    if error > pair.tolerance:
        alike = block > 1 and relative_error(trial.x_BH[0], trial.x_BH[1]) <= pair.tolerance
        seen = f"slot 0 holds {'the mask row' if alike else 'something else'}: the anchor's embedding is missing"
    elif not in_place:
        seen = f"block positions {trial.position_B.tolist()}"
    return judged(
        "anchor",
        error <= pair.tolerance and in_place,
        seen,
        f"embedding of token {trial.ids[-1]}{f' times {scale:g}' if scale != 1 else ''} at position {start}",
        "the draft block is [anchor, mask, mask, ...]: the anchor's embedding comes from the target's own table",
    )


def check_mask_row(pair: Pair) -> Check:
    """Block positions from 1 on hold the mask's embedding, and it is not zero."""
    trial, scale = pair.trial, pair.expected.input_embedding_scale
    embed, learned = pair.target.embed.weight, pair.drafter.mask_embedding
    row_H = embed[pair.expected.mask_token_id] if learned is None else learned
    usual = float(embed[:1024].float().norm(dim=1).median()) * scale
    norm = float(trial.x_BH[1:].float().norm(dim=1).min())
    error = relative_error(trial.x_BH[1:], scale * row_H.float().expand(len(trial.x_BH) - 1, -1))
    seen = f"norm {norm:.3g} (error {error:.1e})"
    if norm < 1e-3 * usual:
        seen = f"the mask row is zero (norm {norm:.1e}; embeddings have {usual:.3g})"
    source = "the learned row" if learned is not None else f"the embedding of token {pair.expected.mask_token_id}"
    return judged(
        "mask row",
        norm >= 1e-3 * usual and error <= pair.tolerance,
        seen,
        f"{source}, of norm near {usual:.3g}",
        "fetch the checkpoint again (mask_embedding.pt, if it has one), and check mask_token_id",
    )


def check_rope(pair: Pair) -> Check:
    """Angles and amplitude (YaRN) of the running drafter, and of the keys in its cache, are the checkpoint's."""
    trial, expected = pair.trial, pair.expected
    device = trial.taps_PX.device
    position = torch.tensor([0, 1, 7, 1000], device=device)
    running = torch.stack(pair.drafter.rotary(position, torch.float32))
    right = torch.stack(Rotary(expected.rope, expected.head_dim).to(device)(position, torch.float32))
    amplitude, wanted = float(running[0, 0].mean()), expected.rope.amplitude
    with torch.inference_mode():
        keys, _ = context_kv(pair.drafter, expected, trial.taps_PX)
    got = trial.context[:, :, 0]
    stored = float(got.float().norm() / keys.float().norm()) * wanted
    faults = []
    for name, value in (("running", amplitude), ("stored keys'", stored)):
        if abs(value / wanted - 1) > (0.02 if name != "running" else 1e-4):
            faults.append(f"the {name} amplitude is {value:.4f}")
    if not faults and relative_error(running, right) > 1e-4:
        faults.append("angles differ: another theta or scaling runs")
    if not faults and relative_error(got, keys) > pair.tolerance:
        faults.append(f"keys in the draft cache are off by {relative_error(got, keys):.1e}: position or norm is wrong")
    return judged(
        "rope",
        not faults,
        "; ".join(faults) or f"amplitude {amplitude:.4f}, stored keys {stored:.4f}",
        f"{expected.rope.kind}, theta {expected.rope.theta:g}, amplitude {wanted:.4f}",
        "read rope_theta, rope_scaling or rope_parameters again; YaRN multiplies cos and sin by its amplitude",
    )


def check_draft_pass(pair: Pair) -> Check:
    """The draft pass as a whole equals a dense one over the same input and the same context."""
    trial, expected = pair.trial, pair.expected
    start, block = trial.context.shape[1], len(trial.x_BH)
    kinds = zip(expected.windows, expected.causal, strict=True)
    seen_LBS = torch.stack([mask_of(start, block, *kind) for kind in kinds]).to(trial.x_BH.device)
    with torch.inference_mode():
        want_BH = draft_hidden(
            pair.drafter, expected, trial.x_BH, (trial.context[:, :, 0], trial.context[:, :, 1]), seen_LBS
        )
    error = relative_error(trial.hidden_BH, want_BH)
    return judged(
        "draft pass",
        error <= pair.tolerance,
        f"off a dense pass by {error:.1e}",
        f"at most {pair.tolerance:.0e}",
        "if no wiring check above failed: the draft attention or the paged cache is wrong, see `ratoon bisect`",
    )


WIRING: dict[str, Callable[[Pair], Check]] = {
    "pair": check_config,
    "taps": check_taps,
    "masks": check_masks,
    "anchor": check_anchor,
    "mask row": check_mask_row,
    "rope": check_rope,
    "draft pass": check_draft_pass,
}
"""In the order of the report. Each raises what it raises: wrap it in check.guarded."""
