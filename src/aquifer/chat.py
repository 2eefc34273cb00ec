"""`aquifer run`: answers in the terminal, one or a conversation."""

from __future__ import annotations

import contextlib
import re
import signal
import sys
import time
from collections.abc import Generator, Iterator
from dataclasses import replace
from types import FrameType
from typing import TYPE_CHECKING

from aquifer.errors import ContextLengthError, RequestError

if TYPE_CHECKING:
    from aquifer.engine.params import SamplingParams
    from aquifer.llm import LLM
    from aquifer.text import Delta

_HELP = """\
/help   this text
/clear  forget the conversation
/bye    leave; so does Ctrl-D
Ctrl-C stops an answer. The arrow keys edit a line and bring back earlier ones."""

_COMMAND = re.compile(r"/\w*|/\?")


def message(role: str, content: str) -> dict[str, str]:
    """A message of a conversation."""
    return {"role": role, "content": content}


def converse(llm: LLM, params: SamplingParams, is_chat: bool) -> None:
    """Read lines and answer them until /bye or the end of the input.

    Args:
        llm: the model.
        params: how each answer is sampled.
        is_chat: whether the lines are messages of a conversation; otherwise each is completed by
            itself.
    """
    with contextlib.suppress(ImportError):  # not in every build of Python
        import readline  # noqa: F401  # gives input() its line editing and history
    print("/help lists the commands.", file=sys.stderr)
    history: list[dict[str, str]] = []
    while True:
        try:
            line = input(">>> ").strip()
        except (EOFError, KeyboardInterrupt):
            print()
            return
        if _COMMAND.fullmatch(line):
            if line == "/bye":
                return
            if line == "/clear":
                history.clear()
            elif line in ("/help", "/?"):
                print(_HELP, file=sys.stderr)
            else:
                print(f"error: no command {line}; /help lists them", file=sys.stderr)
        elif line:
            _answer(llm, line, params, history if is_chat else None)


def _answer(
    llm: LLM, line: str, params: SamplingParams, history: list[dict[str, str]] | None
) -> None:
    """Answer a line; it and the answer are added to the conversation, if there is one."""
    asked = [*(history or ()), message("user", line)]
    try:
        answer, _ = say(llm, line if history is None else asked, params)
    except RequestError as error:
        print(f"error: {error}", file=sys.stderr)
    else:
        if history is not None:
            history[:] = [*asked, message("assistant", answer)]


def say(llm: LLM, prompt: str | list[dict[str, str]], params: SamplingParams) -> tuple[str, bool]:
    """Print an answer as it is generated, and on a terminal how fast that was.

    Returns: its text, and whether it is complete: Ctrl-C ends it early.
    """
    pieces: list[str] = []
    num_tokens = 0
    start_s = first_s = last_s = time.monotonic()
    stream = _stream(llm, prompt, params)
    with _interrupts_counted() as interrupts, contextlib.closing(stream):
        for delta in stream:
            print(delta.text, end="", flush=True)
            pieces.append(delta.text)
            last_s = time.monotonic()
            first_s = last_s if num_tokens == 0 else first_s
            num_tokens += len(delta.token_ids)
            if interrupts:
                break
    print()
    if sys.stderr.isatty():
        print(speed(num_tokens, first_s - start_s, last_s - first_s), file=sys.stderr)
    return "".join(pieces), not interrupts


def _stream(
    llm: LLM, prompt: str | list[dict[str, str]], params: SamplingParams
) -> Generator[Delta, None, None]:
    """Stream an answer; what the context has left is enough if that is less than `max_tokens`."""
    try:
        yield from llm.stream(prompt, params)
    except ContextLengthError:  # before the first token
        yield from llm.stream(prompt, replace(params, max_tokens=None))


def speed(num_tokens: int, first_s: float, others_s: float) -> str:
    """One line about the time that an answer took.

    Args:
        num_tokens: its tokens.
        first_s: seconds from the request to the first token.
        others_s: seconds from the first token to the last.
    """
    rate = f", then {(num_tokens - 1) / others_s:.1f} tokens/s" if others_s > 0 else ""
    noun = "token" if num_tokens == 1 else "tokens"
    return f"[{num_tokens} {noun}, the first after {first_s:.2f} s{rate}]"


@contextlib.contextmanager
def _interrupts_counted() -> Iterator[list[int]]:
    """Collect Ctrl-C instead of raising it, which could interrupt the engine during a step."""
    seen: list[int] = []

    def note(number: int, _: FrameType | None) -> None:
        seen.append(number)

    previous = signal.signal(signal.SIGINT, note)
    try:
        yield seen
    finally:
        signal.signal(signal.SIGINT, previous)
