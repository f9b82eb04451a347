# Owns: fixtures of the tests over toy engines.
# Promises: engines are made once per module, and all of them are idle after every test.
# Never: makes anything for a test that does not ask.
from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ratoon.models.dflash import DFlash
from ratoon.runtime.text import Tokenizer
from ratoon.train.export import export_drafter
from tests.cpu import toy
from tests.cpu.engines import Maker, check_idle, target


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy.save_target(target(), tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    plain = toy.randomise(DFlash(toy.drafter_config()), 1, 1.0)
    return export_drafter(plain, tmp_path_factory.mktemp("drafter"), {})


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> Tokenizer:
    return Tokenizer.load(model)


@pytest.fixture(scope="module")
def makers(model: Path, drafter: Path) -> Iterator[Maker]:
    maker = Maker(model, drafter)
    yield maker
    for engine in maker.made.values():
        engine.close()


@pytest.fixture
def make(makers: Maker) -> Iterator[Maker]:
    """`make(run_ahead=1)` is an engine; all of them must be idle after the test."""
    yield makers
    for engine in makers.made.values():
        check_idle(engine)
