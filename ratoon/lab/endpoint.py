# Owns: `ratoon bench --url`: an OpenAI-compatible server measured over HTTP, by the definitions of lab/record.py.
# Promises: what a server does not tell is null in the record; a stream that breaks off is a failed cell.
# Never: counts tokens itself, or writes down the key.
"""A server as a contender: /v1/completions for texts, /v1/chat/completions for messages, streaming."""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import httpx2
import numpy as np

from ratoon.lab.bars import Bar
from ratoon.lab.bench import digest
from ratoon.lab.matrix import Group, numbers
from ratoon.lab.prompts import Prompt, load_prompts
from ratoon.lab.provenance import git_commit, versions
from ratoon.lab.record import STAGES, WARM_UP_TOKENS, Cell, percentiles_ms, settings
from ratoon.lab.results import Record, Results
from ratoon.lab.sweep import Task, Tick, sweep
from ratoon.models.wheel import Progress

# A first token may wait for all requests before it; a server that is gone does not take long to say so.
_TIMEOUT = httpx2.Timeout(600.0, connect=10.0)
_NO_ANSWER = (httpx2.TransportError, httpx2.StreamError)
# With the first, every chunk tells the tokens so far; strict servers know only the second.
_USAGE = ({"include_usage": True, "continuous_usage_stats": True}, {"include_usage": True})
_SAMPLE = re.compile(
    r"^vllm:spec_decode_num_(drafts|accepted_tokens|accepted_tokens_per_pos)(?:_total)?(\{.*\})? (\S+)"
)
_POSITION = re.compile(r'position="(\d+)"')


@dataclass(frozen=True)
class Question:
    """What is asked of a server: cells are concurrency by temperature."""

    url: str
    model: str | None
    api_key: str | None
    concurrency: tuple[int, ...]
    temperatures: tuple[float, ...]
    prompts: str
    limit: int | None
    max_tokens: int
    repeats: int
    seed: int
    cut: bool

    @classmethod
    def parse(cls, **given: Any) -> Question:
        """From the command line's texts. Raises ValueError naming the option."""
        url = given["url"].rstrip("/")
        if not re.match(r"https?://[^/]", url):
            raise ValueError(f"--url must be like http://localhost:8000/v1, got '{given['url']}'")
        for name in ("repeats", "max_tokens"):
            if given[name] < 1:
                raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {given[name]}")
        prompts = given["prompts"] or "humaneval"
        if prompts.startswith("random"):
            raise ValueError("--prompts random has no vocabulary to draw from with --url: use texts")
        concurrency = numbers("--concurrency", given["concurrency"], int, 1)
        temperatures = numbers("--temperature", given["temperature"], float, 0.0)
        same = {name: given[name] for name in ("api_key", "limit", "max_tokens", "repeats", "seed", "cut")}
        return cls(
            url=url,
            model=given["served_model_name"],
            concurrency=concurrency,
            temperatures=temperatures,
            prompts=prompts,
            **same,
        )

    def fetch(self, progress: Progress | None = None) -> list[Prompt]:
        """The prompts, fetched if they must be."""
        return load_prompts(self.prompts, self.limit, progress)


def run(question: Question, json_path: Path | None, out: Path | None = None, again: bool = False) -> list[Record]:
    """Measures the server; `lab/sweep.py` says what becomes of the records. ValueError or RuntimeError where none
    answers as it should."""
    prompts = question.fetch()
    server = Server(question.url, question.api_key, question.model)
    server.connect(prompts[0])

    def endpoint(results: Results, shown: Bar) -> Endpoint:
        return Endpoint(question, prompts, server)

    return sweep(endpoint, json_path, out, again)


# ---- the server -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Answer:
    """One streamed answer. `itl_s`: seconds between its tokens, those of a chunk sharing its time; where chunks do not
    tell their tokens (`by_chunk` false), all tokens after the first chunk share the time since then."""

    num_tokens: int
    ttft_s: float
    itl_s: tuple[float, ...]
    by_chunk: bool


class Server:
    """An OpenAI-compatible server. Several threads may ask it."""

    def __init__(self, url: str, api_key: str | None, model: str | None) -> None:
        self.url, self._model, self._usage = url, model, _USAGE[0]
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._client = self._open()

    def _open(self) -> httpx2.Client:
        # As many connections as there are threads, and a new one for each request: one that is kept may be closed by
        # the server while the next request is on its way, which looks like a server that broke off.
        limits = httpx2.Limits(max_keepalive_connections=0)
        return httpx2.Client(headers=self._headers, timeout=_TIMEOUT, limits=limits)

    def restart(self) -> None:
        """Ends what is running, and asks over new connections from here on."""
        self._client.close()
        self._client = self._open()

    @property
    def model(self) -> str:
        assert self._model is not None, "connect() chooses the model"
        return self._model

    def connect(self, prompt: Prompt) -> None:
        """Chooses the model, and finds out with one token of an answer whether and how the server tells usage."""
        self._model = self._choose(self._served())
        try:
            self.ask(prompt, {"max_tokens": 1})
        except Refused as error:
            if error.status not in (400, 422):
                raise
            self._usage = _USAGE[1]
            self.ask(prompt, {"max_tokens": 1})

    def _served(self) -> list[str]:
        try:
            response = self._client.get(f"{self.url}/models")
        except _NO_ANSWER as error:
            raise RuntimeError(
                f"no server answers at {self.url} ({_said(error)}): is it up and the port right?"
            ) from None
        if response.status_code != 200:
            raise _refusal(response)
        try:
            return [entry["id"] for entry in response.json()["data"]]
        except (ValueError, KeyError, TypeError):
            raise ValueError(f"{self.url}/models lists no models: is this an OpenAI-compatible server?") from None

    def _choose(self, served: Sequence[str]) -> str:
        if self._model is None and len(served) == 1:
            return served[0]
        if self._model is None:
            raise ValueError(f"{self.url} serves {', '.join(served) or 'no model'}: choose with --served-model-name")
        if served and self._model not in served:
            raise ValueError(f"{self.url} does not serve '{self._model}' but {', '.join(served)}")
        return self._model

    def ask(self, prompt: Prompt, body: Mapping[str, Any]) -> Answer:
        """A whole answer. RuntimeError where the stream breaks off, tells an error or no usage; `Refused`."""
        path = "chat/completions" if prompt.messages else "completions"
        asked = {"messages": list(prompt.messages)} if prompt.messages else {"prompt": prompt.text}
        whole = {"model": self.model, "stream": True, "stream_options": self._usage, **asked, **body}
        stream = _Stream(prompt.id)
        try:
            with self._client.stream("POST", f"{self.url}/{path}", json=whole) as response:
                if response.status_code != 200:
                    response.read()
                    raise _refusal(response)
                for event in httpx2.EventSource(response):
                    if event.data != "[DONE]":
                        stream.take(json.loads(event.data))
        except _NO_ANSWER as error:
            raise RuntimeError(f"{prompt.id}: the server broke off ({_said(error)})") from None
        except ValueError as error:
            if isinstance(error, Refused):
                raise
            raise RuntimeError(f"{prompt.id}: the server sent what is not JSON ({error})") from None
        return stream.answer()

    def drafts(self) -> Counter[str]:
        """vLLM's counters so far: drafts, accepted tokens, and accepted tokens by position from 0; empty elsewhere."""
        found: Counter[str] = Counter()
        for line in self._beside("metrics").splitlines():
            if match := _SAMPLE.match(line):
                name, labels, value = match.groups()
                position = _POSITION.search(labels or "")
                found[position[1] if position else name] += float(value)  # pyright: ignore[reportArgumentType]
        return found

    def mean_tau(self) -> float | None:
        """SGLang's mean accepted length, the new anchor included, of all it has served; None elsewhere."""
        text = self._beside("server_info") or self._beside("get_server_info")
        info = json.loads(text) if text.startswith("{") else {}
        stages = [info, *(info.get("decode") or [])]  # prefill and decode may be servers of their own
        states = [state for stage in stages for state in stage.get("internal_states") or []]
        lengths = [state["avg_spec_accept_length"] for state in states if state.get("avg_spec_accept_length")]
        return round(float(np.mean(lengths)), 3) if lengths else None

    def _beside(self, name: str) -> str:
        """A page beside /v1, empty where there is none."""
        try:
            response = self._client.get(f"{self.url.removesuffix('/v1')}/{name}")
        except _NO_ANSWER:
            return ""
        return response.text if response.status_code == 200 else ""


class Refused(ValueError):
    """The server's answer is an error of this status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def _refusal(response: httpx2.Response) -> Refused:
    """What the status and the server's own words come to, in one line."""
    status, where, said = response.status_code, response.request.url, _words(response)
    if status in (401, 403):
        message = f"{where} wants another key ({status}, {said}): give --api-key or set OPENAI_API_KEY"
    elif status == 404:
        message = f"{where} is not there (404, {said}): does --url end with /v1, is the model's name right?"
    else:
        message = f"{where} answers {status}: {said}"
    return Refused(status, message)


def _words(response: httpx2.Response) -> str:
    try:
        told = response.json()
    except ValueError:
        return response.text[:200].strip() or response.reason_phrase
    for key in ("error", "message", "detail"):
        told = told.get(key, told) if isinstance(told, dict) else told
    return str(told)[:200]


def _said(error: Exception) -> str:
    return str(error) or type(error).__name__


class _Stream:
    """The chunks of a prompt's answer as they come."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._begun = time.perf_counter()
        self._seen: list[tuple[float, int | None]] = []  # (when, tokens so far where told) of each chunk with tokens
        self._total: int | None = None
        self._finished = False

    def take(self, chunk: Mapping[str, Any]) -> None:
        now = time.perf_counter()
        if chunk.get("error") or chunk.get("object") == "error":
            raise RuntimeError(f"{self._name}: the server reports {json.dumps(chunk.get('error') or chunk)[:200]}")
        so_far = (chunk.get("usage") or {}).get("completion_tokens")
        if any(_text(choice) for choice in chunk.get("choices", ())) or (so_far or 0) > (self._total or 0) > 0:
            self._seen.append((now, so_far))
        self._total = self._total if so_far is None else so_far
        self._finished |= any(choice.get("finish_reason") for choice in chunk.get("choices", ()))

    def answer(self) -> Answer:
        if not self._finished:
            raise RuntimeError(f"{self._name}: the server ended the stream in the middle of the answer")
        if self._total is None:
            raise RuntimeError(f"{self._name}: the server tells no usage, so its tokens cannot be counted")
        times = [when for when, _ in self._seen] or [time.perf_counter()]
        by_chunk = all(count is not None for _, count in self._seen)
        gaps = self._gaps() if by_chunk else self._even(times, self._total)
        return Answer(self._total, times[0] - self._begun, tuple(gaps), by_chunk)

    def _gaps(self) -> Iterator[float]:
        for (before, old), (now, new) in zip(self._seen, self._seen[1:], strict=False):
            assert old is not None and new is not None, "every chunk told its tokens"
            if new > old:
                yield from [(now - before) / (new - old)] * (new - old)

    @staticmethod
    def _even(times: Sequence[float], total: int) -> list[float]:
        return [(times[-1] - times[0]) / (total - 1)] * (total - 1) if total > 1 and len(times) > 1 else []


def _text(choice: Mapping[str, Any]) -> str:
    """Of a completion, or of a chat, where thoughts are tokens too."""
    delta = choice.get("delta") or {}
    return choice.get("text") or delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning") or ""


# ---- the contender --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Timed:
    """Answers in the order of the prompts, wall time of the whole set (prefill included), what was accepted."""

    answers: tuple[Answer, ...]
    wall_s: float
    drafts: Mapping[str, float]

    @property
    def num_tokens(self) -> int:
        return sum(answer.num_tokens for answer in self.answers)


class Endpoint:
    """A server, asked by as many threads as a cell has concurrency."""

    def __init__(self, question: Question, prompts: list[Prompt], server: Server) -> None:
        self.question, self.prompts, self.server = question, prompts, server
        self._digest = digest(prompts)

    def tasks(self) -> list[Task]:
        return [self._task(*choice) for choice in product(self.question.concurrency, self.question.temperatures)]

    def _task(self, concurrency: int, temperature: float) -> Task:
        asked = self.question
        cell = Cell("server", 0, 0, concurrency, temperature, asked.seed, asked.max_tokens, asked.cut)
        configuration = {
            **{"url": asked.url, "model": self.server.model, "prompts": self._digest, "repeats": asked.repeats},
            **asdict(cell),
        }
        group = Group(concurrency, "auto", "auto", temperature)
        return Task(cell, group, len(self.prompts) * asked.repeats, configuration)

    def measure(self, task: Task, tick: Tick) -> Record:
        cell = task.cell
        warm = [replace(self.prompts[0], id=f"warm-up/{i}") for i in range(cell.concurrency)]
        self._run(warm, replace(cell, max_tokens=min(WARM_UP_TOKENS, cell.max_tokens)), lambda: None)
        runs = [self._run(self.prompts, cell, tick) for _ in range(self.question.repeats)]
        best = min(runs, key=lambda run: run.wall_s)
        return {**self.settings(task), **_figures(best), **_acceptance(best, self.server)}

    def _run(self, prompts: Sequence[Prompt], cell: Cell, tick: Tick) -> Timed:
        before, begun = self.server.drafts(), time.perf_counter()
        with ThreadPoolExecutor(cell.concurrency) as pool:
            waiting = [pool.submit(self.server.ask, prompt, _body(prompt, cell)) for prompt in prompts]
            try:
                for done in as_completed(waiting):
                    done.result()
                    tick()
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                self.server.restart()  # else the pool waits for answers that nobody wants
                raise
        wall_s = time.perf_counter() - begun
        return Timed(tuple(answer.result() for answer in waiting), wall_s, self.server.drafts() - before)

    def settings(self, task: Task) -> Record:
        shared = settings(task.cell, self.server.model, None, None, None, self.question.url, len(self.prompts))
        return {**shared, "budget": None, "prompt_set": self.question.prompts}

    def close(self) -> None:
        """Lets go of the connections."""
        self.server.restart()


def _body(prompt: Prompt, cell: Cell) -> dict[str, Any]:
    stop = {"stop": list(prompt.stop)} if cell.cut and prompt.stop else {}
    return {"max_tokens": cell.max_tokens, "temperature": cell.temperature, "seed": cell.seed, **stop}


def _figures(timed: Timed) -> Record:
    """The fields of an engine's record; null what a server does not tell."""
    ttft_s = [answer.ttft_s for answer in timed.answers]
    itl_s = [gap for answer in timed.answers for gap in answer.itl_s]
    unknown = ("speedup_vs_ar", "tau_cut", "tau_no_repeat", "simulated", "peak_memory_bytes", "rounds", "graph_share")
    verdicts = ("identical_prompts", "near_tie_prompts", "mismatched_prompts")
    return {
        **dict.fromkeys((*unknown, *verdicts, "fallbacks", *(f"ms_{stage}" for stage in STAGES))),
        "output_tokens": timed.num_tokens,
        "tok_s": round(timed.num_tokens / timed.wall_s, 2),
        "divergences": [],
        "ttft_ms": round(1000 * float(np.median(ttft_s)), 2),
        **percentiles_ms("ttft", ttft_s),
        **percentiles_ms("itl", itl_s),
        "itl_by_chunk": all(answer.by_chunk for answer in timed.answers),
        "fallbacks_by_name": {},
        "tree": [],
        "git_commit": git_commit(),
        "versions": versions(),
    }


def _acceptance(timed: Timed, server: Server) -> Record:
    """tau and acceptance per position, and who told them."""
    if drafts := timed.drafts.get("drafts"):
        positions = sorted((int(name), count) for name, count in timed.drafts.items() if name.isdecimal())
        return {
            "tau": round(1 + timed.drafts.get("accepted_tokens", 0) / drafts, 3),
            "accept_per_position": [round(count / drafts, 4) for _, count in positions],
            "tau_told_by": "vLLM's /metrics, of this cell",
        }
    tau = server.mean_tau()
    return {"tau": tau, "accept_per_position": [], "tau_told_by": tau and "SGLang's /server_info, since it started"}
