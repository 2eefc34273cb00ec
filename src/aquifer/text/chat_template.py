"""Chat templates: from a conversation to the text of a prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aquifer.errors import RequestError

RENDERER = "transformers.utils.chat_template_utils"
"""The module that renders. Importing it takes a second, so it is imported with the first use; a
process that is to render soon may import it before."""

_MAX_MESSAGE_CHARS = 1000


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """A chat template with the variables that a tokenizer gives it.

    Args:
        source: Jinja.
        special_tokens: variables such as `bos_token`.
    """

    source: str
    special_tokens: Mapping[str, str]

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool,
        variables: Mapping[str, Any],
    ) -> str:
        """Render a conversation.

        Args:
            messages: the conversation.
            add_generation_prompt: whether the text ends with the beginning of an answer.
            variables: further variables of the template.

        Raises:
            RequestError: the template refuses the messages. It runs methods and arithmetic on the
                client's values, so any exception can come from it.
            MemoryError: it needs more memory than the process may have.
        """
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            rendered, _ = render_jinja_template(
                conversations=[list(messages)],
                chat_template=self.source,
                add_generation_prompt=add_generation_prompt,
                **self.special_tokens,
                **variables,
            )
        except MemoryError:
            raise
        except Exception as error:
            raise RequestError(
                f"the chat template refused the messages: {error}"[:_MAX_MESSAGE_CHARS],
                param="messages",
            ) from error
        return str(rendered[0])
