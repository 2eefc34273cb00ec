"""Runner: runs the steps of one model. It sees addresses and allocates no pages.

A runner gets a step as data (`aquifer.engine.step_input`) and knows no requests. The state of each
sequence is on the device, in columns indexed by slot, and is updated there: the token that one step
samples is the next one's input without host synchronisation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from aquifer.cache.layout import KVLayout
from aquifer.cache.spans import IntArray, Rows, Spans
from aquifer.cache.view import KVSource
from aquifer.engine.graphs import DecodeGraphs
from aquifer.engine.outputs import TokenLogprobs
from aquifer.engine.sampler import Sampler, SamplingMode, token_logprobs
from aquifer.engine.step_input import SlotAssignment, StepInput, StepOutput
from aquifer.kernels import compiled_together
from aquifer.kernels.prefill_attention import MIN_SPLIT_KEYS
from aquifer.kernels.step import advance, decode_inputs
from aquifer.memory.driver.base import Driver, Fence
from aquifer.memory.transfer import download, upload
from aquifer.models import Model, ModelInput

_WARM_UP_TOKENS = 8
_WARM_UP_PREFIX_TOKENS = 2 * MIN_SPLIT_KEYS

_Entries = Callable[[], list[TokenLogprobs]]


class _Columns:
    """State of each sequence on the device. Slot -1, which is padding, has the last row."""

    def __init__(self, max_seqs: int, device: torch.device) -> None:
        def column() -> torch.Tensor:
            return torch.zeros(max_seqs + 2, dtype=torch.int64, device=device)

        self.num_prompt = column()
        self.num_computed = column()  # tokens in the cache: the position of the next
        self.last_token = column()  # the token that was sampled last


class _NoCache:
    """A `KVView` of padding alone: nothing is written, and nothing is attended to."""

    def __init__(self, layout: KVLayout, padding: torch.Tensor) -> None:
        self._padding = padding
        token = padding.new_zeros((1, 1, layout.token_elements), dtype=layout.dtype)
        self._layers = layout.split(token)

    def destination(
        self, layer: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        return *self._layers[layer], self._padding, self._padding

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        pass

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        *,
        scale: float,
        window_tokens: int | None = None,
        softcap: float | None = None,
    ) -> torch.Tensor:
        return query.new_zeros(*query.shape[:2], self._layers[layer][1].shape[-1])


@dataclass(slots=True)
class InFlight:
    """A step that was launched on the device."""

    most_new: IntArray  # [m], as in the step
    token_ids: torch.Tensor  # [m], on the host, complete once the fence has passed
    fence: Fence | None
    reported: IntArray  # indices into `token_ids` whose log probabilities were asked for
    logprobs: _Entries | None = None  # their log probabilities
    # (index into the step's spans, first position, log probabilities of the positions from there)
    prompt_logprobs: list[tuple[int, int, _Entries]] = field(default_factory=list)

    def wait(self) -> StepOutput:
        """Wait for the step, and return its results."""
        if self.fence is not None:
            self.fence.wait()
        reports = [] if self.logprobs is None else self.logprobs()
        return StepOutput(
            tokens=self.token_ids.numpy()[:, None],
            counts=self.most_new,
            logprobs={
                row: [report] for row, report in zip(self.reported.tolist(), reports, strict=True)
            },
            prompt_logprobs={
                (index, first + i): report
                for index, first, reports_of in self.prompt_logprobs
                for i, report in enumerate(reports_of())
            },
        )


@dataclass(frozen=True, slots=True)
class Scores:
    """Logits of a step's sampled spans, a row each; some rows may have been sampled already."""

    logits: torch.Tensor | None  # [m, vocab]; None where no row is left to be sampled
    out: torch.Tensor  # [m] int64, the new tokens
    has_extras: npt.NDArray[np.bool_]  # [m], rows whose logits the host changes or reports
    # (slots, tokens that each sequence has), [m] int64 each, where rows without extras are still to
    # be sampled; None where they have been.
    rows: tuple[torch.Tensor, torch.Tensor] | None = None
    prompt_logprobs: list[tuple[int, int, _Entries]] = field(default_factory=list)


class Runner:
    """Runs the steps of one model, in the order of their launches.

    Args:
        model: what to run.
        kv: gives the addresses of its KV; what the scheduler has done to the cache for a step must
            have been done before the step is launched.
        driver: of the device.
        max_seqs: slots, which are numbered from 1.
        max_tokens: length of the longest sequence.
    """

    def __init__(
        self, model: Model, kv: KVSource, driver: Driver, max_seqs: int, max_tokens: int
    ) -> None:
        self._model = model
        self._kv = kv
        self._driver = driver
        self._device = driver.device
        self._max_seqs = max_seqs
        self._max_tokens = max_tokens
        self._columns = _Columns(max_seqs, self._device)
        self._num_prompt = np.zeros(max_seqs + 1, np.int64)
        # [slots], whether log probabilities of the prompt are still to be reported.
        self._reports_prompt = np.zeros(max_seqs + 1, np.bool_)
        self._sampler = Sampler(max_seqs, model.vocab_size, self._device)
        self._graphs: DecodeGraphs | None = None
        if self._device.type == "cuda" and model.is_capturable:
            self._graphs = DecodeGraphs(self._decode, max_seqs, self._device)

    def warm_up_chunk(self, num_tokens: int) -> Spans:
        """The chunk of a prompt to warm up with, in slot 1: after a prefix that is long enough for
        attention to be split.

        Args:
            num_tokens: of the largest step.
        """
        count = min(_WARM_UP_TOKENS, num_tokens, self._max_tokens)
        start = min(_WARM_UP_PREFIX_TOKENS, self._max_tokens - count)
        return Spans.make(np.array([1]), np.array([start]), np.array([count]))

    @torch.inference_mode()
    def warm_up(self, num_tokens: int, chunk: Spans | None, *, decodes: bool) -> None:
        """Run the largest step there can be, of no sequence at all, and the smallest.

        The device's memory for activations is taken now, so that it is known what pages can have,
        and kernels for prompts are compiled or loaded.

        Args:
            num_tokens: of the largest step.
            chunk: `warm_up_chunk`, if there is room for it in the cache.
            decodes: whether the cache's first addresses are mapped, which a decode step needs.
        """
        with compiled_together(self._device):
            self._run_largest_and_smallest(num_tokens, chunk, decodes)
        self._run_largest_and_smallest(num_tokens, chunk, decodes)

    def _run_largest_and_smallest(
        self, num_tokens: int, chunk: Spans | None, decodes: bool
    ) -> None:
        padding = torch.full((num_tokens,), -1, dtype=torch.int64, device=self._device)
        zeros = torch.zeros_like(padding)
        view = _NoCache(self._model.kv_layout, padding)
        hidden = self._model.forward(ModelInput(zeros, zeros, zeros), view)
        num_seqs = min(self._max_seqs + 1, num_tokens)
        logits = self._model.logits(hidden[:num_seqs])
        self._sampler.sample(
            logits, padding[:num_seqs], zeros[:num_seqs], zeros[:num_seqs], SamplingMode.PLAIN
        )
        del hidden, logits
        if chunk is not None:
            rows = Rows.of(chunk, 0, self._device)
            few = zeros[: chunk.num_tokens]
            self._model.forward(ModelInput(few, rows.positions, few), self._kv.view(rows))
        if self._graphs is not None and decodes:
            for mode in (SamplingMode.GREEDY, SamplingMode.PLAIN):
                self._decode(padding[:1], padding[:1], mode)

    def close(self) -> None:
        """Drop the captured steps, so that the device's driver can give back their memory."""
        self._graphs = None

    @torch.inference_mode()
    def launch(self, step: StepInput) -> InFlight:
        """Launch a step: write its KV, and sample for the sequences that are due."""
        return self.sample(step, self.forward(step))

    def _assign(self, assigned: tuple[SlotAssignment, ...]) -> None:
        columns = self._sampler.columns
        try:
            self._sampler.assign(assigned)
        finally:  # also if it failed half-way
            if self._sampler.columns is not columns and self._graphs is not None:
                self._graphs.forget(SamplingMode.FULL)
        slots = np.array([one.slot for one in assigned], np.int64)
        self._num_prompt[slots] = [one.num_prompt_tokens for one in assigned]
        self._reports_prompt[slots] = [one.num_prompt_logprobs is not None for one in assigned]
        on_device = upload(np.stack((slots, self._num_prompt[slots])), self._device)
        self._columns.num_prompt[on_device[0]] = on_device[1]

    # --- forward -----------------------------------------------------------------------------

    @torch.inference_mode()
    def forward(self, step: StepInput) -> Scores:
        """Run the model over a step's tokens, which writes their KV; the logits to sample from."""
        if step.assigned:
            self._assign(step.assigned)
        num_seqs = len(step.spans.slots)
        if self._graphs is not None and step.num_single == len(step.sampled) == num_seqs:
            return self._replay(self._graphs, step)
        return self._forward_rows(step)

    def _replay(self, graphs: DecodeGraphs, step: StepInput) -> Scores:
        """Run a step in which each span is one token, and all are sampled, as a captured graph."""
        slots, ends = step.spans.slots, step.spans.starts + 1
        self._set_inputs(step)
        has_extras = self._sampler.has_extras(slots, ends)
        sampled_slots = np.where(has_extras, -1, slots) if has_extras.any() else None
        mode = self._sampler.mode(slots[~has_extras])
        logits, token_ids = graphs.run(slots, mode, sampled_slots)
        return Scores(logits, token_ids, has_extras)

    def _set_inputs(self, step: StepInput) -> None:
        """Send input tokens that the device did not sample: of beams and of cached prompts."""
        first = step.num_decodes
        slots, starts = step.spans.slots[first:], step.spans.starts[first:]
        if not len(slots):
            return
        inputs = np.stack((slots, starts, step.token_ids[first:]))
        on_device, num_computed, last_token = upload(inputs, self._device)
        self._columns.num_computed[on_device] = num_computed
        self._columns.last_token[on_device] = last_token

    def _decode(
        self, slots: torch.Tensor, sampled_slots: torch.Tensor, mode: SamplingMode
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The step that graphs capture; every value of it is found by slot, on the device.

        Args:
            slots: [n] int64, -1 for padding.
            sampled_slots: [n] int64, the same but -1 where the host samples.
            mode: what the rows need.
        """
        columns = self._columns
        token_ids, positions, lengths, contexts = decode_inputs(
            slots, columns.num_prompt, columns.num_computed, columns.last_token
        )
        batch = ModelInput(token_ids, positions, contexts)
        rows = Rows(slots, positions, lengths, None)
        logits = self._model.logits(self._model.forward(batch, self._kv.view(rows)))
        out = torch.empty_like(slots)
        self._sampler.sample(logits, sampled_slots, lengths, out, mode)
        advance(slots, lengths, out, columns.num_computed, columns.last_token)
        return logits, out

    def _forward_rows(self, step: StepInput) -> Scores:
        """Run any step kernel by kernel."""
        spans, columns, sampled = step.spans, self._columns, step.sampled
        slots, positions = spans.rows()
        ends = spans.starts + spans.counts
        parts = (
            step.token_ids,
            np.maximum(self._num_prompt[slots], positions + 1),
            spans.slots,
            ends,
            spans.offsets[1:][sampled] - 1,
            spans.slots[sampled],
            ends[sampled],
        )
        # One copy for all.
        packed = upload(np.concatenate(parts, dtype=np.int64), self._device)
        token_ids, contexts, span_slots, span_ends, last_rows, sampled_slots, num_tokens = (
            packed.split([len(part) for part in parts])
        )
        rows = Rows.of(spans, step.num_single, self._device)
        # The host may not know these tokens yet.
        token_ids[: step.num_decodes] = columns.last_token[span_slots[: step.num_decodes]]
        batch = ModelInput(token_ids, rows.positions, contexts)
        hidden = self._model.forward(batch, self._kv.view(rows))
        columns.num_computed[span_slots] = span_ends
        logits = self._model.logits(hidden[last_rows]) if len(sampled) else None
        has_extras = self._sampler.has_extras(spans.slots[sampled], ends[sampled])
        return Scores(
            logits,
            torch.empty_like(num_tokens),
            has_extras,
            (sampled_slots, num_tokens),
            self._prompt_logprobs(step, hidden),
        )

    # --- sampling ----------------------------------------------------------------------------

    @torch.inference_mode()
    def sample(self, step: StepInput, scores: Scores) -> InFlight:
        """Choose the new tokens, and report log probabilities where a sequence asks for them."""
        reported, logprobs = np.zeros(0, np.int64), None
        if scores.rows is not None:
            reported, logprobs = self._sample_rows(step, scores, *scores.rows)
        elif scores.has_extras.any():
            reported, logprobs = self._sample_extras(step, scores)
        token_ids = download(scores.out)
        fence = self._driver.fence()  # after the last copy to the host
        return InFlight(step.most_new, token_ids, fence, reported, logprobs, scores.prompt_logprobs)

    def _sample_rows(
        self, step: StepInput, scores: Scores, slots: torch.Tensor, num_tokens: torch.Tensor
    ) -> tuple[IntArray, _Entries | None]:
        """Sample all rows.

        Args:
            step: the step.
            scores: its scores, of rows that have not been sampled.
            slots: [m] int64, slots of the rows.
            num_tokens: [m] int64, tokens that each row's sequence has.

        Returns: indices of the reported rows, and a function that returns their entries.
        """
        sampler, logits = self._sampler, scores.logits
        if logits is None:
            return step.sampled, None  # there are no rows
        host_slots = step.spans.slots[step.sampled]
        reported, raw = np.zeros(0, np.int64), logits
        if scores.has_extras.any():
            num_logprobs = sampler.num_logprobs(host_slots)
            reported = np.flatnonzero(num_logprobs >= 0)
            raw = logits[upload(reported, self._device)]  # a copy, as the model gave them
            ends = step.spans.starts[step.sampled] + step.spans.counts[step.sampled]
            sampler.change_logits(logits, host_slots, ends)
        sampler.sample(logits, slots, num_tokens, scores.out, sampler.mode(host_slots))
        self._columns.last_token[slots] = scores.out
        if not len(reported):
            return reported, None
        tokens = scores.out[upload(reported, self._device)]
        return reported, token_logprobs(raw, tokens, num_logprobs[reported])

    def _sample_extras(self, step: StepInput, scores: Scores) -> tuple[IntArray, _Entries | None]:
        """Sample the rows that a graph left out: the host changes or reports their logits.

        It comes after all other work of the step, so the whole batch waits for each kernel and each
        copy here.

        Args:
            step: the step.
            scores: its scores, of which all rows without extras have been sampled.

        Returns: indices of the reported rows, and a function that returns their entries.
        """
        extras = np.flatnonzero(scores.has_extras)
        spans, sampled, sampler = step.spans, step.sampled[extras], self._sampler
        host_slots = spans.slots[sampled]
        ends = spans.starts[sampled] + spans.counts[sampled]
        rows, slots, num_tokens = upload(np.stack((extras, host_slots, ends)), self._device)
        assert scores.logits is not None
        raw = logits = scores.logits[rows]  # [e, vocab], a copy, as the model gave them
        if sampler.changes(host_slots, ends).any():
            logits = raw.clone()
            sampler.change_logits(logits, host_slots, ends)
        tokens = torch.empty_like(rows)
        sampler.sample(logits, slots, num_tokens, tokens, sampler.mode(host_slots))
        scores.out[rows] = tokens
        self._columns.last_token[slots] = tokens
        num_logprobs = sampler.num_logprobs(host_slots)
        reported = np.flatnonzero(num_logprobs >= 0)
        if not len(reported):
            return reported, None
        if len(reported) < len(extras):
            chosen = upload(reported, self._device)
            raw, tokens = raw[chosen], tokens[chosen]
        return extras[reported], token_logprobs(raw, tokens, num_logprobs[reported])

    def _prompt_logprobs(
        self, step: StepInput, hidden: torch.Tensor
    ) -> list[tuple[int, int, _Entries]]:
        """Log probabilities of the prompt tokens that follow tokens of this step.

        In stretches with as many rows of logits as `warm_up` has made room for: those of a whole
        chunk may take gigabytes, which no account includes.
        """
        spans = step.spans
        result: list[tuple[int, int, _Entries]] = []
        for index in np.flatnonzero(self._reports_prompt[spans.slots]).tolist():
            slot, start = int(spans.slots[index]), int(spans.starts[index])
            assigned = self._sampler.assigned(slot)
            end = min(start + int(spans.counts[index]), assigned.num_prompt_tokens - 1)
            if end <= start:
                continue
            assert assigned.num_prompt_logprobs is not None
            targets = upload(assigned.token_ids[start + 1 : end + 1].astype(np.int64), self._device)
            row = int(spans.offsets[index])
            rows = hidden[row : row + end - start]
            for part, following in zip(
                rows.split(self._max_seqs + 1), targets.split(self._max_seqs + 1), strict=True
            ):
                wanted = np.full(len(part), assigned.num_prompt_logprobs)
                entries = token_logprobs(self._model.logits(part), following, wanted)
                result.append((index, start + 1, entries))
                start += len(part)
        return result
