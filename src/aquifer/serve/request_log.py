"""The log of requests: a line when one is sent to the engine, and one when it ends."""

from __future__ import annotations

import logging
import time
from dataclasses import fields

from aquifer.engine.outputs import FinishReason
from aquifer.engine.params import Request, SamplingParams

_log = logging.getLogger(__name__)

_DEFAULTS = SamplingParams()


class RequestLog:
    """Logs requests at level info.

    A line never has a text of a client as it is: prompts are left out or quoted and cut, and of the
    parameters that hold texts or lists only the number of entries is logged.

    Args:
        max_prompt_len: characters of each prompt to log, or token ids where it did not come as one
            text; None for none.
    """

    def __init__(self, max_prompt_len: int | None = None) -> None:
        self._max_prompt_len = max_prompt_len

    def received(self, request: Request, prompt: str | None) -> None:
        """Log a request that is sent to the engine.

        Args:
            request: the request.
            prompt: the prompt as the client sent it; None for token ids and for a conversation.
        """
        shown = ""
        if self._max_prompt_len is not None:
            whole = request.prompt_token_ids if prompt is None else prompt
            shown = f", prompt {whole[: self._max_prompt_len]!r}"
        _log.info(
            "Received request %s: model %s, %d prompt tokens, params: %s%s",
            request.request_id,
            request.model,
            len(request.prompt_token_ids),
            _described(request.params),
            shown,
        )

    def ended(self, request: Request, num_tokens: int, reason: FinishReason | None) -> None:
        """Log the end of a request.

        Args:
            request: the request.
            num_tokens: tokens of its completions together.
            reason: why its last completion ended; None if the engine refused the request.
        """
        _log.info(
            "Finished request %s: %d output tokens in %.3f s, %s",
            request.request_id,
            num_tokens,
            time.monotonic() - request.arrival_s,
            "refused" if reason is None else f"finish reason {reason}",
        )


def _described(params: SamplingParams) -> str:
    """The parameters that are not the defaults; of a text, a list or a dictionary its length."""
    parts = []
    for field in fields(params):
        value = getattr(params, field.name)
        if value == getattr(_DEFAULTS, field.name):
            continue
        if field.name == "stop":
            value = f"({len(params.stop_strings)} texts)"
        elif not isinstance(value, str | int | float | None):
            value = f"({len(value)} tokens)"
        parts.append(f"{field.name}={value}")
    return ", ".join(parts) or "defaults"
