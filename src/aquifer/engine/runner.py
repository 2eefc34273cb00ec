"""Runner: runs the steps of one model. It sees addresses and allocates no pages.

A runner gets a step as data (`aquifer.engine.step_input`) and knows no requests. The state of each
sequence is on the device, in columns indexed by slot, and is updated there: the token that one step
samples is the next one's input without host synchronisation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from aquifer.cache.base import IntArray, KVLayout, Rows, SequenceCache, Spans
from aquifer.engine.graphs import DecodeGraphs
from aquifer.engine.outputs import TokenLogprobs
from aquifer.engine.sampler import Choice, Sampler, token_logprobs
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

    logits: torch.Tensor  # [m, vocab]; empty where all rows have been sampled
    slots: torch.Tensor  # [m] int64
    num_tokens: torch.Tensor  # [m] int64, tokens that each row's sequence has
    out: torch.Tensor  # [m] int64, the new tokens
    is_sampled: bool  # whether `out` has the tokens of all rows without extras
    prompt_logprobs: list[tuple[int, int, _Entries]] = field(default_factory=list)


class Runner:
    """Runs the steps of one model, in the order of their launches.

    Args:
        model: the model.
        cache: manager of its KV.
        driver: the device's driver.
        max_seqs: slots, which are numbered from 1.
        max_tokens: length of the longest sequence.
    """

    def __init__(
        self, model: Model, cache: SequenceCache, driver: Driver, max_seqs: int, max_tokens: int
    ) -> None:
        self._model = model
        self._cache = cache
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

    @torch.inference_mode()
    def warm_up(self, num_tokens: int) -> None:
        """Run the largest possible step, of padding alone, and the smallest.

        This takes the device's memory for activations, so that the rest is known to be available
        for pages, and compiles and loads the kernels for prompts.
        """
        if not self._driver.runs_ahead:
            return  # there is nothing to prepare on the host
        with compiled_together(self._device):
            self._run_largest_and_smallest(num_tokens)
        self._run_largest_and_smallest(num_tokens)

    def _run_largest_and_smallest(self, num_tokens: int) -> None:
        padding = torch.full((num_tokens,), -1, dtype=torch.int64, device=self._device)
        zeros = torch.zeros_like(padding)
        view = _NoCache(self._model.kv_layout, padding)
        hidden = self._model.forward(ModelInput(zeros, zeros, zeros), view)
        num_seqs = min(self._max_seqs + 1, num_tokens)
        logits = self._model.logits(hidden[:num_seqs])
        self._sampler.sample(
            logits, padding[:num_seqs], zeros[:num_seqs], zeros[:num_seqs], Choice.PLAIN
        )
        del hidden, logits
        count = min(_WARM_UP_TOKENS, num_tokens, self._max_tokens)
        # After a prefix that is long enough for attention to be split.
        start = min(_WARM_UP_PREFIX_TOKENS, self._max_tokens - count)
        chunk = Spans.make(np.array([1]), np.array([start]), np.array([count]))
        if self._cache.reserve(chunk.slots, chunk.starts + chunk.counts):
            self._cache.upload()
            rows = Rows.of(chunk, 0, self._device)
            few = zeros[:count]
            self._model.forward(ModelInput(few, rows.positions, few), self._cache.view(rows))
            self._cache.release(1)
        if self._graphs is not None:
            self._cache.upload()
            for choice in (Choice.GREEDY, Choice.PLAIN):
                self._decode(padding[:1], padding[:1], choice)

    def close(self) -> None:
        """Drop the captured steps, so that the device's driver can give back their memory."""
        self._graphs = None

    @torch.inference_mode()
    def launch(self, step: StepInput) -> InFlight:
        """Launch a step: write its KV, and sample for the sequences that are due."""
        return self.sample(step, self.forward(step))

    def _assign(self, assigned: tuple[SlotAssignment, ...]) -> None:
        if self._sampler.assign(assigned) and self._graphs is not None:
            self._graphs.forget(Choice.FULL)
        slots = np.array([one.slot for one in assigned], np.int64)
        self._num_prompt[slots] = [one.num_prompt_tokens for one in assigned]
        self._reports_prompt[slots] = [one.num_prompt_logprobs is not None for one in assigned]
        on_device = upload(np.stack((slots, self._num_prompt[slots])), self._device)
        self._columns.num_prompt[on_device[0]] = on_device[1]

    # --- forward -----------------------------------------------------------------------------

    @torch.inference_mode()
    def forward(self, step: StepInput) -> Scores:
        """Run the model over a step's tokens, which writes their KV; returns logits to sample."""
        self._cache.upload()
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
        choice = self._sampler.choice(slots[~has_extras])
        logits, token_ids = graphs.run(slots, choice, sampled_slots)
        where = token_ids.new_zeros((2, 0))
        if logits is None:
            logits = token_ids.new_zeros((0, 0))
        else:
            where = upload(np.stack((slots, ends)), self._device)
        return Scores(logits, where[0], where[1], token_ids, is_sampled=True)

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
        self, slots: torch.Tensor, sampled_slots: torch.Tensor, choice: Choice
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The step that graphs capture; every value of it is found by slot, on the device.

        Args:
            slots: [n] int64, -1 for padding.
            sampled_slots: [n] int64, the same but -1 where the host samples.
            choice: what the rows need.
        """
        columns = self._columns
        token_ids, positions, lengths, contexts = decode_inputs(
            slots, columns.num_prompt, columns.num_computed, columns.last_token
        )
        batch = ModelInput(token_ids, positions, contexts)
        rows = Rows(slots, positions, lengths, None)
        logits = self._model.logits(self._model.forward(batch, self._cache.view(rows)))
        out = torch.empty_like(slots)
        self._sampler.sample(logits, sampled_slots, lengths, out, choice)
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
        hidden = self._model.forward(batch, self._cache.view(rows))
        columns.num_computed[span_slots] = span_ends
        logits = self._model.logits(hidden[last_rows]) if len(sampled) else hidden[:0]
        return Scores(
            logits,
            sampled_slots,
            num_tokens,
            torch.empty_like(num_tokens),
            is_sampled=False,
            prompt_logprobs=self._prompt_logprobs(step, hidden),
        )

    # --- sampling ----------------------------------------------------------------------------

    @torch.inference_mode()
    def sample(self, step: StepInput, scores: Scores) -> InFlight:
        """Choose the new tokens, and report log probabilities where a sequence asks for them."""
        spans, sampled, out = step.spans, step.sampled, scores.out
        slots = spans.slots[sampled]
        num_tokens = spans.starts[sampled] + spans.counts[sampled]
        has_extras = self._sampler.has_extras(slots, num_tokens)
        extras = np.flatnonzero(has_extras)
        if not scores.is_sampled and len(extras) < len(sampled):
            choice = self._sampler.choice(slots[~has_extras])
            where = scores.slots
            if len(extras):
                where = upload(np.where(has_extras, -1, slots), self._device)
            self._sampler.sample(scores.logits, where, scores.num_tokens, out, choice)
        reported, logprobs = extras[:0], None
        if len(extras):
            reported, logprobs = self._sample_extras(scores, extras, slots, num_tokens)
        if len(sampled) and (len(extras) or not scores.is_sampled):
            self._columns.last_token[scores.slots] = out
        token_ids = download(out)
        # The fence comes after the last copy to the host.
        fence = self._driver.fence()
        return InFlight(step.most_new, token_ids, fence, reported, logprobs, scores.prompt_logprobs)

    def _sample_extras(
        self, scores: Scores, extras: IntArray, slots: IntArray, num_tokens: IntArray
    ) -> tuple[IntArray, _Entries | None]:
        """Sample rows with logits that the host changes or reports.

        Args:
            scores: scores of all rows.
            extras: [e], indices of the rows to sample.
            slots: [m], slots of all rows.
            num_tokens: [m], tokens that each row's sequence has.

        Returns: indices of the reported rows, and a function that returns their entries.
        """
        rows = upload(extras, self._device)
        raw = scores.logits[rows]  # [e, vocab], as the model gave them
        logits = raw.clone()
        self._sampler.change_logits(logits, slots[extras], num_tokens[extras])
        tokens = torch.empty_like(rows)
        self._sampler.sample(
            logits, scores.slots[rows], scores.num_tokens[rows], tokens, Choice.FULL
        )
        scores.out[rows] = tokens
        num_logprobs = self._sampler.num_logprobs(slots[extras])
        wanted = np.flatnonzero(num_logprobs >= 0)
        if not len(wanted):
            return wanted, None
        chosen = upload(wanted, self._device)
        reports = token_logprobs(raw[chosen], tokens[chosen], num_logprobs[wanted])
        return extras[wanted], reports

    def _prompt_logprobs(
        self, step: StepInput, hidden: torch.Tensor
    ) -> list[tuple[int, int, _Entries]]:
        """Log probabilities of the prompt tokens that follow tokens of this step."""
        spans = step.spans
        result: list[tuple[int, int, _Entries]] = []
        for index in np.flatnonzero(self._reports_prompt[spans.slots]).tolist():
            slot, start = int(spans.slots[index]), int(spans.starts[index])
            assigned = self._sampler.assigned(slot)
            end = min(start + int(spans.counts[index]), assigned.num_prompt_tokens - 1)
            if end <= start:
                continue
            assert assigned.num_prompt_logprobs is not None
            row = int(spans.offsets[index])
            logits = self._model.logits(hidden[row : row + end - start])
            targets = upload(assigned.token_ids[start + 1 : end + 1].astype(np.int64), self._device)
            wanted = np.full(len(targets), assigned.num_prompt_logprobs)
            result.append((index, start + 1, token_logprobs(logits, targets, wanted)))
        return result
