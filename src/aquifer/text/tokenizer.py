"""Tokenizer and chat template of a checkpoint.

Nothing here uses the engine or torch, so a server can do all of it in another process.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as BackendTokenizer

from aquifer.errors import ConfigError, ContextLengthError, EngineError, RequestError, one_line
from aquifer.fields import LIST_BYTES, Fields, is_there, read_fields, read_text
from aquifer.sizes import format_size
from aquifer.text.chat_template import ChatTemplate
from aquifer.text.work import decodes_usually, is_usual

_SPECIAL_TOKENS = frozenset(
    f"{kind}_token" for kind in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
)
_TEMPLATES = 'a text, or a list of objects, each with a "name" and a "template" as text'

_MOST_BYTES = 256 << 20
"""Size of the largest `tokenizer.json`. Real ones have up to 40 MB."""

_MANY_TOKENS = 256
"""From here on, decoding is worth to let other threads run meanwhile."""


_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")
"""A token that is a byte, where only characters that are in no other token are written as bytes."""


def _byte_characters() -> dict[str, int]:
    """Return the bytes by the characters that byte-level tokenizers write for them.

    Printable bytes are their Latin-1 character; the others are U+0100 and so on, in their order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + number): byte for number, byte in enumerate(others)
    }


_BYTES = _byte_characters()


class Tokenizer:
    """A checkpoint's tokenizer and chat template.

    Args:
        backend: the tokenizer of the `tokenizers` package.
        chat_template: Jinja source, or None if the model has none.
        special_tokens: variables of the template, such as `bos_token`.
        config: fields of the checkpoint's `tokenizer_config.json`, for `info`.

    Attributes:
        special_token_ids: the tokens that `decode` leaves out, if it is to.
        is_usual: whether each short text is encoded in a short time.
    """

    def __init__(
        self,
        backend: BackendTokenizer,
        chat_template: str | None,
        special_tokens: Mapping[str, str],
        config: Mapping[str, Any] | None = None,
    ) -> None:
        self.backend = backend
        self.chat_template = chat_template
        self._special_tokens = dict(special_tokens)
        self._config = dict(config or {})
        added = backend.get_added_tokens_decoder()
        self.special_token_ids = frozenset(
            token_id for token_id, token in added.items() if token.special
        )
        self.is_usual = is_usual(backend)
        self._max_token_chars = max(map(len, backend.get_vocab(with_added_tokens=True)), default=1)

    @classmethod
    def load(cls, folder: Path, chat_template: str | None = None) -> Tokenizer | None:
        """Load `tokenizer.json` and its companion files; None if the checkpoint has no tokenizer.

        Args:
            folder: the checkpoint.
            chat_template: replaces the checkpoint's own.

        Raises:
            ConfigError: a file exists but cannot be read, or a field of it is impossible.
        """
        file = folder / "tokenizer.json"
        if not is_there(file):
            return None
        backend = _read_backend(file)
        config_file = folder / "tokenizer_config.json"
        fields = Fields(config_file, {})
        if is_there(config_file):
            fields = read_fields(config_file, LIST_BYTES)
        special_tokens, default_template = _special_tokens(fields), _default_template(fields)
        template_file = folder / "chat_template.jinja"
        if chat_template is None and is_there(template_file):
            chat_template = read_text(template_file, LIST_BYTES)
        return cls(backend, chat_template or default_template, special_tokens, fields.values)

    def info(self) -> dict[str, Any]:
        """The tokenizer's configuration as vLLM's server shows it.

        Returns: the fields of `tokenizer_config.json`, with special tokens as text, and with the
            chat template that is used. A class, a special token or a template that the checkpoint
            does not name is there too: the class of tokenizers read from `tokenizer.json`, or None.
        """
        return {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **dict.fromkeys(sorted(_SPECIAL_TOKENS)),
            **{name: value for name, value in self._config.items() if value is not None},
            **self._special_tokens,
            "chat_template": self.chat_template,
        }

    def check_decoder(self) -> None:
        """Check that outputs can be decoded beside others, in an event loop.

        Raises:
            ConfigError: the decoder may take long, or much memory, for a few tokens.
        """
        if not decodes_usually(self.backend):
            raise ConfigError(
                "the decoder of its tokenizer.json has a regular expression, or replacements one "
                "after another, that could stop the server for minutes or take all memory; "
                "convert the tokenizer again with a recent version of Transformers"
            )

    def encode(
        self, text: str, add_special_tokens: bool = True, max_tokens: int | None = None
    ) -> list[int]:
        """Encode a text as token ids. Other threads run meanwhile.

        Args:
            text: the text.
            add_special_tokens: add those that the tokenizer puts around a text.
            max_tokens: a text that cannot be encoded in so many tokens is refused at once; one that
                can may still take more.

        Raises:
            ContextLengthError: the text is longer than `max_tokens` of the longest token.
            RequestError: it is not valid Unicode: JSON can express lone surrogates. Or the
                tokenizer fails on it.
        """
        if max_tokens is not None and len(text) > max_tokens * self._max_token_chars:
            raise ContextLengthError(
                f"the prompt has {len(text)} characters and this model's context length is "
                f"{max_tokens} tokens, which hold at most {max_tokens * self._max_token_chars}; "
                "shorten the prompt",
                param="prompt",
            )
        try:
            (encoding,) = self.backend.encode_batch_fast(
                [text], add_special_tokens=add_special_tokens
            )
        except TypeError as error:
            raise RequestError("the text is not valid Unicode", param="prompt") from error
        except BaseException as error:
            reason = reason_of(error)
            raise RequestError(
                f"the model's tokenizer cannot encode the text: {reason}", param="prompt"
            ) from error
        return list(encoding.ids)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Decode token ids to text; incomplete UTF-8 sequences become U+FFFD.

        Raises:
            EngineError: the tokenizer fails on them.
        """
        ids = list(token_ids)
        try:
            if len(ids) < _MANY_TOKENS:
                return str(self.backend.decode(ids, skip_special_tokens=skip_special_tokens))
            (text,) = self.backend.decode_batch([ids], skip_special_tokens=skip_special_tokens)
        except BaseException as error:
            raise cannot_decode(error) from error
        return str(text)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the UTF-8 bytes of a token; it may be part of a character."""
        text = self.decode([token_id], skip_special_tokens=False)
        token = self.backend.id_to_token(token_id)
        if "\ufffd" not in text or token is None:
            return text.encode()
        if (fallback := _BYTE_TOKEN.fullmatch(token)) is not None:
            return bytes.fromhex(fallback[1])
        if all(character in _BYTES for character in token):
            return bytes(_BYTES[character] for character in token)
        return text.encode()

    def chat(self, template: str | None = None) -> ChatTemplate:
        """The chat template: the one given, or the model's own.

        Raises:
            RequestError: the model has none.
        """
        source = template or self.chat_template
        if source is None:
            raise RequestError(
                "this model has no chat template; use /v1/completions, or give the server one "
                "with --chat-template",
                param="messages",
            )
        return ChatTemplate(source, self._special_tokens)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        chat_template: str | None = None,
        **template_args: Any,
    ) -> list[int]:
        """Render a conversation with the chat template and encode it as token ids.

        Raises:
            RequestError: the model has no chat template, or the template refuses the messages.
        """
        text = self.chat(chat_template).render(messages, add_generation_prompt, template_args)
        return self.encode(text, add_special_tokens=False)


def reason_of(error: BaseException) -> str:
    """Why a call of the `tokenizers` package failed, for another message.

    Its code in Rust raises bare exceptions. Where it panics, as on an index that is out of bounds,
    the exception is no `Exception`, and its class has no name that could be imported.

    Raises:
        BaseException: the error itself, if it is neither: the process is to end.
    """
    if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
        raise error
    return one_line(error)


def cannot_decode(error: BaseException) -> EngineError:
    """The error of a request whose output the tokenizer fails on, as for `reason_of`."""
    return EngineError(f"the model's tokenizer cannot decode the output: {reason_of(error)}")


def _read_backend(file: Path) -> BackendTokenizer:
    """Read a `tokenizer.json`.

    What it says of truncation and padding is for training; as in Transformers, it is not used.

    Raises:
        ConfigError: it is too large, or cannot be read.
    """
    try:
        num_bytes = file.stat().st_size
        if num_bytes > _MOST_BYTES:
            raise ConfigError(
                f"cannot read {file}: it has more than {format_size(_MOST_BYTES)}; download it "
                "again"
            )
        backend = BackendTokenizer.from_file(str(file))
    except ConfigError:
        raise
    except BaseException as error:
        raise ConfigError(f"cannot read {file}: {reason_of(error)}") from error
    backend.no_truncation()
    backend.no_padding()
    return backend


def _special_tokens(fields: Fields) -> dict[str, str]:
    """Special tokens of a tokenizer configuration, by field.

    Further fields end in `_token` too, such as the flag `add_bos_token`; they are left out.

    Raises:
        ConfigError: one of those that all tokenizers have is no text.
    """
    tokens = {}
    for name in fields:
        if name.endswith("_token"):
            value = fields.values[name]
            content = value.get("content") if isinstance(value, dict) else value
            if isinstance(content, str):
                tokens[name] = content
            elif name in _SPECIAL_TOKENS:
                raise fields.error(name, 'a text, or an object with a text as its "content"')
    return tokens


def _default_template(fields: Fields) -> str | None:
    """Return the default chat template of a tokenizer configuration, which may name several.

    Raises:
        ConfigError: it is neither a text nor a list of named ones.
    """
    template = fields.values.get("chat_template")
    if isinstance(template, list):
        named = dict(_named_template(fields, entry) for entry in template)
        return named.get("default")
    if template is not None and not isinstance(template, str):
        raise fields.error("chat_template", _TEMPLATES)
    return template


def _named_template(fields: Fields, entry: Any) -> tuple[str, str]:
    parts = [entry.get(part) for part in ("name", "template")] if isinstance(entry, dict) else []
    match parts:
        case [str(name), str(template)]:
            return name, template
    raise fields.error("chat_template", _TEMPLATES)
