"""Text processing: tokenization, chat templates, detokenization, stop strings.

Nothing here uses the engine or torch, so a server can do all of it in another process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from tokenizers import Tokenizer as BackendTokenizer
from transformers.utils.chat_template_utils import render_jinja_template

from aquifer.errors import ConfigError, RequestError, one_line
from aquifer.fields import LIST_BYTES, Fields, read_fields, read_text

_SPECIAL_TOKENS = frozenset(
    f"{kind}_token" for kind in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
)
_TEMPLATES = 'a text, or a list of objects, each with a "name" and a "template" as text'

# Exceptions that a template can raise: it runs methods and arithmetic on the client's values.
_TEMPLATE_ERRORS = (
    TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)


class Tokenizer:
    """A checkpoint's tokenizer and chat template.

    Args:
        backend: the tokenizer of the `tokenizers` package.
        chat_template: Jinja source, or None if the model has none.
        special_tokens: variables of the template, such as `bos_token`.
    """

    def __init__(
        self,
        backend: BackendTokenizer,
        chat_template: str | None,
        special_tokens: Mapping[str, str],
    ) -> None:
        self.backend = backend
        self.chat_template = chat_template
        self._special_tokens = dict(special_tokens)

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
        if not file.is_file():
            return None
        try:
            backend = BackendTokenizer.from_file(str(file))
        except Exception as error:  # the backend raises bare Exception
            raise ConfigError(f"cannot read {file}: {one_line(error)}") from error
        config_file = folder / "tokenizer_config.json"
        fields = Fields(config_file, {})
        if config_file.is_file():
            fields = read_fields(config_file, LIST_BYTES)
        special_tokens, default_template = _special_tokens(fields), _default_template(fields)
        template_file = folder / "chat_template.jinja"
        if chat_template is None and template_file.is_file():
            chat_template = read_text(template_file, LIST_BYTES)
        return cls(backend, chat_template or default_template, special_tokens)

    @property
    def vocab_size(self) -> int:
        """Vocabulary size, including added tokens."""
        return int(self.backend.get_vocab_size(with_added_tokens=True))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Encode a text as token ids.

        Raises:
            RequestError: the text is not valid Unicode: JSON can express lone surrogates.
        """
        try:
            return list(self.backend.encode(text, add_special_tokens=add_special_tokens).ids)
        except TypeError as error:
            raise RequestError("the text is not valid Unicode", param="prompt") from error

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Decode token ids to text; incomplete UTF-8 sequences become U+FFFD."""
        return str(self.backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens))

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
        template = chat_template or self.chat_template
        if template is None:
            raise RequestError(
                "this model has no chat template; use /v1/completions, or give the server one "
                "with --chat-template",
                param="messages",
            )
        try:
            rendered, _ = render_jinja_template(
                conversations=[list(messages)],
                chat_template=template,
                add_generation_prompt=add_generation_prompt,
                **self._special_tokens,
                **template_args,
            )
        except _TEMPLATE_ERRORS as error:
            raise RequestError(
                f"the model's chat template refused the messages: {error}", param="messages"
            ) from error
        return self.encode(rendered[0], add_special_tokens=False)


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
