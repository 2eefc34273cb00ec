"""Trial at load: whether the steps of a model of Transformers can be captured as CUDA graphs.

A graph repeats the launches of a step with the same addresses and shapes. That is right only for
code that never looks at the values of tensors on the host, and computes nothing there that depends
on the tokens. No list says which architectures are so. So some steps are captured, run with other
inputs, and compared with the same steps run kernel by kernel.
"""

from __future__ import annotations

import gc
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

import torch

from aquifer.cache.base import Rows
from aquifer.cache.view import StepView, Workspaces
from aquifer.errors import AquiferError, one_line
from aquifer.kernels import compiled_together
from aquifer.kernels.capture import GraphPool
from aquifer.models.base import Model, ModelInput

_log = logging.getLogger(__name__)

Capture: TypeAlias = Callable[[Callable[[], None]], Callable[[], None]]
"""Records what a function launches, and returns a function that launches it again."""

_NUM_ROWS = (1, 4, 48)
"""Rows of the steps that are tried: alone, a small batch, and more than small products have."""

_NUM_SLOTS = 2
_SLOT_TOKENS = 24
_NUM_INPUTS = 3  # the first is captured, the others are replayed
_TOLERANCE = 0.05
"""Allowed relative error of a row's logits. The same kernels run, so results should be equal. But
cuBLAS may choose another one on another stream, and in 16 bits rounding goes through all layers."""


@torch.no_grad()
def can_be_captured(
    model: Model, architecture: str, max_tokens: int, device: torch.device, capture: Capture
) -> bool:
    """Whether the steps of a model can be captured; if not, the log says why.

    Args:
        model: the model.
        architecture: for the log.
        max_tokens: its longest context.
        device: where it is.
        capture: `capture_on` the device, or a stand-in.

    Raises:
        AquiferError: a bug of ours.
        OutOfMemoryError: the device has no memory left.
    """
    obstacle = _find_obstacle(model, max_tokens, device, capture)
    if obstacle is not None:
        _log.warning(
            "steps of %s run kernel by kernel, because its code cannot be captured in CUDA "
            "graphs: %s",
            architecture,
            obstacle,
        )
    return obstacle is None


def _find_obstacle(
    model: Model, max_tokens: int, device: torch.device, capture: Capture
) -> str | None:
    """Why the steps of a model cannot be captured; None if they can."""
    generator = torch.Generator().manual_seed(0)
    try:
        steps = [_Step(model, num_rows, max_tokens, device, generator) for num_rows in _NUM_ROWS]
        with compiled_together(device):
            for step in steps:
                step.rehearse()
        for step in steps:
            if not step.is_repeated_by(capture):
                return f"a graph of {step.num_rows} tokens computes other logits than its own code"
    except (AquiferError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # the model's own code may raise anything
        return one_line(error)
    return None


class _Step:
    """A step of rows of one token each, of random tokens at random places over random KV.

    Args:
        model: the model.
        num_rows: tokens of the step, at most.
        max_tokens: the longest context.
        device: where it runs.
        generator: random numbers on the host.

    Attributes:
        num_rows: tokens of the step.
    """

    def __init__(
        self,
        model: Model,
        num_rows: int,
        max_tokens: int,
        device: torch.device,
        generator: torch.Generator,
    ) -> None:
        self._model = model
        self._generator = generator
        self._slot_tokens = min(_SLOT_TOKENS, max_tokens)
        num_places = _NUM_SLOTS * self._slot_tokens
        self.num_rows = min(num_rows, num_places)
        layout = model.kv_layout
        shape = (_NUM_SLOTS, self._slot_tokens, layout.token_elements)
        self._random_kv = torch.randn(shape, generator=generator).to(device, layout.dtype)
        self._kv = self._random_kv.clone()
        self._layers = layout.split(self._kv)
        self._workspaces = Workspaces()
        # Token ids, positions and slots, each [num_rows].
        self._inputs = torch.zeros(3, self.num_rows, dtype=torch.int64, device=device)

    def rehearse(self) -> None:
        """Launch the kernels of the step, without results."""
        self._set(self._random_inputs())
        self._logits()

    def is_repeated_by(self, capture: Capture) -> bool:
        """Whether a captured step computes what its code computes, for other inputs as well.

        Raises:
            Exception: anything that the model's code or its capture raises.
        """
        inputs = [self._random_inputs() for _ in range(_NUM_INPUTS)]
        self._set(inputs[0])
        out = torch.empty_like(self._logits())

        def work() -> None:
            out.copy_(self._logits())

        replay = capture(work)
        for each in (*inputs[1:], inputs[0]):
            self._set(each)
            replay()
            self._set(each)
            expected = self._logits()
            if not _are_alike(out[: self._num_real], expected[: self._num_real]):
                return False
        return True

    @property
    def _num_real(self) -> int:
        """Rows that are no padding: all but the last of several."""
        return max(self.num_rows - 1, 1)

    def _random_inputs(self) -> torch.Tensor:
        """Token ids, positions and slots, [3, num_rows] on the host; no place occurs twice."""
        num_places = _NUM_SLOTS * self._slot_tokens
        places = torch.randperm(num_places, generator=self._generator)[: self.num_rows]
        ids = torch.randint(self._model.vocab_size, (self.num_rows,), generator=self._generator)
        inputs = torch.stack((ids, places % self._slot_tokens, places // self._slot_tokens))
        inputs[:, self._num_real :] = torch.tensor([[0], [0], [-1]])
        return inputs

    def _set(self, inputs: torch.Tensor) -> None:
        """Set the inputs, and the KV to what it was before any step."""
        self._inputs.copy_(inputs)
        self._kv.copy_(self._random_kv)

    def _logits(self) -> torch.Tensor:
        """Run the step; [num_rows, vocab]."""
        ids, positions, slots = self._inputs
        rows = Rows(slots, positions, torch.where(slots < 0, 0, positions + 1), None)
        view = StepView(self._model.kv_layout, self._layers, rows, None, self._workspaces)
        hidden = self._model.forward(ModelInput(ids, positions, positions + 1), view)
        return self._model.logits(hidden)


def _are_alike(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether logits [rows, vocab] are equal up to rounding; where both are no numbers, too."""
    actual, expected = actual.float().nan_to_num(), expected.float().nan_to_num()
    spread = (expected - expected.mean(1, keepdim=True)).norm(dim=1)
    return bool(((actual - expected).norm(dim=1) <= _TOLERANCE * spread).all())


@contextmanager
def capture_on(device: torch.device) -> Iterator[Capture]:
    """Capture on a GPU, for trials; the memory of the graphs is given back at the end."""
    pool = GraphPool(device)
    graphs = []  # the pool lives as long as its last graph

    def capture(work: Callable[[], None]) -> Callable[[], None]:
        with pool.capturing():
            work()  # loads its kernels, and takes cuBLAS's workspace of this stream
            # What would break a capture raises here, and leaves nothing to be cleaned up.
            with _synchronisation_raises():
                work()
        graphs.append(pool.capture(work))
        return graphs[-1].replay

    try:
        yield capture
    finally:
        torch.cuda.synchronize(device)
        graphs.clear()
        gc.collect()  # an exception may hold tensors and graphs in circles
        torch.cuda.empty_cache()


@contextmanager
def _synchronisation_raises() -> Iterator[None]:
    """Have operations of torch that wait for the device raise RuntimeError within the context."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a prototype, which may not find every such operation
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
