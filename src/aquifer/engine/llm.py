"""The engine in one's own process: `LLM`."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TypeAlias

from rich.progress import Progress

from aquifer.config import EngineConfig, ModelSpec, parse_size
from aquifer.engine.engine import Engine
from aquifer.engine.progress import LoadingBar, counting_bar
from aquifer.engine.request import MemoryReport, Request, RequestOutput, SamplingParams
from aquifer.engine.text import Delta, OutputBuilder, Tokenizer
from aquifer.errors import EngineError, RequestError

Prompt: TypeAlias = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, or {"prompt_token_ids": [...]} or {"prompt": "..."}."""

Messages: TypeAlias = Sequence[Mapping[str, Any]]
"""A conversation: [{"role": "user", "content": "..."}, ...]."""


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
        prompts = [
            (
                None,
                self._need_tokenizer("messages").encode_chat(
                    conversation, add_generation_prompt, chat_template
                ),
            )
            for conversation in many
        ]
        return self._complete(prompts, sampling_params, use_tqdm)

    def stream(
        self, prompt: Prompt | Messages, sampling_params: SamplingParams | None = None
    ) -> Generator[Delta, None, None]:
        """Complete one prompt, or answer one conversation, piece by piece.

        Closing the iterator ends the request.
        """
        text, token_ids = (
            (None, self._need_tokenizer("messages").encode_chat(prompt))  # type: ignore[arg-type]
            if _is_one_conversation(prompt)
            else self._encode(prompt)  # type: ignore[arg-type]
        )
        builder = self._add(text, token_ids, sampling_params or SamplingParams())
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

    def memory(self) -> MemoryReport:
        """Where the pool's budget is at this moment."""
        return self.engine.memory()

    def close(self) -> None:
        """Give all memory back. The object must not be used any more."""
        self.engine.close()

    def _complete(
        self,
        prompts: Sequence[tuple[str | None, list[int]]],
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
            for (text, token_ids), params in zip(prompts, sampling_params, strict=True):
                builder = self._add(text, token_ids, params)
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
            builder.push(output)
            if output.error is not None:
                raise EngineError(output.error)
            if builder.finished:
                self.engine.abort(output.request_id)  # a stop string ended it
                progress.advance(task)

    def _add(self, text: str | None, token_ids: list[int], params: SamplingParams) -> OutputBuilder:
        if params.stop_strings:
            self._need_tokenizer("stop")
        request = Request(
            str(next(self._ids)), self._model_name, token_ids, params, time.monotonic()
        )
        self.engine.add(request)
        return OutputBuilder(request, text, self.tokenizer)

    def _encode(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        """(text if there was any, token ids)."""
        if isinstance(prompt, Mapping):
            if "prompt_token_ids" in prompt:
                return prompt.get("prompt"), list(prompt["prompt_token_ids"])
            if "prompt" not in prompt:
                raise RequestError(
                    "a prompt given as a mapping needs 'prompt_token_ids' or 'prompt'",
                    param="prompt",
                )
            prompt = prompt["prompt"]
        if isinstance(prompt, str):
            return prompt, self._need_tokenizer("prompt").encode(prompt)
        return None, list(prompt)  # type: ignore[arg-type]

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
