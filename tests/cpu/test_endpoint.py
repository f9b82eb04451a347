# Owns: tests of `ratoon bench --url`: a real server, and one that misbehaves by script.
# Promises: figures are held against what the server said; every way to fail is one line with its cause.
# Never: judges speed.
"""lab/endpoint.py, over sockets."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest
from typer.testing import Result

from ratoon.lab import endpoint
from tests.cpu import fake_engine
from tests.cpu.fake_engine import ratoon
from tests.cpu.openai_server import ANSWER, Scripted, chunk, save_model, scripted, transformers_serve


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    pytest.importorskip("fastapi", reason="transformers serve needs the dev extra")
    with transformers_serve(save_model(tmp_path_factory.mktemp("served"))) as url:
        yield url


class Bench:
    """`ratoon bench --url` on two prompts, a text and a chat, with its records."""

    def __init__(self, folder: Path) -> None:
        self.out, self.file, self.json = folder / "out", folder / "p.jsonl", folder / "o.jsonl"
        chat = {"messages": [{"role": "user", "content": "hi"}]}
        self.prompts: list[dict[str, Any]] = [{"prompt": "one two", "stop": "wxyz"}, chat]
        self.file.write_text("".join(json.dumps(prompt) + "\n" for prompt in self.prompts))

    def run(self, url: str, *more: str, keep: bool = False) -> Result:
        """`keep`: into the folder `out`, else only as lines."""
        where = ("--out", str(self.out)) if keep else ()
        options = ("--prompts", str(self.file), "--max-tokens", "6", "--json", str(self.json))
        return ratoon("bench", "--url", url, *options, *where, *more)

    def rows(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.json.read_text().splitlines()]


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    pytest.importorskip("matplotlib", reason="the report of --out needs the bench extra")
    return Bench(tmp_path)


# ---- a real server ----------------------------------------------------------------------------------------


def asked_directly(url: str, prompt: dict[str, Any], max_tokens: int) -> int:
    """Tokens that the server counts in an answer that does not stream."""
    path = "chat/completions" if "messages" in prompt else "completions"
    body = {"model": httpx2.get(f"{url}/models").json()["data"][0]["id"], "temperature": 0, "max_tokens": max_tokens}
    told = httpx2.post(f"{url}/{path}", json={**body, **prompt, "stream": False}, timeout=120).json()
    return told["usage"]["completion_tokens"]


def test_a_real_server_is_measured(real: str, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    result = bench.run(real, "--concurrency", "1,2", keep=True)
    assert result.exit_code == 0, result.stderr
    rows = bench.rows()
    expected = sum(asked_directly(real, prompt, 6) for prompt in bench.prompts)
    assert [(row["concurrency"], row["output_tokens"]) for row in rows] == [(1, expected), (2, expected)]
    for row in rows:
        assert row["method"] == "server" and row["tok_s"] > 0 and row["device"] == real
        assert 0 < row["ttft_ms_p50"] <= row["ttft_ms_p99"] and 0 < row["itl_ms_p50"] <= row["itl_ms_p99"]
        assert row["tau"] is None and row["tau_told_by"] is None and row["speedup_vs_ar"] is None
    assert "server" in result.stdout and (bench.out / "report.html").stat().st_size > 10_000

    fake_engine.install(monkeypatch)
    ratoon("bench", "--prompts", str(bench.file), "--methods", "ar", "--json", str(bench.out / "engine"))
    engine = json.loads((bench.out / "engine").read_text())
    assert set(engine) - {"versions"} <= set(rows[0]), "a server's record holds what an engine's does"


def test_a_finished_cell_is_not_asked_for_again(bench: Bench) -> None:
    script = Scripted()
    with scripted(script) as url:
        bench.run(url, "--concurrency", "1", keep=True)
        asked = len(script.bodies)
        again = bench.run(url, "--concurrency", "1,2", keep=True)
        assert "1 of 2 cells are in" in " ".join(again.stdout.split())
        assert [row["concurrency"] for row in bench.rows()] == [1, 2]
        # One answer to see that the server is well, warm-ups, two prompts.
        assert len(script.bodies) - asked == 1 + 2 + 2


# ---- what is asked ----------------------------------------------------------------------------------------


def test_prompts_settings_and_concurrency_reach_the_server(bench: Bench) -> None:
    bench.file.write_text("".join(json.dumps(prompt) + "\n" for prompt in bench.prompts * 4))
    script = Scripted(models=("a", "toy"), chunks=(chunk("one"), 0.05, *ANSWER[1:]), key="secret")
    more = ("--served-model-name", "toy", "--api-key", "secret", "--temperature", "0.5", "--seed", "7")
    with scripted(script) as url:
        result = bench.run(url, *more, "--concurrency", "3", keep=True)
    assert result.exit_code == 0, result.stderr
    assert script.most_active == 3
    timed = script.bodies[-8:]
    texts = [body for body in timed if body["path"] == "/v1/completions"]
    chats = [body for body in timed if body["path"] == "/v1/chat/completions"]
    assert [body["prompt"] for body in texts] == ["one two"] * 4 and all(body["stop"] == ["wxyz"] for body in texts)
    assert [body["messages"] for body in chats] == [bench.prompts[1]["messages"]] * 4
    for body in timed:
        assert (body["model"], body["temperature"], body["seed"], body["max_tokens"]) == ("toy", 0.5, 7, 6)
    written = [path for path in bench.out.rglob("*") if path.is_file()]
    assert written and not any(b"secret" in path.read_bytes() for path in written), "the key is nowhere"


def test_uncut_answers_have_no_stop_strings(bench: Bench) -> None:
    script = Scripted()
    with scripted(script) as url:
        bench.run(url, "--uncut")
    assert not any("stop" in body for body in script.bodies)


def test_the_key_of_the_environment_is_shown(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    with scripted(Scripted(key="secret")) as url:
        assert bench.run(url).exit_code == 0


def test_a_strict_server_is_asked_for_plain_usage(bench: Bench) -> None:
    script = Scripted(rejects="continuous_usage_stats")
    with scripted(script) as url:
        assert bench.run(url).exit_code == 0
    assert all(body["stream_options"] == {"include_usage": True} for body in script.bodies)
    assert bench.rows()[0]["output_tokens"] == 8


# ---- what is read -----------------------------------------------------------------------------------------


class Clock:
    """Time that passes when it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(endpoint, "time", SimpleNamespace(perf_counter=lambda: self.now))

    def answer(self, *told: Any) -> endpoint.Answer:
        """Of chunks, and pauses in seconds between them."""
        stream = endpoint._Stream("p/1")
        for piece in told:
            if isinstance(piece, float):
                self.now += piece
            else:
                stream.take(piece)
        return stream.answer()


def test_tokens_of_a_chunk_share_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    role = {"choices": [{"index": 0, "delta": {"role": "assistant"}}], "usage": {"completion_tokens": 0}}
    told = (role, 1.0, chunk("one", 1), 3.0, chunk(" two three four", 4), 5.0, chunk("", 4, "length"))
    assert Clock(monkeypatch).answer(*told) == endpoint.Answer(4, 1.0, (1.0, 1.0, 1.0), by_chunk=True)


def test_without_usage_in_chunks_an_answers_tokens_share_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    told = (1.0, chunk("one"), 2.0, chunk(" two"), 4.0, chunk(" three four"), 5.0, chunk("", 4, "length"))
    assert Clock(monkeypatch).answer(*told) == endpoint.Answer(4, 1.0, (2.0, 2.0, 2.0), by_chunk=False)


def test_thoughts_are_tokens_and_an_empty_answer_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    thought = {"choices": [{"index": 0, "delta": {"reasoning_content": "hm"}}]}
    assert Clock(monkeypatch).answer(1.0, thought, 2.0, chunk(".", 2, "stop")).ttft_s == 1.0
    assert Clock(monkeypatch).answer(1.0, chunk("", 0, "stop")) == endpoint.Answer(0, 1.0, (), by_chunk=True)


def metrics(drafts: int, accepted: int, *positions: int) -> str:
    lines = [
        "# TYPE vllm:spec_decode_num_drafts counter",
        f'vllm:spec_decode_num_drafts_total{{engine="0",model_name="toy"}} {drafts}.0',
        'vllm:spec_decode_num_drafts_created{engine="0",model_name="toy"} 1.79e+09',
        f'vllm:spec_decode_num_draft_tokens_total{{engine="0",model_name="toy"}} {7 * drafts}.0',
        f'vllm:spec_decode_num_accepted_tokens_total{{engine="0",model_name="toy"}} {accepted}.0',
    ]
    for place, count in enumerate(positions):
        labels = f'engine="0",model_name="toy",position="{place}"'
        lines.append(f"vllm:spec_decode_num_accepted_tokens_per_pos_total{{{labels}}} {count}.0")
    return "\n".join(lines) + "\n"


def test_acceptance_of_vllm_is_that_of_the_cell(bench: Bench) -> None:
    """Counters before and after the warm-up, before and after the cell."""
    before = metrics(1000, 3000, 900, 500, 100)
    pages = {"/metrics": [metrics(0, 0), before, before, metrics(1010, 3025, 909, 507, 102)]}
    with scripted(Scripted(pages=pages)) as url:
        bench.run(url)
    [row] = bench.rows()
    assert row["tau"] == 3.5 and row["accept_per_position"] == [0.9, 0.7, 0.2]
    assert "vLLM" in row["tau_told_by"]


@pytest.mark.parametrize(
    ("path", "info"),
    [
        ("/server_info", {"internal_states": [{"avg_spec_accept_length": 3.0}, {"avg_spec_accept_length": 4.0}]}),
        ("/get_server_info", {"decode": [{"internal_states": [{"avg_spec_accept_length": 3.5}]}]}),
    ],
)
def test_acceptance_of_sglang_is_what_it_says(bench: Bench, path: str, info: dict[str, Any]) -> None:
    with scripted(Scripted(pages={path: json.dumps(info)})) as url:
        bench.run(url)
    [row] = bench.rows()
    assert row["tau"] == 3.5 and "SGLang" in row["tau_told_by"]


# ---- what goes wrong --------------------------------------------------------------------------------------


def refused(result: Result, code: int) -> str:
    assert result.exit_code == code
    [line] = result.stderr.strip().splitlines()
    return line


def test_nobody_answers(bench: Bench) -> None:
    with scripted(Scripted()) as url:
        pass
    assert "no server answers at" in refused(bench.run(url), 1)


@pytest.mark.parametrize(
    ("script", "path", "words"),
    [
        (Scripted(key="secret"), "", "another key (401, no such key): give --api-key"),
        (Scripted(), "/v2", "(404, not here): does --url end with /v1"),
        (Scripted(models=("a", "b")), "", "serves a, b: choose with --served-model-name"),
        (Scripted(rejects="toy"), "", "answers 400: unknown field toy"),
    ],
)
def test_what_cannot_be_measured_is_told_before_the_first_cell(
    bench: Bench, script: Scripted, path: str, words: str
) -> None:
    with scripted(script) as url:
        assert words in refused(bench.run(url + path, keep=True), 2)
    assert not bench.out.exists()


def test_a_wrong_model_is_told_with_the_right_ones(bench: Bench) -> None:
    with scripted(Scripted()) as url:
        assert "does not serve 'other' but toy" in refused(bench.run(url, "--served-model-name", "other"), 2)


@pytest.mark.parametrize(
    ("script", "cause"),
    [
        (Scripted(), "the server ended the stream in the middle of the answer"),
        (Scripted(breaks=True), "the server broke off (peer closed connection"),
        (Scripted(dying=[*ANSWER[:1], {"error": {"message": "out of memory"}}]), "the server reports"),
        (Scripted(dying=[chunk("one"), chunk("", None, "length")]), "the server tells no usage"),
    ],
)
def test_a_server_that_dies_in_an_answer_fails_that_cell(bench: Bench, script: Scripted, cause: str) -> None:
    """The first cell is answered, the second is not; a rerun measures only the second."""
    first_cell = 1 + 1 + 2  # the look whether all is well, a warm-up, two prompts
    script.dies_at = first_cell + 2
    with scripted(script) as url:
        result = bench.run(url, "--concurrency", "1,2", keep=True)
        assert result.exit_code == 1 and "1 of 2 cells failed" in result.stderr
        first, second = bench.rows()
        assert first["error"] is None and second["concurrency"] == 2 and cause in second["error"]
        assert cause.split("(")[0] in (bench.out / "report.html").read_text()
        script.dies_at = None
        assert bench.run(url, "--concurrency", "1,2", keep=True).exit_code == 0
    assert [(row["concurrency"], row["error"]) for row in bench.rows()[2:]] == [(2, None)]
