"""The engine in one's own process: `LLM`."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, TypeAlias

from rich.progress import Progress

from aquifer.config import EngineConfig, ModelSpec, parse_size
from aquifer.engine.engine import Engine
from aquifer.engine.progress import LoadingBar, counting_bar
from aquifer.engine.request import (
    BeamSearchParams,
    MemoryReport,
    Request,
    RequestOutput,
    SamplingParams,
)
from aquifer.engine.text import Delta, OutputBuilder, Tokenizer
from aquifer.errors import EngineError, RequestError

Prompt: TypeAlias = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, or {"prompt_token_ids": [...]} or {"prompt": "..."}.

A mapping may also have a "cache_salt": retained prefixes are found only by prompts with the same.
"""

Messages: TypeAlias = Sequence[Mapping[str, Any]]
"""A conversation: [{"role": "user", "content": "..."}, ...]."""


@dataclass(frozen=True, slots=True)
class _Encoded:
    """A prompt as tokens, and what else it came with."""

    token_ids: list[int]
    text: str | None = None
    cache_salt: str | None = None


class LLM:
    """One model, served to this process.

    Args:
        model: path of a checkpoint, or the name of a bundled model.
        device: "cuda", "cuda:1", "cpu", or "auto" for a GPU where there is one.
        load_format: "auto" for the checkpoint's weights, "dummy" for random ones.
        memory: the pool's whole budget, weights included, as bytes or "4GiB"; None for
            `gpu_memory_utilization` of a GPU, or on the host for the weights plus a quarter of
            free memory.
        gpu_memory_utilization: the part of a GPU's memory to take where `memory` is None.
        kv_cache: "virtual" or "paged".
        dtype: "auto", "float32", "bfloat16" or "float16".
        page_size: size of a physical page, such as "64KiB"; None for the device's own.
        block_size: tokens of a block of the paged cache.
        max_model_len: longest context in tokens; None for what the model allows.
        max_num_seqs: sequences that run at once.
        max_num_batched_tokens: tokens of one step; None for what suits the device.
        seed: for requests that bring none.
        chat_template: Jinja source used in place of the checkpoint's own.
        enable_prefix_caching: keep the KV of what was computed for later prompts that begin alike.
        swap_space: host memory for the KV of preempted sequences, as bytes or "4GiB"; 0 for none.
        preemption_mode: "swap", "recompute", or "auto" for the cheaper one each time.

    Raises:
        ConfigError: the model cannot be served with these options.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        device: str = "auto",
        load_format: str = "auto",
        memory: str | int | None = None,
        gpu_memory_utilization: float = 0.9,
        kv_cache: str = "virtual",
        dtype: str = "auto",
        page_size: str | int | None = None,
        block_size: int = 16,
        max_model_len: int | None = None,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int | None = None,
        seed: int | None = None,
        chat_template: str | None = None,
        enable_prefix_caching: bool = True,
        swap_space: str | int = "4GiB",
        preemption_mode: Literal["auto", "swap", "recompute"] = "auto",
    ) -> None:
        spec = ModelSpec.parse(os.fspath(model))
        config = EngineConfig(
            models=(spec,),
            device=device,
            load_format=load_format,
            gpu_memory_utilization=gpu_memory_utilization,
            dtype=dtype,
            memory_bytes=None if memory is None else parse_size(memory),
            page_bytes=None if page_size is None else parse_size(page_size),
            kv_cache=kv_cache,
            block_size=block_size,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_waiting=2**31,  # whoever calls generate() waits for all of it anyway
            enable_prefix_caching=enable_prefix_caching,
            swap_space_bytes=parse_size(swap_space),
            preemption_mode=preemption_mode,
            seed=seed,
        )
        self.tokenizer = Tokenizer.load(Path(spec.path), chat_template)
        with LoadingBar() as bar:
            self.engine = Engine.open(config, bar.update)
        self._model_name = spec.name
        self._ids = itertools.count()

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
        """Complete prompts; the outputs come in the order of the prompts.

        Args:
            prompts: one prompt or a list of them.
            sampling_params: for all prompts, or one each.
            use_tqdm: show a progress bar, if standard error is a terminal.

        Raises:
            RequestError: a prompt cannot be served; then none is.
        """
        many: list[Any] = [prompts] if _is_one_prompt(prompts) else list(prompts)
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
        many: list[Any] = [messages] if _is_one_conversation(messages) else list(messages)
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
            RequestError: a prompt cannot be served; then none is.
        """
        return self.generate(prompts, params.sampling_params(), use_tqdm=use_tqdm)

    def stream(
        self, prompt: Prompt | Messages, sampling_params: SamplingParams | None = None
    ) -> Generator[Delta, None, None]:
        """Complete one prompt, or answer one conversation, piece by piece.

        Closing the iterator ends the request.

        Raises:
            RequestError: the prompt cannot be served, or there would be several completions.
        """
        params = sampling_params or SamplingParams()
        if params.n > 1 or params.is_choice:
            raise RequestError(
                "stream() gives one completion, token by token; leave out n, best_of and "
                "use_beam_search, or call generate()",
                param="n" if params.n > 1 else params.choosing_field,
            )
        builder = self._add(self._encode_any(prompt, add_generation_prompt=True), params)
        request_id = builder.output.request_id
        try:
            while not builder.finished:
                for output in self.engine.step():
                    if output.request_id == request_id:
                        yield builder.push(output)
                        if output.error is not None:
                            raise EngineError(output.error)
        finally:
            self.engine.abort(request_id)

    def pin_prefix(self, prompt: Prompt | Messages) -> int:
        """Keep the KV of a prompt until `unpin_prefix`, such as a system prompt's.

        Args:
            prompt: what later prompts begin with. Of a conversation, the messages as they stand,
                without the beginning of an answer.

        Returns: how many of its tokens are kept; only whole blocks can be.

        Raises:
            RequestError: it cannot be kept.
        """
        encoded = self._encode_any(prompt, add_generation_prompt=False)
        was_idle = not self.engine.has_work
        num_tokens = self.engine.pin_prefix(self._model_name, encoded.token_ids, encoded.cache_salt)
        # With a stream that is open, it is computed in the stream's own steps.
        while was_idle and self.engine.has_work:
            self.engine.step()
        return num_tokens

    def unpin_prefix(self, prompt: Prompt | Messages) -> None:
        """End what `pin_prefix` of the same prompt began."""
        encoded = self._encode_any(prompt, add_generation_prompt=False)
        self.engine.unpin_prefix(self._model_name, encoded.token_ids, encoded.cache_salt)

    def memory(self) -> MemoryReport:
        """Where the pool's budget is at this moment."""
        return self.engine.memory()

    def close(self) -> None:
        """Give all memory back. The object must not be used any more."""
        self.engine.close()

    def _complete(
        self,
        prompts: Sequence[_Encoded],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            sampling_params = [sampling_params or SamplingParams()] * len(prompts)
        if len(sampling_params) != len(prompts):
            raise RequestError(
                f"{len(sampling_params)} sampling_params for {len(prompts)} prompts; give one, or "
                "one for each prompt",
                param="sampling_params",
            )
        builders: dict[str, OutputBuilder] = {}
        try:
            for prompt, params in zip(prompts, sampling_params, strict=True):
                builder = self._add(prompt, params)
                builders[builder.output.request_id] = builder
            with counting_bar(use_tqdm) as progress:
                task = progress.add_task("requests", total=len(builders))
                while not all(builder.finished for builder in builders.values()):
                    self._step(builders, progress, task)
        finally:
            for request_id, builder in builders.items():
                if not builder.finished:
                    self.engine.abort(request_id)
        return [builder.output for builder in builders.values()]

    def _step(self, builders: Mapping[str, OutputBuilder], progress: Progress, task: Any) -> None:
        for output in self.engine.step():
            builder = builders[output.request_id]
            delta = builder.push(output)
            if output.error is not None:
                raise EngineError(output.error)
            if delta.needs_abort:
                self.engine.abort(output.request_id, delta.index)
            if builder.finished:
                progress.advance(task)

    def _add(self, prompt: _Encoded, params: SamplingParams) -> OutputBuilder:
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
        return OutputBuilder(request, prompt.text, self.tokenizer)

    def _encode_any(self, prompt: Prompt | Messages, add_generation_prompt: bool) -> _Encoded:
        if _is_one_conversation(prompt):
            messages: Any = prompt
            tokenizer = self._need_tokenizer("messages")
            return _Encoded(tokenizer.encode_chat(messages, add_generation_prompt))
        return self._encode(prompt)  # type: ignore[arg-type]

    def _encode(self, prompt: Prompt) -> _Encoded:
        salt: str | None = None
        if isinstance(prompt, Mapping):
            salt = prompt.get("cache_salt")
            if "prompt_token_ids" in prompt:
                return _Encoded(list(prompt["prompt_token_ids"]), prompt.get("prompt"), salt)
            if "prompt" not in prompt:
                raise RequestError(
                    "a prompt given as a mapping needs 'prompt_token_ids' or 'prompt'",
                    param="prompt",
                )
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


def _is_one_prompt(prompts: Any) -> bool:
    """Text, a mapping, or a list of token ids; not a list of any of these."""
    return isinstance(prompts, (str, Mapping)) or (
        len(prompts) > 0 and all(isinstance(token_id, int) for token_id in prompts)
    )


def _is_one_conversation(messages: Any) -> bool:
    return (
        not isinstance(messages, (str, Mapping))
        and len(messages) > 0
        and isinstance(messages[0], Mapping)
        and "role" in messages[0]
    )
