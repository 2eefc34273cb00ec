"""Recorded traces of requests, and lists of lengths without arrival times.

A trace has the lengths of prompts and outputs, not their content. `PromptMaker` generates token ids
such that prompts share exactly the prefixes that the trace says.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import math
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from aquifer.errors import ConfigError

PREFIX_BLOCK_TOKENS = 512
"""Tokens per hash id of Mooncake's traces."""

_TOKENS_PER_WORD = 1.3
"""Estimate for texts without a token count: the usual figure for English."""

NUM_OUTPUT_IDS = 1 << 30
"""Token ids of made-up outputs are below this, those of prompts are not: no output is taken for a
part of a prompt."""

ID_LIMIT = 1 << 31
"""Token ids are below this, since they are int32."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """A request of a trace.

    Args:
        arrival_s: since the start of the trace; None if the trace has no times.
        prompt_tokens: at least 1.
        output_tokens: at least 1.
        model: the requested model; None for the first one.
        prefix_ids: ids of the prompt's first blocks of 512 tokens: equal ids mean equal tokens.
        prefix_tokens: number of tokens that `prefix_ids` cover; None for all of their blocks. The
            other tokens are unique to the request.
    """

    arrival_s: float | None
    prompt_tokens: int
    output_tokens: int
    model: str | None = None
    prefix_ids: tuple[int, ...] = ()
    prefix_tokens: int | None = None

    @property
    def shared_tokens(self) -> int:
        """Tokens of the prompt that `prefix_ids` cover."""
        covered = len(self.prefix_ids) * PREFIX_BLOCK_TOKENS
        if self.prefix_tokens is not None:
            covered = min(covered, self.prefix_tokens)
        return min(covered, self.prompt_tokens)


def read_trace(path: Path, *, outputs_of: str | None = None) -> list[TraceRequest]:
    """Read a trace, in order of arrival. Its format is detected by file name and first line.

    - `.csv`: Azure's `TIMESTAMP,ContextTokens,GeneratedTokens`, or a plain
      `arrival,prompt_tokens,output_tokens[,model]` with the arrival in seconds;
    - `.jsonl`: Mooncake's `timestamp` (ms), `input_length`, `output_length`, `hash_ids`; or lengths
      alone: `prompt_tokens` or the `question` itself, and `output_tokens`;
    - `.json`: lists of lengths alone: `prompt_tokens` or the `instructions` themselves, and
      `output_tokens`, one list or several by the name of the generating model.

    Any of them may be compressed (`.gz`). A text counts 1.3 tokens per word. Requests without
    output tokens are left out.

    Args:
        path: the file.
        outputs_of: name of the list to use if there are several lists of outputs; None if not.

    Raises:
        ConfigError: the file cannot be read; the message names the line. Or `outputs_of` is given,
            and the file has no lists of outputs by name.
    """
    name = path.name.removesuffix(".gz")
    readers: dict[str, Callable[[io.TextIOBase, Path], Iterator[TraceRequest]]] = {
        ".csv": _read_csv,
        ".jsonl": _read_jsonl,
        ".json": lambda file, path: _read_json(file, path, outputs_of),
    }
    suffix = Path(name).suffix
    reader = readers.get(suffix)
    if reader is None:
        raise ConfigError(
            f"{path} is not a known trace format; use .csv, .jsonl or .json, optionally with .gz"
        )
    if outputs_of is not None and suffix != ".json":
        raise _one_list(path)
    try:
        with _open(path) as file:
            requests = [request for request in reader(file, path) if request.output_tokens]
    except (OSError, EOFError, UnicodeDecodeError, zlib.error, csv.Error) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    if not requests:
        raise ConfigError(f"{path} has no requests")
    if all(request.arrival_s is not None for request in requests):
        requests.sort(key=lambda request: request.arrival_s or 0.0)
        start_s = requests[0].arrival_s or 0.0
        requests = [replace(r, arrival_s=(r.arrival_s or 0.0) - start_s) for r in requests]
    return requests


def poisson_arrivals(
    requests: list[TraceRequest], rate: float, num_requests: int, seed: int
) -> list[TraceRequest]:
    """Give requests Poisson arrivals, in their order, repeated as needed.

    Args:
        requests: requests with the lengths to use.
        rate: mean number of requests per second.
        num_requests: number of requests to return.
        seed: seed of the gaps; the same seed gives the same gaps, scaled by the rate.
    """
    gaps_s = np.random.default_rng(seed).exponential(1.0, num_requests) / rate
    return [
        replace(requests[number % len(requests)], arrival_s=float(arrival_s))
        for number, arrival_s in enumerate(np.cumsum(gaps_s))
    ]


def fit_lengths(
    requests: list[TraceRequest], max_tokens: int, *, cut: bool
) -> tuple[list[TraceRequest], int]:
    """Return the requests that fit a context of `max_tokens`, and how many were removed or cut.

    Args:
        requests: the requests of a trace.
        max_tokens: maximum of prompt and output together.
        cut: keep the last part of prompts that are too long (section 6.5 of PagedAttention), and
            end outputs early; otherwise, or with room for one token, such requests are left out.
    """
    fitting = []
    num_changed = 0
    for request in requests:
        if request.prompt_tokens + request.output_tokens <= max_tokens:
            fitting.append(request)
            continue
        num_changed += 1
        if cut and max_tokens > 1:
            num_outputs = min(request.output_tokens, max_tokens // 2)
            num_prompt = min(request.prompt_tokens, max_tokens - num_outputs)
            fitting.append(
                replace(
                    request,
                    prompt_tokens=num_prompt,
                    output_tokens=num_outputs,
                    # The beginning is cut, so no prefix is shared any more.
                    prefix_ids=() if num_prompt < request.prompt_tokens else request.prefix_ids,
                )
            )
    return fitting, num_changed


class PromptMaker:
    """Generator of token ids: equal where prefix ids are equal, otherwise all different.

    The ids of all prompts are in [NUM_OUTPUT_IDS, 2**31). Each prefix id gets 512 consecutive ones,
    from the lowest on; all other tokens count down from the highest.

    Args:
        requests: all requests of a replay.

    Raises:
        ConfigError: the requests have more different tokens than there are ids.
    """

    def __init__(self, requests: Iterable[TraceRequest]) -> None:
        self._first_ids: dict[int, int] = {}  # token id that begins the block of a prefix id
        self._end = ID_LIMIT
        num_own = 0
        next_id = NUM_OUTPUT_IDS
        for request in requests:
            num_own += request.prompt_tokens - request.shared_tokens
            for prefix_id in request.prefix_ids:
                if prefix_id not in self._first_ids:
                    self._first_ids[prefix_id] = next_id
                    next_id += PREFIX_BLOCK_TOKENS
        if next_id + num_own > ID_LIMIT:
            raise ConfigError(
                f"the prompts have {next_id - NUM_OUTPUT_IDS + num_own} different tokens; there "
                f"are {ID_LIMIT - NUM_OUTPUT_IDS} token ids for them: give a lower --num-requests"
            )

    def ids(self, request: TraceRequest) -> npt.NDArray[np.int32]:
        """Generate the token ids of one prompt, [prompt_tokens]. To be called once per request."""
        firsts = np.array([self._first_ids[number] for number in request.prefix_ids], np.int32)
        shared = firsts[:, None] + np.arange(PREFIX_BLOCK_TOKENS, dtype=np.int32)
        num_own = request.prompt_tokens - request.shared_tokens
        self._end -= num_own
        own = np.arange(self._end, self._end + num_own).astype(np.int32)
        return np.concatenate((shared.reshape(-1)[: request.shared_tokens], own))


def _open(path: Path) -> io.TextIOWrapper:
    if path.suffix == ".gz":
        return io.TextIOWrapper(gzip.GzipFile(path), encoding="utf-8")
    return path.open(encoding="utf-8")


def _one_list(path: Path) -> ConfigError:
    return ConfigError(f"{path} has no outputs by name; leave out --outputs-of")


def _bad(path: Path, line: int, what: str) -> ConfigError:
    return ConfigError(f"{path}, line {line}: {what}")


def _number(value: Any, name: str, path: Path, line: int, least: int) -> int:
    """Parse a whole number of at least `least`, from text or JSON."""
    try:
        number = int(value)
        if number < least or (isinstance(value, float) and value != number):
            raise ValueError
    except (TypeError, ValueError, OverflowError):
        what = f"{name} is {value!r}; it must be a whole number of at least {least}"
        raise _bad(path, line, what) from None
    return number


def _read_csv(file: io.TextIOBase, path: Path) -> Iterator[TraceRequest]:
    rows = csv.reader(file)
    header = [name.strip() for name in next(rows, [])]
    is_azure = header == ["TIMESTAMP", "ContextTokens", "GeneratedTokens"]
    plain = ["arrival", "prompt_tokens", "output_tokens", "model"]
    if not is_azure and header not in (plain[:3], plain):
        raise _bad(
            path,
            1,
            f"the columns are {','.join(header)!r}; they must be TIMESTAMP,ContextTokens,"
            "GeneratedTokens or arrival,prompt_tokens,output_tokens with or without model",
        )
    for row in rows:
        line = rows.line_num
        if not row:
            continue
        if len(row) != len(header):
            raise _bad(path, line, f"it has {len(row)} fields; it must have {len(header)}")
        read_time = _timestamp if is_azure else _seconds
        yield TraceRequest(
            read_time(row[0], path, line),
            _number(row[1], header[1], path, line, 1),
            _number(row[2], header[2], path, line, 0),
            row[3].strip() or None if len(row) > 3 else None,
        )


def _seconds(text: str, path: Path, line: int) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise _bad(path, line, f"arrival is {text!r}; it must be a number of seconds")
    return value


def _timestamp(text: str, path: Path, line: int) -> float:
    # The timestamps have seven decimals; `datetime` accepts six.
    match = re.fullmatch(r"(.+?)(\.\d+)?", text.strip())
    try:
        if match is None:
            raise ValueError
        return datetime.fromisoformat(match[1] + "+00:00").timestamp() + float(match[2] or 0)
    except ValueError:
        what = f"TIMESTAMP is {text!r}; it must be like 2023-11-16 18:15:46.6805900"
        raise _bad(path, line, what) from None


def _read_jsonl(file: io.TextIOBase, path: Path) -> Iterator[TraceRequest]:
    for line, text in enumerate(file, 1):
        if not text.strip():
            continue
        try:
            entry = json.loads(text)
            if not isinstance(entry, dict):
                raise ValueError
        except (ValueError, RecursionError):
            raise _bad(path, line, "this is not a JSON object") from None
        if "input_length" in entry:
            yield _mooncake(entry, path, line)
            continue
        yield TraceRequest(
            None,
            _prompt_tokens(entry.get("prompt_tokens", entry.get("question")), path, line),
            _number(entry.get("output_tokens"), "output_tokens", path, line, 0),
        )


def _mooncake(entry: dict[str, Any], path: Path, line: int) -> TraceRequest:
    num_prompt = _number(entry["input_length"], "input_length", path, line, 1)
    hash_ids = entry.get("hash_ids", [])
    if not isinstance(hash_ids, list):
        raise _bad(path, line, "hash_ids must be a list")
    prefix_ids = tuple(_number(number, "hash_ids", path, line, 0) for number in hash_ids)
    if len(prefix_ids) > -(-num_prompt // PREFIX_BLOCK_TOKENS):
        what = f"{len(prefix_ids)} hash_ids for {num_prompt} tokens in blocks of 512"
        raise _bad(path, line, what)
    return TraceRequest(
        _number(entry.get("timestamp"), "timestamp", path, line, 0) / 1e3,
        num_prompt,
        _number(entry.get("output_length"), "output_length", path, line, 0),
        prefix_ids=prefix_ids,
    )


def _prompt_tokens(value: Any, path: Path, line: int) -> int:
    """Parse a number of tokens, or estimate it from the words of a text."""
    if isinstance(value, str):
        return max(round(_TOKENS_PER_WORD * len(value.split())), 1)
    return _number(value, "prompt_tokens", path, line, 1)


def _read_json(file: io.TextIOBase, path: Path, outputs_of: str | None) -> Iterator[TraceRequest]:
    try:
        content = json.load(file)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must be a JSON object of lists")
    prompts = content.get("prompt_tokens", content.get("instructions"))
    outputs = content.get("output_tokens")
    if isinstance(outputs, dict):
        if outputs_of not in outputs:
            raise ConfigError(
                f"{path} has several lists of outputs; choose one with --outputs-of: "
                f"{', '.join(sorted(outputs)[:8])}, ..."
            )
        outputs = outputs[outputs_of]
    elif outputs_of is not None:
        raise _one_list(path)
    if not isinstance(prompts, list) or not isinstance(outputs, list):
        raise ConfigError(f"{path} must have a list prompt_tokens and a list output_tokens")
    if len(prompts) != len(outputs):
        raise ConfigError(
            f"{path} has {len(prompts)} prompts and {len(outputs)} outputs; it must have equally "
            "many"
        )
    for number, (prompt, output) in enumerate(zip(prompts, outputs, strict=True), 1):
        yield TraceRequest(
            None,
            _prompt_tokens(prompt, path, number),
            _number(output, "output_tokens", path, number, 0),
        )
