"""Runs plans: from token ids to the next token ids. Sees addresses, allocates no pages.

What a step needs to know of each sequence is on the device, in columns indexed by slot, and moves
on there. The token that one step samples is the next one's input without the host having seen it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from aquifer.cache.base import IntArray, KVLayout, Rows, SequenceCache, Spans
from aquifer.engine.graphs import DecodeGraphs
from aquifer.engine.request import TokenLogprobs
from aquifer.engine.sampler import Sampler, token_logprobs
from aquifer.engine.scheduler import Plan, Sampled
from aquifer.engine.sequence import Choice
from aquifer.engine.slots import SlotTable
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
    """What the device knows of each sequence. Slot -1, of padding, has the last row."""

    def __init__(self, max_seqs: int, device: torch.device) -> None:
        def column() -> torch.Tensor:
            return torch.zeros(max_seqs + 1, dtype=torch.int64, device=device)

        self.num_prompt = column()
        self.num_computed = column()  # tokens in the cache: the position of the next
        self.last_token = column()  # the one that was sampled last


class _NoCache:
    """A `KVView` of rows that are all padding: nothing is written, and nothing is attended to."""

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
    """A step that was handed to the device."""

    token_ids: torch.Tensor  # [num_sampled], on the host, complete once the fence has passed
    fence: Fence | None
    reported: IntArray  # indices into `token_ids` whose log probabilities were asked for
    logprobs: _Entries | None = None  # of those
    # (index into the plan's spans, first position, log probabilities of the positions from there)
    prompt_logprobs: list[tuple[int, int, _Entries]] = field(default_factory=list)

    def wait(self) -> Sampled:
        """What the step computed, as soon as it has."""
        if self.fence is not None:
            self.fence.wait()
        entries = [] if self.logprobs is None else self.logprobs()
        return Sampled(
            token_ids=self.token_ids.numpy(),
            logprobs=dict(zip(self.reported.tolist(), entries, strict=True)),
            prompt_logprobs={
                (index, first + i): entry
                for index, first, entries_of in self.prompt_logprobs
                for i, entry in enumerate(entries_of())
            },
        )


class Runner:
    """Runs the steps of one model, in the order of their launches.

    Args:
        model: what to run.
        cache: where its KV is.
        table: its sequences.
        driver: of the device.
    """

    def __init__(
        self, model: Model, cache: SequenceCache, table: SlotTable, driver: Driver
    ) -> None:
        self._model = model
        self._cache = cache
        self._table = table
        self._driver = driver
        self._device = driver.device
        max_seqs = len(table.sequences)
        self._columns = _Columns(max_seqs, self._device)
        self._sampler = Sampler(table, model.vocab_size, self._device)
        self._graphs: DecodeGraphs | None = None
        if self._device.type == "cuda" and model.is_capturable:
            self._graphs = DecodeGraphs(self._decode, max_seqs, self._device)

    @torch.inference_mode()
    def warm_up(self, num_tokens: int) -> None:
        """Run the largest step there can be, of no sequence at all, and the smallest.

        A device's memory for activations is taken now, so that it is known what pages can have,
        and what has to be compiled or loaded for prompts is.
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
        num_seqs = min(len(self._table.sequences), num_tokens)
        logits = self._model.logits(hidden[:num_seqs])
        self._sampler.sample(
            logits, padding[:num_seqs], zeros[:num_seqs], zeros[:num_seqs], Choice.PLAIN
        )
        del hidden, logits
        count = min(_WARM_UP_TOKENS, num_tokens, self._table.token_ids.shape[1])
        # After a prefix that is long enough for attention to be split.
        start = min(_WARM_UP_PREFIX_TOKENS, self._table.token_ids.shape[1] - count)
        chunk = Spans.make(np.array([1]), np.array([start]), np.array([count]))
        if self._cache.reserve(chunk.slots, chunk.starts + chunk.counts):
            self._cache.upload()
            rows = Rows.of(chunk, 0, self._device)
            few = zeros[:count]
            self._model.forward(ModelInput(few, rows.positions, few), self._cache.view(rows))
            self._cache.release(1)
        if self._graphs is not None and self._cache.tensors.open():
            self._cache.upload()
            for choice in (Choice.GREEDY, Choice.PLAIN):
                self._decode(padding[:1], choice)

    def close(self) -> None:
        """Drop the captured steps, whose memory the device's driver can then give back."""
        self._graphs = None

    @torch.inference_mode()
    def launch(self, plan: Plan) -> InFlight:
        """Hand a step to the device: write its KV, and sample for the sequences that are due."""
        self._cache.upload()
        if len(plan.admitted):
            self._seat(plan.admitted)
        num_seqs = len(plan.spans.slots)
        if self._graphs is not None and plan.num_single == len(plan.sampled) == num_seqs:
            return self._launch_graph(self._graphs, plan)
        return self._launch_rows(plan)

    def _seat(self, slots: IntArray) -> None:
        if self._sampler.seat(slots) and self._graphs is not None:
            self._graphs.forget(Choice.FULL)
        on_device = upload(np.stack((slots, self._table.num_prompt[slots])), self._device)
        self._columns.num_prompt[on_device[0]] = on_device[1]

    def _launch_graph(self, graphs: DecodeGraphs, plan: Plan) -> InFlight:
        """A step in which each span is one token, and all are sampled."""
        slots = plan.spans.slots
        self._set_inputs(plan)
        choice = self._sampler.choice(slots)
        logits, token_ids = graphs.run(slots, choice)
        if logits is None:
            return self._in_flight(plan, token_ids)
        ends = plan.spans.starts + 1
        where = upload(np.stack((slots, ends)), self._device)
        return self._sample(plan, logits, where[0], where[1], token_ids)

    def _set_inputs(self, plan: Plan) -> None:
        """Tell the device the tokens that it did not sample: of prompts found in the cache, say."""
        slots, starts = plan.spans.slots[plan.num_decodes :], plan.spans.starts[plan.num_decodes :]
        if not len(slots):
            return
        tokens = self._table.token_ids[slots, starts]
        inputs = np.stack((slots, starts, tokens)).astype(np.int64)
        on_device, num_computed, last_token = upload(inputs, self._device)
        self._columns.num_computed[on_device] = num_computed
        self._columns.last_token[on_device] = last_token

    def _decode(self, slots: torch.Tensor, choice: Choice) -> tuple[torch.Tensor, torch.Tensor]:
        """The step that graphs capture; every value of it is found by slot, on the device."""
        columns = self._columns
        token_ids, positions, lengths, contexts = decode_inputs(
            slots, columns.num_prompt, columns.num_computed, columns.last_token
        )
        batch = ModelInput(token_ids, positions, contexts)
        rows = Rows(slots, positions, lengths, None)
        logits = self._model.logits(self._model.forward(batch, self._cache.view(rows)))
        sampled: torch.Tensor | None = None
        out = torch.empty_like(slots)
        if choice != Choice.OWN:
            self._sampler.sample(logits, slots, lengths, out, choice)
            sampled = out
        advance(slots, lengths, sampled, columns.num_computed, columns.last_token)
        return logits, out

    def _launch_rows(self, plan: Plan) -> InFlight:
        """Any step, kernel by kernel."""
        table, spans, columns = self._table, plan.spans, self._columns
        slots, positions = spans.rows()
        ends = spans.starts + spans.counts
        sampled = plan.sampled
        parts = (
            table.token_ids[slots, positions],
            np.maximum(table.num_prompt[slots], positions + 1),
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
        rows = Rows.of(spans, plan.num_single, self._device)
        # The host may not have seen these yet.
        token_ids[: plan.num_decodes] = columns.last_token[span_slots[: plan.num_decodes]]
        batch = ModelInput(token_ids, rows.positions, contexts)
        hidden = self._model.forward(batch, self._cache.view(rows))
        columns.num_computed[span_slots] = span_ends
        prompt_logprobs = self._prompt_logprobs(plan, hidden)
        if len(sampled):
            logits = self._model.logits(hidden[last_rows])
            out = torch.empty_like(num_tokens)
            in_flight = self._sample(plan, logits, sampled_slots, num_tokens, out)
        else:
            in_flight = self._in_flight(plan, num_tokens)
        in_flight.prompt_logprobs = prompt_logprobs
        return in_flight

    def _sample(
        self,
        plan: Plan,
        logits: torch.Tensor,
        slots: torch.Tensor,
        num_tokens: torch.Tensor,
        out: torch.Tensor,
    ) -> InFlight:
        """Sample for `plan.sampled`; the tensors have a row for each, `logits` is overwritten."""
        spans, sampled = plan.spans, plan.sampled
        host_slots = spans.slots[sampled]
        choice = self._sampler.choice(host_slots)
        num_logprobs = np.zeros(0, np.int64)
        reported = np.zeros(0, np.int64)
        raw = logits[:0]
        if choice == Choice.OWN:
            num_logprobs = self._table.num_logprobs[host_slots]
            reported = np.flatnonzero(num_logprobs >= 0)
            raw = logits[upload(reported, self._device)]  # a copy, as the model gave them
            self._sampler.change_logits(
                logits, host_slots, spans.starts[sampled] + spans.counts[sampled]
            )
        self._sampler.sample(logits, slots, num_tokens, out, choice)
        self._columns.last_token[slots] = out
        logprobs: _Entries | None = None
        if len(reported):
            tokens = out[upload(reported, self._device)]
            logprobs = token_logprobs(raw, tokens, num_logprobs[reported])
        return self._in_flight(plan, out, reported, logprobs)

    def _in_flight(
        self,
        plan: Plan,
        token_ids: torch.Tensor,
        reported: IntArray | None = None,
        logprobs: _Entries | None = None,
    ) -> InFlight:
        token_ids = download(token_ids)
        if reported is None:
            reported = np.zeros(0, np.int64)
        # After the last copy to the host.
        return InFlight(token_ids, self._driver.fence(), reported, logprobs)

    def _prompt_logprobs(self, plan: Plan, hidden: torch.Tensor) -> list[tuple[int, int, _Entries]]:
        """Log probabilities of those prompt tokens whose predecessors are in this step."""
        table, spans = self._table, plan.spans
        result: list[tuple[int, int, _Entries]] = []
        for index in np.flatnonzero(table.needs_care[spans.slots]).tolist():
            slot, start = int(spans.slots[index]), int(spans.starts[index])
            sequence = table.sequences[slot]
            assert sequence is not None
            wanted = sequence.request.params.prompt_logprobs
            end = min(start + int(spans.counts[index]), sequence.group.num_prompt_tokens - 1)
            if wanted is None or sequence.has_output or end <= start:
                continue
            row = int(spans.offsets[index])
            logits = self._model.logits(hidden[row : row + end - start])
            targets = upload(
                table.token_ids[slot, start + 1 : end + 1].astype(np.int64), self._device
            )
            entries = token_logprobs(logits, targets, np.full(len(targets), wanted))
            result.append((index, start + 1, entries))
        return result
