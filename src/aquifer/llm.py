"""The engine in the caller's own process: `LLM`."""

from __future__ import annotations

import inspect
import itertools
import os
import textwrap
import time
import weakref
from collections import deque
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeAlias, TypedDict, Unpack, get_type_hints

from aquifer.config import EngineConfig, ModelSpec, field_values
from aquifer.engine.engine import Engine
from aquifer.engine.outputs import RequestOutput, TokenOutput
from aquifer.engine.params import (
    BeamSearchParams,
    Request,
    SamplingParams,
    longest_first,
    params_of_each,
)
from aquifer.engine.reports import MemoryReport
from aquifer.errors import EngineError, RequestError
from aquifer.garbage import old_objects_left_out
from aquifer.hub import locate
from aquifer.memory.driver import current_device_kept
from aquifer.options import options_of
from aquifer.progress import LoadingBar, counting_bar
from aquifer.prompts import Messages, Prompt, check_prompt, is_one_conversation, is_one_prompt
from aquifer.text import Delta, OutputBuilder, Tokenizer

_Inbox: TypeAlias = deque[TokenOutput]
"""Outputs of the requests of one call of `LLM`, not read yet."""


@dataclass(frozen=True, slots=True)
class _Encoded:
    """A prompt as tokens, with its text and cache salt if it has them."""

    token_ids: list[int]
    text: str | None = None
    cache_salt: str | None = None


class LLMOptions(TypedDict, total=False):
    """The options of `LLM`, for type checkers and editors; `OPTIONS` describes them."""

    revision: str | None
    device: str
    tensor_parallel_size: int
    load_format: str
    dtype: str
    state_dtype: str
    threads: int | None
    max_model_len: str | int | None
    max_num_seqs: int | None
    max_num_batched_tokens: str | int | None
    max_prefill_ms: int | None
    memory: str | int | None
    gpu_memory_utilization: float
    kv_cache: str
    bucket_routing_threshold: float
    bucket_inflation: float
    bucket_grouping: bool
    bucket_bounds: str
    bucket_memory: str | int | None
    kv_layout: str
    page_size: str | int | None
    prompt_page_size: str | int | None
    map_ahead: str | None
    eager_pages: int
    reclaim_below: float
    guard_pages: bool
    block_size: str | int
    enable_prefix_caching: bool
    swap_space: str | int
    host_cache: str | int | None
    preemption_mode: str
    length_prediction: str
    prediction_uses: tuple[str, ...]
    chat_template: str | None
    seed: int | None


def _signature() -> inspect.Signature:
    """What `help(LLM)` shows: the options with their defaults."""
    hints = get_type_hints(LLMOptions)
    parameters = [
        inspect.Parameter(
            "model", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=str | os.PathLike[str]
        )
    ]
    for option in options_of("llm"):
        is_size = option.unit == "bytes" and option.default is not None
        default = option.default_text if is_size else option.default
        parameters.append(
            inspect.Parameter(
                option.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=default,
                annotation=hints[option.name],
            )
        )
    return inspect.Signature(parameters)


def _parse(options: Mapping[str, Any]) -> dict[str, Any]:
    """The values of options that the caller of `LLM` gave.

    Raises:
        ConfigError: an option does not allow its value.
        TypeError: there is no option of that name.
    """
    known = {option.name: option for option in options_of("llm")}
    for name in options:
        if name not in known:
            raise TypeError(f"LLM has no option {name!r}; there is {', '.join(sorted(known))}")
    return {name: known[name].parse(value) for name, value in options.items()}


class LLM:
    """One model, served to this process.

    Sizes and lengths may be text, such as "4GiB" and "32K".

    Args:
        model: path of a checkpoint, ORG/NAME of the Hugging Face hub, or the name of a bundled
            model.
        options: see `OPTIONS`.

    Raises:
        ConfigError: the model cannot be served with these options.
        TypeError: there is no option of that name.
    """

    __signature__ = _signature()

    def __init__(self, model: str | os.PathLike[str], **options: Unpack[LLMOptions]) -> None:
        values = _parse(options)
        (spec,) = locate(
            [ModelSpec.parse(os.fspath(model))],
            values.get("revision"),
            weights=values.get("load_format") != "dummy",
        )
        if values.get("max_prefill_ms") is None:  # outputs are returned together
            values["max_prefill_ms"] = 0
        config = EngineConfig(
            (spec,),
            max_num_waiting=2**31,  # generate() has no limit of its own
            **field_values(EngineConfig, values),
        )
        self.path = spec.path
        self.tokenizer = Tokenizer.load(spec.path, values.get("chat_template"))
        with LoadingBar() as bar:
            self.engine = Engine.open(config, bar.update)
        self._model_name = spec.name
        self._ids = itertools.count()
        self._inboxes: dict[str, _Inbox] = {}  # by request; several may have the same one
        self._closed = False
        # Not at the end of the process, which releases everything anyway.
        self._close_engine = weakref.finalize(self, _close, self.engine)
        self._close_engine.atexit = False

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete prompts; the outputs are in the order of the prompts.

        Those with the largest `max_tokens` begin first, so that all are done sooner.

        Args:
            prompts: one prompt or a list of them.
            sampling_params: for all prompts, or one each.
            use_tqdm: show a progress bar, if standard error is a terminal.

        Raises:
            RequestError: a prompt cannot be served; then no prompt is.
        """
        many: list[Any] = [prompts] if is_one_prompt(prompts) else list(prompts)
        return self._complete([self._encode(prompt) for prompt in many], sampling_params, use_tqdm)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        add_generation_prompt: bool = True,
        chat_template: str | None = None,
    ) -> list[RequestOutput]:
        """Answer conversations; otherwise like `generate`.

        Args:
            messages: one conversation or a list of them.
            sampling_params: for all conversations, or one each.
            use_tqdm: show a progress bar, if standard error is a terminal.
            add_generation_prompt: end the prompt with the beginning of the answer.
            chat_template: Jinja source used in place of the model's own.
        """
        many: list[Any] = [messages] if is_one_conversation(messages) else list(messages)
        tokenizer = self._need_tokenizer("messages")
        prompts = [
            _Encoded(tokenizer.encode_chat(conversation, add_generation_prompt, chat_template))
            for conversation in many
        ]
        return self._complete(prompts, sampling_params, use_tqdm)

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Search for the most probable completions of prompts.

        Each output has `beam_width` completions, best first, with their cumulative log
        probabilities.

        Args:
            prompts: one prompt or a list of them.
            params: for all prompts.
            use_tqdm: show a progress bar, if standard error is a terminal.

        Raises:
            RequestError: a prompt cannot be served; then no prompt is.
        """
        return self.generate(prompts, params.sampling_params(), use_tqdm=use_tqdm)

    def stream(
        self, prompt: Prompt | Messages, sampling_params: SamplingParams | None = None
    ) -> Generator[Delta, None, None]:
        """Stream the completion of one prompt, or the answer to one conversation.

        Closing the iterator ends the request. Several streams may be open, and other methods may be
        called meanwhile: any of them runs the requests of all.

        Raises:
            RequestError: the prompt cannot be served, or there would be several completions.
        """
        params = sampling_params or SamplingParams()
        if params.n > 1 or params.is_ranked:
            raise RequestError(
                "stream() gives one completion, token by token; leave out n, best_of and "
                "use_beam_search, or call generate()",
                param="n" if params.n > 1 else params.ranking_field,
            )
        inbox: _Inbox = deque()
        builder = self._add(self._encode_any(prompt, add_generation_prompt=True), params, inbox)
        try:
            while not builder.finished:
                output = self._next(inbox)
                yield builder.push(output)
                if output.error is not None:
                    raise EngineError(output.error)
        finally:
            self._remove(builder.output.request_id)

    def pin_prefix(self, prompt: Prompt | Messages) -> int:
        """Keep the KV of a prompt until `unpin_prefix`, such as a system prompt's.

        Args:
            prompt: the beginning of later prompts. A conversation is rendered without the beginning
                of an answer.

        Returns: number of its tokens that are kept; only whole blocks can be.

        Raises:
            RequestError: the prefix cannot be kept.
        """
        encoded = self._encode_any(prompt, add_generation_prompt=False)
        was_idle = not self.engine.has_work
        num_tokens = self.engine.pin_prefix(self._model_name, encoded.token_ids, encoded.cache_salt)
        # If a stream is open, the steps of that stream compute the prefix.
        while was_idle and self.engine.has_work:
            self._step()
        return num_tokens

    def unpin_prefix(self, prompt: Prompt | Messages) -> None:
        """Unpin the prefix that `pin_prefix` pinned for the same prompt."""
        encoded = self._encode_any(prompt, add_generation_prompt=False)
        self.engine.unpin_prefix(self._model_name, encoded.token_ids, encoded.cache_salt)

    def memory(self) -> MemoryReport:
        """Use of the pool's budget at this moment, by owner."""
        return self.engine.memory()

    def close(self) -> None:
        """Release all memory, as happens too when nothing refers to the object any more.

        The object must not be used afterwards.
        """
        self._closed = True
        self._close_engine()

    def _complete(
        self,
        prompts: Sequence[_Encoded],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        params = params_of_each(sampling_params, len(prompts))
        inbox: _Inbox = deque()
        builders: dict[str, OutputBuilder] = {}
        order = longest_first(params)  # else the device may be left with a few long ones in the end
        try:
            for index in order:
                builder = self._add(prompts[index], params[index], inbox)
                builders[builder.output.request_id] = builder
                if self.engine.should_step:
                    self._step()
            if builders:
                self._step()  # the device computes while the bar is made
            with old_objects_left_out(), counting_bar(use_tqdm) as progress:
                task = progress.add_task("requests", total=len(builders))
                num_left = len(builders)
                while num_left:
                    output = self._next(inbox)
                    builder = builders[output.request_id]
                    delta = builder.push(output)
                    if output.error is not None:
                        raise EngineError(output.error)
                    if delta.needs_abort:
                        self.engine.abort(output.request_id, delta.index)
                    if builder.finished:
                        num_left -= 1
                        progress.advance(task)
        finally:
            for request_id in builders:
                self._remove(request_id)
        completed = dict(zip(order, builders.values(), strict=True))
        return [completed[index].output for index in range(len(prompts))]

    def _add(self, prompt: _Encoded, params: SamplingParams, inbox: _Inbox) -> OutputBuilder:
        """Send a request, whose outputs go to this inbox until `_remove`."""
        if self._closed:
            raise EngineError("this LLM is closed; call it within its `with` block")
        if params.stop_strings:
            self._need_tokenizer("stop")
        request = Request(
            str(next(self._ids)),
            self._model_name,
            prompt.token_ids,
            params,
            time.monotonic(),
            prompt.cache_salt,
        )
        self.engine.add(request)
        self._inboxes[request.request_id] = inbox
        try:
            return OutputBuilder(request, prompt.text, self.tokenizer)
        except BaseException:
            self._remove(request.request_id)
            raise

    def _remove(self, request_id: str) -> None:
        """End a request, if it has not ended; no more of its outputs are received."""
        del self._inboxes[request_id]
        self.engine.abort(request_id)

    def _next(self, inbox: _Inbox) -> TokenOutput:
        """The next output of the requests of an inbox; steps the engine until there is one.

        Raises:
            EngineError: none will come, because `close` or the engine's `abort` ended the requests.
        """
        while not inbox:
            if not self.engine.has_work:
                raise EngineError("the request was ended before it was finished")
            self._step()
        return inbox.popleft()

    def _step(self) -> None:
        """Step the engine; each output goes to the inbox of its request."""
        for output in self.engine.step():
            inbox = self._inboxes.get(output.request_id)
            if inbox is not None:  # else it is of a request that was added to `engine` itself
                inbox.append(output)

    def _encode_any(self, prompt: Prompt | Messages, add_generation_prompt: bool) -> _Encoded:
        if is_one_conversation(prompt):
            messages: Any = prompt
            tokenizer = self._need_tokenizer("messages")
            return _Encoded(tokenizer.encode_chat(messages, add_generation_prompt))
        return self._encode(prompt)  # type: ignore[arg-type]

    def _encode(self, prompt: Prompt) -> _Encoded:
        check_prompt(prompt)
        salt: str | None = None
        if isinstance(prompt, Mapping):
            salt = prompt.get("cache_salt")
            if "prompt_token_ids" in prompt:
                return _Encoded(list(prompt["prompt_token_ids"]), prompt.get("prompt"), salt)
            prompt = prompt["prompt"]
        if isinstance(prompt, str):
            return _Encoded(self._need_tokenizer("prompt").encode(prompt), prompt, salt)
        return _Encoded(list(prompt), None, salt)  # type: ignore[arg-type]

    def _need_tokenizer(self, param: str) -> Tokenizer:
        if self.tokenizer is None:
            raise RequestError(
                "this checkpoint has no tokenizer.json, so it takes token ids only", param=param
            )
        return self.tokenizer


def _close(engine: Engine) -> None:
    """Close an engine, perhaps while another one is at work: its device stays the current one."""
    with current_device_kept():
        engine.close()


LLM.__doc__ = (LLM.__doc__ or "").replace(
    "        options: see `OPTIONS`.",
    "\n".join(
        textwrap.fill(
            f"{option.name}: {option.help} Default: {option.default_meaning}.",
            width=100,
            initial_indent=" " * 8,
            subsequent_indent=" " * 12,
        )
        for option in options_of("llm")
    ),
)
