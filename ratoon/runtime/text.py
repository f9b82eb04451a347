# Owns: text to token ids and back, and chat templates.
# Promises: streamed pieces joined are `decode` of all ids and split no character; message text cannot forge a marker.
# Never: runs a template outside the sandbox, drops or rewrites a token id.
"""Tokenizers (`tokenizers`), incremental decoding, chat templates (sandboxed jinja2)."""

from __future__ import annotations

import codecs
import datetime
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer as HFTokenizer

from ratoon.models.gguf import open_gguf
from ratoon.models.weights import load_config, read_json

Message = Mapping[str, Any]
_BYTE_FALLBACK = ["Replace", "ByteFallback", "Fuse", "Strip"]
_PRIVATE_PLANE = range(0xF0000, 0x10FFFE)


class Tokenizer:
    """One model's tokenizer, chat template and stop ids."""

    def __init__(
        self,
        backend: HFTokenizer,
        chat_template: str | None = None,
        special_tokens: Mapping[str, str] | None = None,
        eos_ids: tuple[int, ...] = (),
    ) -> None:
        self.backend = backend
        self.backend.no_truncation()
        self.backend.no_padding()
        self.chat_template, self.eos_ids = chat_template, eos_ids
        self.special_tokens = dict(special_tokens or {})

    @classmethod
    def load(cls, path: Path | str) -> Tokenizer:
        """From a model directory (tokenizer.json) or a .gguf file.

        Raises FileNotFoundError without tokenizer.json, ValueError for a tokenizer we do not know.
        """
        path = Path(path)
        if path.is_dir():
            return cls(_read_tokenizer_json(path), *_read_chat_settings(path), load_config(path).eos_ids)
        file = open_gguf(path)
        return cls(file.tokenizer(), file.chat_template, file.special_tokens(), file.config().eos_ids)

    @property
    def vocab_size(self) -> int:
        """Ids that the tokenizer knows; the model's vocabulary may be padded beyond."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    def token_id(self, token: str) -> int | None:
        """The id of one exact token, or None."""
        return self.backend.token_to_id(token)

    def encode(self, text: str, add_special: bool = True, allow_special: bool = True) -> list[int]:
        """Token ids. `add_special` adds what the tokenizer puts around a text (BOS).

        `allow_special` reads special tokens written in the text ("<|im_end|>") as themselves; False keeps them text.
        Raises ValueError for text that is not valid Unicode.
        """
        _check_text(text)
        backend = self.backend if allow_special else self._literal
        return backend.encode(text, add_special_tokens=add_special).ids

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """Text of the ids; bytes that are no UTF-8 become U+FFFD, unknown ids nothing."""
        detokenizer = Detokenizer(self, skip_special)
        return detokenizer.put(ids) + detokenizer.finish()

    def apply_chat(self, messages: Sequence[Message], **kwargs: Any) -> str:
        """The chat template's text for these messages; `add_generation_prompt` is True unless given.

        Raises ValueError when there is no template or the template refuses.
        """
        if self.chat_template is None:
            raise ValueError("this model has no chat template: give a plain prompt, or use an instruction-tuned model")
        variables = {"tools": None, "documents": None, "add_generation_prompt": True, **self.special_tokens, **kwargs}
        try:
            return self._compiled.render(messages=messages, **variables)
        except (jinja2.TemplateError, TypeError, OverflowError) as error:
            raise ValueError(f"the chat template refuses these messages: {error}") from error

    def encode_chat(self, messages: Sequence[Message], **kwargs: Any) -> list[int]:
        """Token ids of `apply_chat`, where only the template's own special tokens are special.

        A special token written inside a message or tool stays plain text, so that a user cannot forge a turn
        (Hugging Face's tokenize=True reads it as special). Without such text both give the same ids.
        """
        given = {"messages": messages, **kwargs}
        shield = _Shield(self._special_pattern, given)
        shielded = {key: shield.hide(value) for key, value in given.items()}
        text = self.apply_chat(**shielded)
        if not shield.hidden:
            return self.encode(text, add_special=False)
        ids: list[int] = []
        for piece, special in self._split_special(text):
            ids += self.encode(shield.restore(piece), add_special=False, allow_special=special)
        return ids

    def _split_special(self, text: str) -> Iterator[tuple[str, bool]]:
        """(piece, is it one special token), in order, empty pieces left out."""
        if self._special_pattern is None:
            yield text, False
            return
        for index, piece in enumerate(self._special_pattern.split(text)):
            if piece:
                yield piece, index % 2 == 1

    @cached_property
    def _special_pattern(self) -> re.Pattern[str] | None:
        """Matches any special token, the longest first, as one group."""
        tokens = [token.content for token in self.backend.get_added_tokens_decoder().values() if token.special]
        longest = sorted(tokens, key=len, reverse=True)
        return re.compile("(" + "|".join(map(re.escape, longest)) + ")") if tokens else None

    @cached_property
    def _literal(self) -> HFTokenizer:
        """A second tokenizer that never reads special tokens in text: the switch is no argument of encode."""
        literal = HFTokenizer.from_str(self.backend.to_str())
        literal.encode_special_tokens = True
        return literal

    @cached_property
    def _compiled(self) -> jinja2.Template:
        assert self.chat_template is not None
        try:
            return _environment().from_string(self.chat_template)
        except jinja2.TemplateError as error:
            raise ValueError(f"the chat template does not parse: {error}") from error

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids of tokens that are no text."""
        return frozenset(i for i, token in self.backend.get_added_tokens_decoder().items() if token.special)

    @cached_property
    def token_bytes(self) -> TokenBytes:
        """The bytes of each token."""
        return TokenBytes(self.backend)


class Detokenizer:
    """Decodes a stream: holds back a character until its last byte has come."""

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = True) -> None:
        self._tokenizer, self._skip = tokenizer, skip_special
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._bytes = tokenizer.token_bytes
        self._started = False

    def put(self, ids: Iterable[int]) -> str:
        """The text that these further ids complete."""
        kept = (i for i in ids if not (self._skip and i in self._tokenizer.special_ids))
        data = b"".join(self._bytes.of(i) for i in kept)
        if data and not self._started:
            self._started = True
            data = data.removeprefix(self._bytes.stripped)
        return self._utf8.decode(data)

    def finish(self) -> str:
        """What is still held back, as U+FFFD."""
        return self._utf8.decode(b"", final=True)


class TokenBytes:
    """The bytes of each token, for the two decoders of Llama and Qwen tokenizers."""

    def __init__(self, backend: HFTokenizer) -> None:
        self._backend = backend
        decoder = json.loads(backend.to_str()).get("decoder") or {}
        steps = [step["type"] for step in decoder.get("decoders", [decoder]) if step]
        if steps not in (["ByteLevel"], _BYTE_FALLBACK, _BYTE_FALLBACK[:-1]):
            raise ValueError(f"tokenizer decoder {steps} not supported: byte-level or byte-fallback BPE only")
        self._byte_level = steps == ["ByteLevel"]
        self.stripped = b" " if "Strip" in steps else b""

    def of(self, token_id: int) -> bytes:
        """Bytes of one id; none for an id that the tokenizer does not know."""
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if self._byte_level:
            known = all(character in _BYTE_OF for character in token)
            return bytes(_BYTE_OF[character] for character in token) if known else token.encode()
        if re.fullmatch(r"<0x[0-9A-F]{2}>", token):
            return bytes([int(token[3:5], 16)])
        return token.replace("\u2581", " ").encode()


class _Shield:
    """Swaps special tokens in caller-given text for private characters while a template runs."""

    def __init__(self, pattern: re.Pattern[str] | None, given: Any) -> None:
        self._pattern = pattern
        self._character: dict[str, str] = {}
        used = {c for text in _strings(given) for c in text if ord(c) >= _PRIVATE_PLANE.start}
        self._free = (chr(code) for code in _PRIVATE_PLANE if chr(code) not in used)

    def hide(self, value: Any) -> Any:
        """The same structure with every special token in its strings replaced."""
        if isinstance(value, str):
            return self._pattern.sub(self._swap, value) if self._pattern else value
        if isinstance(value, Mapping):
            return {key: self.hide(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.hide(item) for item in value]
        return value

    def _swap(self, match: re.Match[str]) -> str:
        token = match[0]
        if token not in self._character:
            self._character[token] = next(self._free)
        return self._character[token]

    @property
    def hidden(self) -> bool:
        """Whether anything was replaced."""
        return bool(self._character)

    def restore(self, text: str) -> str:
        """Private characters back to the tokens' text."""
        for token, character in self._character.items():
            text = text.replace(character, token)
        return text


class _GenerationTag(Extension):
    """`{% generation %}` marks the assistant's words for training; here it only passes them through."""

    tags = {"generation"}  # noqa: RUF012 (jinja declares a set)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    """The environment that Hugging Face renders chat templates in."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    # The plain `dict` class hands its unbound methods to the template, past the sandbox's mutation check.
    environment.globals["dict"] = _make_dict
    environment.globals["namespace"] = _Namespace
    return environment


class _Namespace(jinja2.utils.Namespace):
    """A template's namespace without underscore names, which reach Python internals."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        values = dict(*args, **kwargs)
        for name in values:
            _check_name(name)
        super().__init__(values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace cannot hold {name!r}")


def _make_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja's own tojson escapes HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item)


def _check_text(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(
            f"the prompt is not valid UTF-8: character {error.start} is a lone surrogate (a raw byte that was no UTF-8)"
        ) from error


def _byte_of_character() -> dict[str, int]:
    """GPT-2's printable stand-ins for bytes (public encoder.py): printable bytes stand for themselves."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


_BYTE_OF = _byte_of_character()


def _read_tokenizer_json(folder: Path) -> HFTokenizer:
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise FileNotFoundError(f"no tokenizer.json in {folder}: save the tokenizer in its fast form")
    data = file.read_text(encoding="utf-8")
    try:
        json.loads(data)
        return HFTokenizer.from_str(data)
    except Exception as error:  # the package raises bare Exception for a file it cannot read
        raise ValueError(f"cannot read {file}: {error}") from error


def _read_chat_settings(folder: Path) -> tuple[str | None, dict[str, str]]:
    """Chat template (chat_template.jinja first) and the named special tokens of tokenizer_config.json."""
    file, template_file = folder / "tokenizer_config.json", folder / "chat_template.jinja"
    settings = read_json(file) if file.is_file() else {}
    template = settings.get("chat_template")
    if isinstance(template, list):
        named = {entry["name"]: entry["template"] for entry in template}
        template = named.get("default")
    if template_file.is_file():
        template = template_file.read_text(encoding="utf-8")
    named = {}
    for key in ("bos_token", "eos_token", "unk_token", "pad_token"):
        value = settings.get(key)
        if value is not None:
            named[key] = value["content"] if isinstance(value, Mapping) else value
    return template, named
