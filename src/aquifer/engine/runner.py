"""Runner: runs the steps of one model. It sees addresses and allocates no pages.

A runner gets a step as data (`aquifer.engine.step_input`) and knows no requests. The state of each
sequence is on the device, in columns indexed by slot, and is updated there: the token that one step
samples is the next one's input without host synchronisation.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch

from aquifer.cache.spans import IntArray, Rows
from aquifer.cache.view import KVSource, KVView
from aquifer.engine.captured import CapturedSteps, Steps
from aquifer.engine.choosing import TokenChoice
from aquifer.engine.graphs import ChunkStep, StepBuffers
from aquifer.engine.in_flight import Entries, InFlight
from aquifer.engine.reports import OnStage
from aquifer.engine.sampler import Sampler, SamplingMode, token_logprobs
from aquifer.engine.step_input import SlotAssignment, StepInput
from aquifer.engine.warm_up import WarmUp
from aquifer.kernels.step import advance, decode_inputs
from aquifer.memory.driver.base import Driver
from aquifer.memory.transfer import Uploads, download, upload
from aquifer.models import Model, ModelInput, Wanted
from aquifer.models.collectives import ALONE, Collectives

_NO_ROWS = np.zeros(0, np.int64)
_NO_EXTRAS = np.zeros((3, 0), np.int64)


class _Columns:
    """State of each sequence on the device. Slot -1, which is padding, has the last row."""

    def __init__(self, num_slots: int, device: torch.device) -> None:
        def column() -> torch.Tensor:
            return torch.zeros(num_slots + 2, dtype=torch.int64, device=device)

        self.least_context = column()  # of `ModelInput.context_lengths`
        self.num_computed = column()  # tokens in the cache: the position of the next
        self.last_token = column()  # the token that was sampled last

    def write_least_context(self, rows: torch.Tensor) -> None:
        """Overwrite what [2, n] says: slots, and their `least_context`."""
        self.least_context.index_copy_(0, rows[0], rows[1])

    def write_inputs(self, rows: torch.Tensor) -> None:
        """Overwrite what [3, n] says: slots, their `num_computed`, their `last_token`."""
        self.num_computed.index_copy_(0, rows[0], rows[1])
        self.last_token.index_copy_(0, rows[0], rows[2])


@dataclass(frozen=True, slots=True)
class _Scores:
    """Logits of a step's sampled spans, a row each; all rows without extras have been sampled."""

    logits: torch.Tensor | None  # [m, vocab]; None where no row has extras
    out: torch.Tensor  # [m] int64, the new tokens
    report: torch.Tensor | None  # [m], the same on the host, where the device writes them there
    # [3, e]: row, slot, and tokens that the sequence has, of rows whose logits the host changes or
    # reports.
    extras: IntArray
    prompt_logprobs: list[tuple[int, int, Entries]] = field(default_factory=list)


class Runner:
    """Runs the steps of one model, in the order of their launches.

    Args:
        model: what to run.
        kv: gives the addresses of its KV; what the scheduler has done to the cache for a step must
            have been done before the step is launched.
        driver: of the device.
        max_seqs: sequences of the largest step.
        num_slots: slots, which are numbered from 1.
        max_tokens: length of the longest sequence.
        collectives: the other ranks that run the same steps.
    """

    def __init__(
        self,
        model: Model,
        kv: KVSource,
        driver: Driver,
        max_seqs: int,
        num_slots: int,
        max_tokens: int,
        collectives: Collectives = ALONE,
    ) -> None:
        self._model = model
        self._collectives = collectives
        self._kv = kv
        self._driver = driver
        self._device = driver.device
        self._max_seqs = max_seqs
        self._max_tokens = max_tokens
        self._columns = _Columns(num_slots, self._device)
        self._least_context = np.zeros(num_slots + 1, np.int64)
        # [slots], whether log probabilities of the prompt are still to be reported.
        self._reports_prompt = np.zeros(num_slots + 1, np.bool_)
        self._sampler = Sampler(num_slots, model.vocab_size, self._device)
        self._choice = TokenChoice(model, self._sampler, collectives)
        self._buffers = StepBuffers(max_seqs, self._device)
        self._captured: CapturedSteps | None = None

    def warm_up_of(self, num_tokens: int) -> WarmUp:
        """What to run before the model serves, with steps of up to `num_tokens` tokens."""
        return WarmUp(
            self._model,
            self._kv,
            self._choice,
            self._buffers,
            self._driver,
            self._max_seqs,
            self._max_tokens,
            num_tokens,
        )

    @torch.inference_mode()
    def warm_up(
        self,
        warm_up: WarmUp,
        num_tokens: int,
        on_stage: OnStage,
        *,
        has_kv: bool,
        captures: bool,
    ) -> float:
        """Run everything once that steps may run, and capture steps.

        The device's memory for activations is taken now, so that it is known what pages can have;
        all kernels are compiled or loaded, so that no request waits for that.

        Args:
            warm_up: made by `warm_up_of`.
            num_tokens: tokens of the largest step.
            on_stage: told of the progress.
            has_kv: whether the first slot has KV for `WarmUp.num_kv_tokens`.
            captures: whether the cache's first addresses are mapped, which captured steps need.

        Returns: seconds that a token of the largest step takes.
        """
        token_s = self._agreed(warm_up.run(on_stage, has_kv=has_kv))
        if captures and self._device.type == "cuda":
            captured = CapturedSteps(
                self._steps_of(self._model),
                self._steps_of(self._model.rehearsal()),
                self._sample,
                self._kv.view,
                self._buffers,
                self._max_seqs,
                num_tokens,
                self._device,
                has_state=warm_up.has_state,
            )
            captured.rehearse(token_s, on_stage)
            if self._model.is_capturable:
                captured.capture(token_s, on_stage)
                captured.keep_fast(lambda work: self._agreed(warm_up.seconds_of(work)))
                self._captured = captured
        return token_s

    def _agreed(self, seconds: float) -> float:
        """A measured time, which decides what is captured, as rank 0 has measured it."""
        value = torch.tensor([seconds], dtype=torch.float64, device=self._device)
        self._collectives.agree(value)
        return float(value.item())

    @property
    def captured_sizes(self) -> tuple[int, ...]:
        """Numbers of tokens for which steps that read prompts are captured, ascending."""
        return () if self._captured is None else self._captured.chunk_sizes

    def close(self) -> None:
        """Drop the captured steps, so that the device's driver can give back their memory."""
        self._captured = None

    @torch.inference_mode()
    def launch(self, step: StepInput) -> InFlight:
        """Launch a step: write its KV, and sample for the sequences that are due."""
        uploads = Uploads(self._device)
        if step.assigned:
            self._assign(step.assigned, uploads)
        scores = self._run(step, uploads)
        reported, logprobs = _NO_ROWS, None
        if scores.extras.shape[1]:
            reported, logprobs = self._sample_extras(scores)
        token_ids = scores.report
        if token_ids is None or scores.extras.shape[1]:
            token_ids = download(scores.out)
        fence = self._driver.fence()  # after the last copy to the host
        return InFlight(step.most_new, token_ids, fence, reported, logprobs, scores.prompt_logprobs)

    def _assign(self, assigned: tuple[SlotAssignment, ...], uploads: Uploads) -> None:
        self._sampler.assign(assigned, uploads)
        slots = np.array([one.slot for one in assigned], np.int64)
        self._reports_prompt[slots] = [one.num_prompt_logprobs is not None for one in assigned]
        least = np.array([one.least_context_tokens for one in assigned], np.int64)
        if not np.array_equal(least, self._least_context[slots]):  # of most models, all are 0
            self._least_context[slots] = least
            uploads.add(np.stack((slots, least)), self._columns.write_least_context)

    # --- forward -----------------------------------------------------------------------------

    def _run(self, step: StepInput, uploads: Uploads) -> _Scores:
        """Run a step up to its logits, and sample the rows without extras."""
        captured, spans = self._captured, step.spans
        if captured is not None and step.num_single == len(step.sampled) == len(spans.slots):
            return self._run_decodes(captured, step, uploads)
        uploads.send()
        if captured is None:
            return self._forward(step)
        is_captured = captured.has_chunks(spans, step.num_single)
        if not is_captured or self._reports_prompt[spans.slots].any():
            return self._forward(step)
        return self._run_chunks(captured, step)

    def _run_decodes(self, captured: CapturedSteps, step: StepInput, uploads: Uploads) -> _Scores:
        """Run a step in which each span is one token, and all are sampled, as captured graphs."""
        slots, ends = step.spans.slots, step.spans.starts + 1
        first = step.num_decodes
        if first < len(slots):  # tokens that the device did not sample: of beams, cached prompts
            inputs = np.stack((slots[first:], step.spans.starts[first:], step.token_ids[first:]))
            uploads.add(inputs, self._columns.write_inputs)
        extras, others, mode = self._split(slots, ends)
        captured.decode(slots, others, uploads)
        return _Scores(*captured.sample(len(slots), mode), extras)

    def _run_chunks(self, captured: CapturedSteps, step: StepInput) -> _Scores:
        """Run a step that reads prompts, as captured graphs."""
        spans, sampled = step.spans, step.sampled
        slots, positions = spans.rows()
        token_ids = step.token_ids.copy()
        token_ids[: step.num_decodes] = -1  # the host may not know these tokens yet
        last_slots, ends = spans.slots[sampled], (spans.starts + spans.counts)[sampled]
        extras, others, mode = self._split(last_slots, ends)
        captured.run_chunks(
            ChunkStep(
                spans,
                step.num_single,
                token_ids,
                context_lengths=np.maximum(self._least_context[slots], positions + 1),
                sampled=sampled,
                sampling=np.stack((last_slots, others, ends)),
            )
        )
        if not len(sampled):
            return _Scores(None, self._buffers.token_ids[:0], None, extras)
        return _Scores(*captured.sample(len(sampled), mode), extras)

    def _steps_of(self, model: Model) -> Steps:
        """The steps that are captured, by this model."""
        return Steps(partial(self._decode, model), partial(self._read, model))

    def _decode(self, model: Model, slots: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """The decode step that is captured; every value of it is found by slot, on the device.

        Args:
            model: the model.
            slots: [n] int64, -1 for padding.
            lengths: [n] int64, overwritten: tokens that each sequence has then.

        Returns: hidden states [n, hidden].
        """
        columns = self._columns
        token_ids, positions, contexts = decode_inputs(
            slots, columns.least_context, columns.num_computed, columns.last_token, lengths
        )
        batch = ModelInput(token_ids, positions, contexts)
        view = self._kv.view(Rows(slots, positions, lengths, None))
        return model.forward(batch, view)

    def _read(
        self,
        model: Model,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        contexts: torch.Tensor,
        view: KVView,
        wanted: Wanted | None,
    ) -> torch.Tensor:
        """The step of any tokens that is captured; see `chunk_graphs.Forward`."""
        token_ids = torch.where(token_ids < 0, self._columns.last_token[slots], token_ids)
        return model.forward(ModelInput(token_ids, positions, contexts, wanted), view)

    def _sample(self, num_rows: int, mode: SamplingMode) -> torch.Tensor | None:
        """The sampling that is captured; see `sample_graphs.Sample`."""
        buffers, columns = self._buffers, self._columns
        num_tokens, token_ids = buffers.num_tokens[:num_rows], buffers.token_ids[:num_rows]
        logits = self._choice.choose(
            buffers.hidden[:num_rows], buffers.sampled_slots[:num_rows], num_tokens, token_ids, mode
        )
        advance(
            buffers.slots[:num_rows],
            num_tokens,
            token_ids,
            columns.num_computed,
            columns.last_token,
            buffers.reports,
            buffers.next_report,
        )
        return logits

    def _forward(self, step: StepInput) -> _Scores:
        """Run any step kernel by kernel."""
        spans, columns, sampled = step.spans, self._columns, step.sampled
        slots, positions = spans.rows()
        ends = spans.starts + spans.counts
        extras, others, mode = self._split(spans.slots[sampled], ends[sampled])
        parts = (
            step.token_ids,
            np.maximum(self._least_context[slots], positions + 1),
            spans.slots,
            ends,
            spans.offsets[1:][sampled] - 1,
            others,
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
        wanted: Wanted | None = None
        # Where all rows decode, all are wanted.
        if len(sampled) < spans.num_tokens and not self._reports_prompt[spans.slots].any():
            last = Rows.of(spans.ends_of(sampled), len(sampled), self._device)
            wanted = Wanted(last_rows, self._kv.view(last))
        batch = ModelInput(token_ids, rows.positions, contexts, wanted)
        hidden = self._model.forward(batch, self._kv.view(rows))
        columns.num_computed[span_slots] = span_ends
        # A row with extras has slot -1, and leaves 0 in the row of padding.
        out = torch.zeros_like(num_tokens)
        logits: torch.Tensor | None = None
        if len(sampled):
            last_hidden = hidden[last_rows] if wanted is None else hidden
            logits = self._choice.choose(last_hidden, sampled_slots, num_tokens, out, mode)
            columns.last_token[sampled_slots] = out
        return _Scores(logits, out, None, extras, self._prompt_logprobs(step, hidden))

    # --- sampling ----------------------------------------------------------------------------

    def _split(
        self, slots: IntArray, num_tokens: IntArray
    ) -> tuple[IntArray, IntArray, SamplingMode]:
        """Tell rows with extras from others.

        Args:
            slots: [m], slots of the sampled rows.
            num_tokens: [m], tokens that each row's sequence has.

        Returns: `_Scores.extras`; [m] the slots of the other rows, -1 for rows with extras; and
            what the other rows need.
        """
        rows = self._sampler.extras(slots, num_tokens)
        if not len(rows):
            return _NO_EXTRAS, slots, self._sampler.mode(slots)
        others = slots.copy()
        others[rows] = -1
        extras = np.stack((rows, slots[rows], num_tokens[rows]))
        mode = self._sampler.mode(others[others >= 0])
        return extras, others, self._choice.mode(mode, needs_logits=True)

    def _sample_extras(self, scores: _Scores) -> tuple[IntArray, Entries | None]:
        """Sample the rows that have been left out: the host changes or reports their logits.

        It comes after all other work of the step, so the whole batch waits for each kernel and each
        copy here.

        Returns: indices of the reported rows, and a function that returns their entries.
        """
        sampler = self._sampler
        host_rows, host_slots, host_num_tokens = scores.extras
        rows, slots, num_tokens = upload(scores.extras, self._device)
        assert scores.logits is not None
        raw = scores.logits[rows]  # [e, vocab], a copy, as the model gave them
        logits = sampler.changed_logits(raw, host_slots, host_num_tokens)
        tokens = torch.empty_like(rows)
        mode = self._choice.mode(sampler.mode(host_slots), needs_logits=True)
        self._choice.sample(logits, slots, num_tokens, tokens, mode)
        scores.out[rows] = tokens
        self._columns.last_token[slots] = tokens
        num_logprobs = sampler.num_logprobs(host_slots)
        reported = np.flatnonzero(num_logprobs >= 0)
        if not len(reported):
            return reported, None
        if len(reported) < len(host_rows):
            chosen = upload(reported, self._device)
            raw, tokens = raw[chosen], tokens[chosen]
        return host_rows[reported], token_logprobs(raw, tokens, num_logprobs[reported])

    def _prompt_logprobs(
        self, step: StepInput, hidden: torch.Tensor
    ) -> list[tuple[int, int, Entries]]:
        """Log probabilities of the prompt tokens that follow tokens of this step.

        In stretches with as many rows of logits as `warm_up` has made room for: those of a whole
        chunk may take gigabytes, which no account includes.
        """
        spans = step.spans
        result: list[tuple[int, int, Entries]] = []
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
                entries = token_logprobs(self._choice.logits(part), following, wanted)
                result.append((index, start + 1, entries))
                start += len(part)
        return result
