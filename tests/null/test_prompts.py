# Owns: tests of the prompt sets and of reading a prompts file.
# Promises: a bad line is refused with file and number, whatever is wrong with it.
# Never: fetches anything.
"""lab/prompts.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from ratoon.lab import prompts
from ratoon.lab.prompts import HUMANEVAL_STOP, Prompt, load_prompts, random_ids


def test_humaneval_is_raw_code_with_its_stop_strings() -> None:
    found = load_prompts("humaneval")
    assert len(found) == 164 and found[0].id == "HumanEval/0" and found[-1].id == "HumanEval/163"
    assert all(p.kind == "code" and p.stop == HUMANEVAL_STOP and p.text.endswith('"""\n') for p in found[:3])
    assert [p.id for p in load_prompts("humaneval", limit=2)] == ["HumanEval/0", "HumanEval/1"]


def test_mtbench_is_the_first_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    questions = tmp_path / "question.jsonl"
    lines = ['{"question_id": 81, "turns": ["first", "second"]}', "", '{"question_id": 82, "turns": ["x", "y"]}']
    questions.write_text("\n".join(lines))
    monkeypatch.setattr(prompts, "fetch", lambda file, directory, progress: questions)
    first, second = load_prompts("mtbench")
    assert (first.id, first.kind, first.messages) == ("mtbench/81", "chat", ({"role": "user", "content": "first"},))
    assert second.messages[0]["content"] == "x" and not second.text and not second.stop


def test_a_file_mixes_texts_and_messages(tmp_path: Path) -> None:
    path = tmp_path / "own.jsonl"
    chat = '{"messages": [{"role": "user", "content": "hé"}]}'
    lines = ['{"prompt": "def f", "stop": "\\n\\n", "id": "a"}', "", chat]
    path.write_text("\n".join(lines), encoding="utf-8")
    assert load_prompts(path) == [
        Prompt(id="a", kind="code", text="def f", stop=("\n\n",)),
        Prompt(id="own/3", kind="chat", messages=({"role": "user", "content": "hé"},)),
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"prompt": "a"', r"line 2: not JSON \(.* at column"),
        (b'{"prompt": "caf\xe9"}', r"line 2: not UTF-8 text \(byte 15\)"),
        (b'["a"]', r"line 2: expected an object"),
        (b"{}", "line 2: give either 'prompt' or 'messages'"),
        (b'{"prompt": "a", "messages": []}', "line 2: give either 'prompt' or 'messages'"),
        (b'{"prompt": ""}', "line 2: 'prompt' must be a text that is not empty"),
        (b'{"prompt": 3}', "line 2: 'prompt' must be a text that is not empty"),
        (b'{"messages": []}', "line 2: 'messages' must be a list of objects"),
        (b'{"messages": [{"role": "user"}]}', "line 2: 'messages' must be a list of objects"),
        (b'{"prompt": "a", "stop": [""]}', "line 2: 'stop' must be a text or a list of texts"),
        (b'{"prompt": "a", "stop": 3}', "line 2: 'stop' must be a text or a list of texts"),
        (b'{"prompt": "a", "temperature": 1}', r"line 2: nobody reads \['temperature'\]"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: bytes, message: str) -> None:
    path = tmp_path / "own.jsonl"
    path.write_bytes(b'{"prompt": "good"}\n' + line + b"\n")
    with pytest.raises(ValueError, match=rf"own\.jsonl, {message}"):
        load_prompts(path)


def test_an_empty_file_and_a_missing_one_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(ValueError, match="holds no prompt"):
        load_prompts(tmp_path / "empty.jsonl")
    with pytest.raises(FileNotFoundError, match="known sets: humaneval, mtbench"):
        load_prompts("humanevil")
    with pytest.raises(ValueError, match="at least 1"):
        load_prompts("humaneval", limit=0)


def test_humaneval_without_its_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompts, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install 'ratoon\[bench\]'"):
        load_prompts("humaneval")


def test_random_prompts_are_the_same_every_time() -> None:
    found = load_prompts("random:7", limit=3)
    assert [p.id for p in found] == ["random/0", "random/1", "random/2"] and found[0].kind == "random"
    ids = [random_ids(p, 50) for p in found]
    assert ids == [random_ids(p, 50) for p in load_prompts("random:7", limit=3)] and ids[0] != ids[1]
    assert all(len(line) == 7 and min(line) >= 0 and max(line) < 50 for line in ids)
    assert len(load_prompts("random")) == 16 and load_prompts("random")[0].num_random == 128
    for bad in ("random:0", "random:-1", "random:1.5"):
        with pytest.raises(ValueError, match="random:LENGTH"):
            load_prompts(bad)
