# Owns: the prompts of a bisection, as texts or token ids that a child process can be handed.
# Promises: the same prompts every time; a set of random ids or of chats needs no engine.
# Never: runs anything.
"""Prompts for `ratoon bisect`."""

from __future__ import annotations

from ratoon.lab.bisect.case import Prompt
from ratoon.lab.prompts import load_prompts, random_ids

TEXTS = (
    'def fibonacci(n):\n    """Return the n-th Fibonacci number."""\n',
    "The three primary colours are",
)
"""Code, where drafts are long, and prose, where they are short."""


def asked(model: str, source: str | None, limit: int) -> tuple[Prompt, ...]:
    """The first prompts of a set (lab/prompts.py), or bisect's own texts. Raises as load_prompts does."""
    if source is None:
        return TEXTS[:limit]
    from ratoon.models.hub import resolve
    from ratoon.models.weights import load_config
    from ratoon.runtime.text import Tokenizer

    path, found = resolve(model), []
    for prompt in load_prompts(source, limit):
        if prompt.num_random:
            found.append(tuple(random_ids(prompt, load_config(path).vocab_size)))
        elif prompt.messages:
            found.append(tuple(Tokenizer.load(path).encode_chat(prompt.messages)))
        else:
            found.append(prompt.text)
    return tuple(found)
