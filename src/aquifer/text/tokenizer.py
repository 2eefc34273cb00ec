"""Text processing: tokenization, chat templates, detokenization, stop strings.

Nothing here uses the engine or torch, so a server can do all of it in another process.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from tokenizers import Tokenizer as BackendTokenizer
from transformers.utils.chat_template_utils import render_jinja_template

from aquifer.errors import ConfigError, RequestError

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
            ConfigError: a file exists but cannot be read.
        """
        file = folder / "tokenizer.json"
        if not file.is_file():
            return None
        try:
            backend = BackendTokenizer.from_file(str(file))
            config = _read_optional_json(folder / "tokenizer_config.json")
            template_file = folder / "chat_template.jinja"
            if chat_template is None and template_file.is_file():
                chat_template = template_file.read_text(encoding="utf-8")
            special_tokens = {
                name: token["content"] if isinstance(token, dict) else token
                for name, token in config.items()
                if name.endswith("_token") and isinstance(token, (str, dict))
            }
            return cls(backend, chat_template or _default_template(config), special_tokens)
        except Exception as error:  # the backend raises bare Exception
            raise ConfigError(f"cannot read the tokenizer in {folder}: {error!r}") from error

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


def _read_optional_json(file: Path) -> dict[str, Any]:
    content = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    if not isinstance(content, dict):
        raise ValueError(f"{file.name} is not a JSON object")
    return content


def _default_template(config: Mapping[str, Any]) -> str | None:
    """Return the default chat template of a tokenizer configuration, which may name several."""
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {entry["name"]: entry["template"] for entry in template}
        template = named.get("default")
    return template if isinstance(template, str) else None
