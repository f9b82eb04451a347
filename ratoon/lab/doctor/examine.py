# Owns: the order of the doctor's checks, and what can still be checked after one has failed.
# Promises: every check reports once: made, failed, or skipped with the reason; none ends the others.
# Never: imports torch before a check needs it.
"""`examine`: all checks of a model, its drafter and the machine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ratoon.lab.doctor import machine
from ratoon.lab.doctor.check import Check, cause, guarded, skipped

if TYPE_CHECKING:
    from ratoon.runtime.engine import Engine

SERVING = ("spec = ar", "first slot", "k/v")
OPENED = ("parameters", "wiring", *SERVING, "birth test", "memory")
_LONGEST = 4096
"""Context of the engine that is examined: more than the sliding windows of known drafters."""


@dataclass(frozen=True)
class Patient:
    """What to examine: names as the engine takes them. prompts: token ids instead of the doctor's own texts."""

    model: str = "smollm2"
    drafter: str = "auto"
    device: str = "auto"
    dtype: str = "auto"
    mode: str = "auto"
    quick: bool = False
    prompts: Sequence[Sequence[int]] | None = None


def examine(patient: Patient) -> Iterator[Check]:
    """Every check in order, as it is made. Raises ValueError or FileNotFoundError for names that are none."""
    paths = _paths(patient)
    yield from _machine(patient.device)
    if isinstance(paths, ImportError):
        yield from _all_skipped(("checkpoint", *OPENED), f"models cannot be found: {cause(paths)}")
        return
    yield from _files(*paths)
    yield from _opened(patient, *paths)


def _paths(patient: Patient) -> tuple[Path, Path | None] | ImportError:
    """Where target and drafter lie."""
    try:
        from ratoon.models.hub import drafter_for, resolve
    except ImportError as error:
        return error
    path = resolve(patient.model)
    if patient.drafter == "none":
        return path, None
    return path, drafter_for(patient.model) if patient.drafter == "auto" else resolve(patient.drafter)


def _machine(device: str) -> Iterator[Check]:
    yield guarded("python", machine.check_python)
    try:
        yield from machine.check_packages()
    except Exception as error:  # noqa: BLE001 (as in guarded: this one yields several)
        yield Check("packages", "fail", cause(error), "an installed ratoon", "pip install it, editable or not")
    yield guarded("torch", machine.check_torch)
    yield guarded("kernel", partial(machine.check_kernel, device))
    yield guarded("port", machine.check_port)
    yield guarded("disk", machine.check_disk)


def _files(path: Path, drafter: Path | None) -> Iterator[Check]:
    def made_for(drafter: Path) -> Check:
        from ratoon.core.drafter import DrafterConfig
        from ratoon.models.weights import load_config, read_json

        config = DrafterConfig.from_hf(read_json(drafter / "config.json"))
        return files.check_made_for(load_config(path), config, files.read_provenance(drafter), path)

    from ratoon.lab.doctor import files

    yield guarded("checkpoint", partial(files.check_checkpoint, "checkpoint", path, True))
    if drafter is None:
        yield from _all_skipped(("drafter", "made for"), "there is no drafter")
        return
    yield guarded("drafter", partial(files.check_checkpoint, "drafter", drafter, False))
    yield guarded("made for", partial(made_for, drafter))


def _opened(patient: Patient, path: Path, drafter: Path | None) -> Iterator[Check]:
    try:
        engine = _engine(patient, path, drafter)
    except Exception as error:  # noqa: BLE001 (why it does not open is the finding)
        yield Check("open", "fail", cause(error), "the engine opens", "the first failed check above may be the cause")
        yield from _all_skipped(OPENED, "the engine did not open")
        return
    with engine:
        settings = engine.settings
        yield Check("open", "ok", f"{settings.device}, {settings.dtype}, {settings.mode}", "the engine opens")
        yield from _engine_checks(engine, patient, drafter)


def _engine(patient: Patient, path: Path, drafter: Path | None) -> Engine:
    from ratoon.models.weights import load_config
    from ratoon.runtime.engine import Engine

    return Engine(
        patient.model,
        drafter=str(drafter) if drafter else "none",
        budget=15 if drafter else 0,
        dtype=patient.dtype,
        device=patient.device,
        mode=patient.mode,
        max_rows=2,
        # The wiring checks spoil the caches.
        enable_prefix_caching=False,
        max_model_len=None if patient.mode in ("static", "graph", "staged") else _fitting(load_config(path)),
    )


def _fitting(config: Any) -> int:
    return min(config.max_position, _LONGEST)


def _engine_checks(engine: Engine, patient: Patient, drafter: Path | None) -> Iterator[Check]:
    from ratoon.lab.doctor import serving

    round_ = engine.runner.round
    networks = {"target": round_.target, "drafter": round_.drafter}
    yield guarded("parameters", partial(serving.check_parameters, networks))
    if drafter is None:
        yield from _all_skipped(("wiring", "spec = ar", "first slot"), "there is no drafter")
    else:
        yield from _wiring(engine, drafter)
        yield from _serving(engine, patient, drafter)
    yield guarded("k/v", partial(serving.check_cache, engine))
    yield guarded("birth test", partial(serving.check_births_of, engine))
    yield guarded("memory", partial(serving.check_memory, engine))


def _wiring(engine: Engine, drafter: Path) -> Iterator[Check]:
    from ratoon.core.drafter import DrafterConfig
    from ratoon.lab.doctor.trial import Pair
    from ratoon.lab.doctor.wiring import WIRING
    from ratoon.models.weights import read_json

    pair = Pair(engine.runner, DrafterConfig.from_hf(read_json(drafter / "config.json")))
    for name, check in WIRING.items():
        yield guarded(name, partial(check, pair))


def _serving(engine: Engine, patient: Patient, drafter: Path) -> Iterator[Check]:
    from ratoon.lab.doctor import files, serving

    try:
        served = serving.serve(engine, patient.prompts or serving.prompts_of(engine, patient.quick))
    except Exception as error:  # noqa: BLE001 (why it does not serve is the finding)
        yield Check("spec = ar", "fail", cause(error), "requests are served", "run `ratoon bisect`")
        yield skipped("first slot", "requests were not served")
        return
    yield guarded("spec = ar", partial(serving.check_equality, served, engine.dtype))
    yield guarded("first slot", lambda: serving.check_acceptance(served, files.read_provenance(drafter)))


def _all_skipped(names: Sequence[str], reason: str) -> Iterator[Check]:
    yield from (skipped(name, reason) for name in names)
