"""Planning of stretches, and the copies from a stretch to its tensors, on the CPU.

`tests/gpu` covers the copies to a GPU.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch

from aquifer.weights.checkpoint import StoredTensor, read_range
from aquifer.weights.forms import Form, RowOrder, Target
from aquifer.weights.loader import Stretch, plan_stretches, scatter

KIB = 1 << 10


def _write(
    file: Path, tensors: list[torch.Tensor], padding_bytes: int = 0
) -> list[tuple[StoredTensor, Target]]:
    """Write tensors one after the other; returns each with an empty tensor to fill."""
    data = b"header" + bytes(padding_bytes)
    jobs = []
    for tensor in tensors:
        stored = StoredTensor(file, tensor.dtype, tuple(tensor.shape), len(data), tensor.nbytes)
        jobs.append((stored, Target(torch.empty_like(tensor))))
        data += tensor.view(-1).view(torch.uint8).numpy().tobytes()
    file.write_bytes(data)
    return jobs


def _load(stretches: list[Stretch]) -> None:
    for stretch in stretches:
        stage = torch.full((stretch.end_bytes - stretch.begin_bytes,), 0xA5, dtype=torch.uint8)
        read_range(stretch.file, stretch.begin_bytes, stage)
        scatter(stage, stretch)


@pytest.mark.parametrize("padding_bytes", [0, 1, 2, 58])
@pytest.mark.parametrize("max_bytes", [256, 1000, 1 << 20])
def test_every_byte_arrives(tmp_path, max_bytes, padding_bytes):
    """Two files; tensors of several sizes, aligned or not, with and without a conversion."""
    generator = torch.Generator().manual_seed(0)
    expected, jobs = [], []
    for name in ("a", "b"):
        tensors = [
            torch.randn(n, generator=generator).to(dtype)
            for n, dtype in [
                (1, torch.bfloat16),
                (3000, torch.float32),
                (0, torch.float32),
                (7, torch.bfloat16),
                (500, torch.float64),
                (1001, torch.float16),
            ]
        ]
        written = _write(tmp_path / name, tensors, padding_bytes)
        jobs += written
        expected += tensors
    wanted = [torch.empty(target.part.shape, dtype=torch.bfloat16) for _, target in jobs]
    same = plan_stretches(jobs, max_bytes)
    _load(same)
    _load(
        plan_stretches(
            [(stored, Target(out)) for (stored, _), out in zip(jobs, wanted, strict=True)],
            max_bytes,
        )
    )
    for (_, target), converted, tensor in zip(jobs, wanted, expected, strict=True):
        assert torch.equal(target.part, tensor)
        assert torch.equal(converted, tensor.bfloat16())
    for stretch in same:
        assert 0 < stretch.end_bytes - stretch.begin_bytes <= max_bytes
        assert stretch.begin_bytes % 64 == 0


def test_few_large_stretches(tmp_path):
    """Small tensors share a stretch, large ones are cut, and unused tensors are not read."""
    file = tmp_path / "a"
    sizes = [100, 200, 40 * KIB, 300, 8 << 20, 10, 20]
    jobs, offset = [], 8
    for n in sizes:
        out = Target(torch.empty(0, dtype=torch.uint8))
        jobs.append((StoredTensor(file, torch.uint8, (n,), offset, n), out))
        offset += n
    del jobs[4]
    stretches = plan_stretches(jobs, 16 * KIB)
    read_bytes = sum(s.end_bytes - s.begin_bytes for s in stretches)
    assert len(stretches) == 4
    assert read_bytes < sum(sizes) - sizes[4] + 2 * 64 + len(stretches) * 64
    arrived = Counter[int]()
    for stretch in stretches:
        for piece in stretch.pieces:
            arrived[piece.stored.offset_bytes] += piece.num_bytes
    assert arrived == {stored.offset_bytes: stored.num_bytes for stored, _ in jobs}


def test_one_stored_tensor_for_two_parameters(tmp_path):
    jobs = _write(tmp_path / "a", [torch.arange(1000.0)])
    stored, target = jobs[0]
    again = torch.empty_like(target.part)
    _load(plan_stretches([(stored, target), (stored, Target(again))], 512))
    assert torch.equal(target.part, torch.arange(1000.0))
    assert torch.equal(again, target.part)


@pytest.mark.parametrize("max_bytes", [256, 1000, 1 << 20])
@pytest.mark.parametrize("padding_bytes", [0, 1, 2])
def test_transposed_matrices(tmp_path, max_bytes, padding_bytes):
    """Stretches end within rows, between rows and between matrices."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(3, 20, 14), (33, 7), (2, 2, 5, 9), (1, 1), (4, 1, 300), (2, 300, 1), (2, 0, 3)]
    tensors = [torch.randn(shape, generator=generator).bfloat16() for shape in shapes]
    stored = [stored for stored, _ in _write(tmp_path / "a", tensors, padding_bytes)]
    for dtype in (torch.bfloat16, torch.float32):
        filled = [torch.empty(tensor.mT.shape, dtype=dtype) for tensor in tensors]
        targets = [Target(part, Form.TRANSPOSED) for part in filled]
        _load(plan_stretches(zip(stored, targets, strict=True), max_bytes))
        for part, tensor in zip(filled, tensors, strict=True):
            assert torch.equal(part, tensor.mT.to(dtype))


@pytest.mark.parametrize("max_bytes", [256, 1000, 1 << 20])
@pytest.mark.parametrize("padding_bytes", [0, 1])
def test_rows_with_constant_factors(tmp_path, max_bytes, padding_bytes):
    """Stretches end within rows and between rows of different factors; results are rounded once."""
    generator = torch.Generator().manual_seed(0)
    factors = ((2, 0.3), (3, 1.0), (1, -1.7))
    shapes = [(6, 57), (6,), (6, 1, 40), (6, 0)]
    tensors = [torch.randn(shape, generator=generator).bfloat16() for shape in shapes]
    stored = [stored for stored, _ in _write(tmp_path / "a", tensors, padding_bytes)]
    each = torch.tensor([0.3] * 2 + [1.0] * 3 + [-1.7])
    for dtype in (torch.bfloat16, torch.float32):
        filled = [torch.empty(tensor.shape, dtype=dtype) for tensor in tensors]
        targets = [Target(part, factors=factors) for part in filled]
        assert not targets[0].is_copy(torch.bfloat16)
        _load(plan_stretches(zip(stored, targets, strict=True), max_bytes))
        for part, tensor in zip(filled, tensors, strict=True):
            rows = each.view(-1, *[1] * (tensor.dim() - 1))
            assert torch.equal(part, (tensor.float() * rows).to(dtype))


@pytest.mark.parametrize("max_bytes", [256, 1000, 1 << 20])
@pytest.mark.parametrize("padding_bytes", [0, 1])
def test_rows_in_another_order(tmp_path, max_bytes, padding_bytes):
    """Stretches end within rows and between the parts of a group."""
    generator = torch.Generator().manual_seed(0)
    parts, order = (2, 3, 1), (2, 0, 1)
    shapes = [(24, 7), (24,), (24, 1, 50)]  # four groups
    tensors = [torch.randn(shape, generator=generator).bfloat16() for shape in shapes]
    stored = [stored for stored, _ in _write(tmp_path / "a", tensors, padding_bytes)]
    for dtype in (torch.bfloat16, torch.float32):
        filled = [torch.empty(tensor.shape, dtype=dtype) for tensor in tensors]
        targets = [Target(part, order=RowOrder(4, parts, order)) for part in filled]
        assert not targets[0].is_copy(torch.bfloat16)
        _load(plan_stretches(zip(stored, targets, strict=True), max_bytes))
        for part, tensor in zip(filled, tensors, strict=True):
            by_group = tensor.unflatten(0, (4, 6)).split(parts, dim=1)
            expected = torch.cat([by_group[i].flatten(0, 1) for i in order])
            assert torch.equal(part, expected.to(dtype))
