"""Keys of groups: equal where the bytes are, and only there."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from tests.checkpoints import save_checkpoint

from aquifer.weights.checkpoint import Checkpoint
from aquifer.weights.fingerprint import SAMPLE_BYTES, GroupOrigin, keys_of_equals
from aquifer.weights.forms import Form, RowFactors, RowOrder
from aquifer.weights.parameters import Parameter, Source

SIZE = 3 * SAMPLE_BYTES  # bytes of a tensor; the middle third is in no sample


def tensor(seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn((SIZE // 16, 4), generator=generator)


def origin(
    folder: Path,
    tensors: Mapping[str, torch.Tensor],
    *names: str,
    form: Form = Form.PLAIN,
    order: RowOrder | None = None,
    factors: RowFactors = (),
) -> GroupOrigin:
    """A group with a parameter for each name, in a checkpoint that is made for it."""
    save_checkpoint(folder, {"architectures": ["Test"]}, dict(tensors))
    return group(Checkpoint.open(folder), *names, form=form, order=order, factors=factors)


def group(
    checkpoint: Checkpoint,
    *names: str,
    form: Form = Form.PLAIN,
    order: RowOrder | None = None,
    factors: RowFactors = (),
) -> GroupOrigin:
    sources = (Source(name, form=form, order=order, factors=factors) for name in names)
    parameters = (
        Parameter(source.name, (4, SIZE // 16), torch.float32, (source,)) for source in sources
    )
    return GroupOrigin(tuple(parameters), checkpoint)


def test_equal_tensors_have_equal_keys_wherever_they_are(tmp_path: Path):
    equal = tensor()
    first = origin(tmp_path / "1", {"x": equal}, "x")
    second = origin(tmp_path / "2", {"more": tensor(1), "y": equal}, "y")
    other = origin(tmp_path / "3", {"x": tensor(2)}, "x")
    assert len({each.key_by_file() for each in (first, second, other)}) == 3
    keys = keys_of_equals([first, second, other], tmp_path / "hashes")
    assert keys.keys() == {first, second}
    assert keys[first] == keys[second]


@pytest.mark.parametrize("place", [0, SIZE // 8, SIZE // 4 - 1])
def test_one_number_makes_a_difference(tmp_path: Path, place: int):
    """At the ends, where samples find it, and between them."""
    changed = tensor()
    changed.view(-1)[place] += 1
    first = origin(tmp_path / "1", {"x": tensor()}, "x")
    second = origin(tmp_path / "2", {"x": changed}, "x")
    keys = keys_of_equals([first, second], tmp_path / "hashes")
    assert len({*keys.values()}) == len(keys) in (0, 2)
    assert bool(keys) == (place == SIZE // 8)


def test_the_form_counts_too(tmp_path: Path):
    plain = origin(tmp_path / "1", {"x": tensor()}, "x")
    transposed = origin(tmp_path / "2", {"x": tensor()}, "x", form=Form.TRANSPOSED)
    order = RowOrder(1, (1, 3))
    ordered = origin(tmp_path / "3", {"x": tensor()}, "x", order=order)
    scaled = origin(tmp_path / "4", {"x": tensor()}, "x", factors=((4, 0.5),))
    assert keys_of_equals([plain, transposed, ordered, scaled], tmp_path / "hashes") == {}


def test_one_checkpoint_is_not_read(tmp_path: Path):
    first = origin(tmp_path / "1", {"x": tensor(), "y": tensor()}, "x")
    second, other = group(first.checkpoint, "x"), group(first.checkpoint, "y")
    assert first.key_by_file() == second.key_by_file() != other.key_by_file()
    assert keys_of_equals([first, second], tmp_path / "hashes") == {}
    assert not (tmp_path / "hashes").exists()


def test_hashes_are_kept_until_the_file_changes(tmp_path: Path):
    first = origin(tmp_path / "1", {"x": tensor()}, "x")
    second = origin(tmp_path / "2", {"x": tensor()}, "x")
    hashes = tmp_path / "hashes"
    keys = keys_of_equals([first, second], hashes)
    for kept in hashes.iterdir():  # as if the contents were others, which nothing reads again
        kept.write_text(kept.read_text().replace(first_digest(kept), "0" * 40))
    assert len({*keys_of_equals([first, second], hashes).values()} - {*keys.values()}) == 1
    file = tmp_path / "2" / "model.safetensors"
    os.utime(file, ns=(1, 1))
    again = keys_of_equals([first, second], hashes)
    assert again[second] == keys[second] != again[first]


def first_digest(kept: Path) -> str:
    return kept.read_text().split('"')[-2]


@pytest.mark.parametrize("damage", ["{", "[]", '{"stamp": 1}'])
def test_damaged_hashes_are_made_again(tmp_path: Path, damage: str):
    first = origin(tmp_path / "1", {"x": tensor()}, "x")
    second = origin(tmp_path / "2", {"x": tensor()}, "x")
    keys = keys_of_equals([first, second], tmp_path / "hashes")
    for kept in (tmp_path / "hashes").iterdir():
        kept.write_text(damage)
    assert keys_of_equals([first, second], tmp_path / "hashes") == keys


def test_a_file_that_is_gone_is_left_out(tmp_path: Path):
    first = origin(tmp_path / "1", {"x": tensor()}, "x")
    second = origin(tmp_path / "2", {"x": tensor()}, "x")
    third = origin(tmp_path / "3", {"x": tensor()}, "x")
    (tmp_path / "2" / "model.safetensors").unlink()
    keys = keys_of_equals([first, second, third], tmp_path / "hashes")
    assert keys.keys() == {first, third}
    assert len({*keys.values()}) == 1
    with pytest.raises(OSError, match="safetensors"):
        second.key_by_file()
