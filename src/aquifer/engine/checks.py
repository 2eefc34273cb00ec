"""Checks of new requests: those that could never be served are refused at once."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from aquifer.engine.lane import Lane
from aquifer.engine.lane_pages import longest as longest_total
from aquifer.engine.lane_pages import most_pages
from aquifer.engine.params import Request
from aquifer.engine.reports import ModelInfo
from aquifer.errors import CapacityError, ContextLengthError, QueueFullError, RequestError
from aquifer.memory.room import Room
from aquifer.sizes import format_size


def check_token_ids(request: Request, vocab_size: int) -> npt.NDArray[np.int32]:
    """The prompt as an array; token ids in other fields are checked too.

    Raises:
        RequestError: the prompt is empty, or a token id is outside of the vocabulary.
    """
    if not request.prompt_token_ids:
        raise RequestError("the prompt is empty; it must have at least one token", param="prompt")
    _token_array(list(request.params.token_ids_named), vocab_size, None)
    return _token_array(request.prompt_token_ids, vocab_size, "prompt")


def check_sequences(request: Request, max_num_seqs: int) -> None:
    """Refuse a request that needs more slots than there are.

    Raises:
        RequestError: it does.
    """
    params = request.params
    if params.num_sequences > max_num_seqs:
        field = "n" if params.best_of is None else "best_of"
        raise RequestError(
            f"{field} is {params.num_sequences}, and this server runs at most {max_num_seqs} "
            "sequences at once",
            param=field,
        )


def check_waiting(
    request: Request, num_waiting: int, num_of_client: int, most: int, share_of_client: float
) -> None:
    """Refuse a request while too many are waiting.

    Args:
        request: the request.
        num_waiting: requests that wait.
        num_of_client: those of the request's client.
        most: requests that may wait.
        share_of_client: the most of these that a client with a name may have.

    Raises:
        QueueFullError: too many are waiting.
    """
    if num_waiting >= most:
        raise QueueFullError(f"{num_waiting} requests are waiting already; try again later")
    if request.client and num_of_client >= max(int(share_of_client * most), 1):
        raise QueueFullError(
            f"{num_of_client} requests of this API key are waiting already, the most that one key "
            "may have; try again later"
        )


def max_total(request: Request, info: ModelInfo, lane: Lane, room: Room, kv_pages: int) -> int:
    """Length in tokens, prompt included, at which a request's sequences end.

    Args:
        request: the request.
        info: its model.
        lane: the model's lane.
        room: room of the pool.
        kv_pages: the most pages that KV can have.

    Raises:
        ContextLengthError: the request is longer than the model's context.
        CapacityError: it takes more memory than KV can ever have.
    """
    limit = info.max_model_len
    num_prompt = len(request.prompt_token_ids)
    wanted = request.params.max_tokens
    if num_prompt >= limit:
        raise ContextLengthError(
            f"the prompt has {num_prompt} tokens and this model's context length is {limit}, "
            "which must hold at least one more; shorten the prompt",
            param="prompt",
        )
    if wanted is not None and num_prompt + wanted > limit:
        raise ContextLengthError(
            f"the prompt's {num_prompt} tokens and max_tokens {wanted} exceed this model's "
            f"context length of {limit}; ask for at most {limit - num_prompt}",
            param="max_tokens",
        )
    num_sequences = request.params.num_sequences
    total = limit if wanted is None else num_prompt + wanted
    if most_pages(lane, num_prompt, total, num_sequences) <= kv_pages:
        return total
    longest = longest_total(lane, kv_pages, num_prompt, num_sequences)
    if wanted is None and longest > num_prompt:
        return longest
    total = num_prompt + 1 if wanted is None else total
    needed_bytes = room.size(most_pages(lane, num_prompt, total, num_sequences))
    kv_bytes = room.size(kv_pages)
    times = "" if num_sequences == 1 else f", {num_sequences} times except for the prompt,"
    raise CapacityError(
        f"{total - 1} tokens of KV{times} take {needed_bytes} bytes ({format_size(needed_bytes)}) "
        f"and this server has {kv_bytes} bytes ({format_size(kv_bytes)}) for KV: enough for "
        f"{longest - 1} tokens",
        param="prompt" if wanted is None else "max_tokens",
    )


def _token_array(
    token_ids: Sequence[int], vocab_size: int, param: str | None
) -> npt.NDArray[np.int32]:
    """Token ids as an array, which is much faster to look through than a list.

    Raises:
        RequestError: one of them is outside of the vocabulary, or no whole number.
    """
    try:
        # As unsigned numbers, in a third of the time that numpy alone or signed ones take.
        is_packed = isinstance(token_ids, array) and token_ids.typecode == "I"
        ids = np.asarray(token_ids if is_packed else array("I", token_ids), np.uint32)
    except OverflowError:  # one is negative, or too large
        ids = np.array([vocab_size], np.uint32)
    except TypeError:
        raise RequestError("token ids must be whole numbers", param=param) from None
    if len(ids) and ids.max() >= vocab_size:
        outside = next(i for i in token_ids if not 0 <= i < vocab_size)
        raise RequestError(
            f"token id {outside} is outside of the vocabulary: this model has {vocab_size} tokens, "
            "numbered from 0",
            param=param,
        )
    return ids.view(np.int32)
