"""Checkpoints: damage is reported by name, and tensors are loaded without a second copy."""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tests.checkpoints import tiny_llama
from tests.mxfp4 import CONFIG, edit_config

from aquifer.bench.load import made_checkpoint
from aquifer.config import EngineConfig, ModelSpec
from aquifer.engine.engine import Engine
from aquifer.errors import ConfigError
from aquifer.memory.driver.faulty import FaultyDriver
from aquifer.memory.driver.host import HostDriver
from aquifer.memory.pool import Kind, Owner, PagePool
from aquifer.weights.checkpoint import Checkpoint, read_into, stored_dtype
from aquifer.weights.forms import Form, Target
from aquifer.weights.parameters import Parameter, Source, check_sources
from aquifer.weights.store import WeightStore

PAGE = 4096
OWNER = Owner("a", Kind.WEIGHTS)
MIB = 1 << 20
UP_PROJ = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("checkpoints") / "tiny")


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return shutil.copytree(original, tmp_path / "tiny")


# --- damage --------------------------------------------------------------------------------


def _edit_config(folder: Path, **entries: Any) -> None:
    file = folder / "config.json"
    config = json.loads(file.read_text()) | entries
    file.write_text(json.dumps({k: v for k, v in config.items() if v != "absent"}))


def _remove_from_config(folder: Path, entry: str) -> None:
    _edit_config(folder, **{entry: "absent"})


def _edit_tensors(folder: Path, edit: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    edit(tensors)
    save_file(tensors, file)


def _shard(folder: Path) -> list[str]:
    """Spread the tensors over three files, with an index."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    weight_map = {tensor: names[i % 3] for i, tensor in enumerate(sorted(tensors))}
    for name in names:
        part = {tensor: tensors[tensor] for tensor in tensors if weight_map[tensor] == name}
        save_file(part, folder / name)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return names


def _only_a_file(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.write_text("")


def _all_int8(folder: Path) -> None:
    _edit_tensors(folder, lambda t: t.update({name: t[name].char() for name in t}))
    _edit_config(folder, torch_dtype="absent")


def _only_bin(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def _missing_shard(folder: Path) -> None:
    (folder / _shard(folder)[1]).unlink()


def _odd_index(folder: Path) -> None:
    _shard(folder)
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": 3, "b": []}}')


def _shard_named(name: Any, folder: Path) -> None:
    """An index that names a file for one tensor, besides the files that there are."""
    names = _shard(folder)
    for outside in (folder.parent, folder / "inner"):  # names that lead to files are refused, too
        outside.mkdir(exist_ok=True)
        shutil.copy(folder / names[0], outside / "shard.safetensors")
    index = folder / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    index.write_text(json.dumps({"weight_map": weight_map | {UP_PROJ: name}}))


def _damaged_index(folder: Path) -> None:
    _shard(folder)
    (folder / "model.safetensors.index.json").write_text("{")


def _shard_without_tensor(folder: Path) -> None:
    names = _shard(folder)
    for name in names:
        tensors = load_file(folder / name)
        tensors.pop(UP_PROJ, None)
        save_file(tensors, folder / name)


def _header(folder: Path, header: bytes, data: bytes = b"") -> None:
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + data)


def _entry(folder: Path, **entry: Any) -> None:
    whole = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | entry
    _header(folder, json.dumps({"weight": whole}).encode(), bytes(8))


def _pair(folder: Path, *, second: list[int], num_bytes: int) -> None:
    """A file of two tensors, the first one of which has the first 8 bytes of the data."""
    entry = {"dtype": "F32", "shape": [2]}
    header = {"b": {**entry, "data_offsets": second}, "a": {**entry, "data_offsets": [0, 8]}}
    _header(folder, json.dumps(header).encode(), bytes(num_bytes))


def _in_place_of(name: str, make: Callable[[Path], Any], folder: Path) -> Path:
    """Something that is no file, with the name of one."""
    (folder / name).unlink()
    make(folder / name)
    return folder / name


def _repeated(named: dict[str, str], folder: Path) -> None:
    """Shards all of which have one tensor: zeros, but for the last one.

    Args:
        named: what the index says of it, and of others that it alone has.
        folder: the checkpoint.
    """
    names = _shard(folder)
    shards = {name: load_file(folder / name) for name in names}
    original = next(shard[UP_PROJ] for shard in shards.values() if UP_PROJ in shard)
    for name, shard in shards.items():
        shard[UP_PROJ] = original if name == names[-1] else torch.zeros_like(original)
        save_file(shard, folder / name)
    index = folder / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    del weight_map[UP_PROJ]
    index.write_text(json.dumps({"weight_map": weight_map | named}))


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no such path": (shutil.rmtree, r"no such model: .*/tiny does not exist"),
    "no config": (
        lambda folder: (folder / "config.json").unlink(),
        r"tiny is not a checkpoint: give a directory that holds config.json",
    ),
    "a file": (
        _only_a_file,
        r"tiny is not a checkpoint: give a directory",
    ),
    "config is no JSON": (
        lambda folder: (folder / "config.json").write_text("{"),
        r"cannot read .*config.json",
    ),
    "config is a list": (
        lambda folder: (folder / "config.json").write_text("[1]"),
        r"cannot read .*config.json: it holds no JSON object",
    ),
    "no weights": (
        lambda folder: (folder / "model.safetensors").unlink(),
        r"tiny holds neither model.safetensors nor model.safetensors.index.json$",
    ),
    "only bin": (_only_bin, r"found pytorch_model.bin; convert it to safetensors first"),
    "missing shard": (_missing_shard, r"tiny lacks model-00002-of-00003.safetensors, which"),
    "odd index": (_odd_index, r"index.json: weight_map.a is 3; it must be the name of a file"),
    **{
        f"index names {name!r:.20}": (
            partial(_shard_named, name),
            rf"index.json: weight_map\.{UP_PROJ} is .*; it must be the name of a file in the same",
        )
        for name in (
            "../shard.safetensors",
            "inner/shard.safetensors",
            "inner/../shard.safetensors",
            "./model-00001-of-00003.safetensors",
            "/etc/passwd",
            "..",
            ".",
            "",
            "inner\\shard.safetensors",
            "a\0b",
            "x" * 300,
            "\u00e9" * 200,
            None,
            True,
            ["a"],
            {"a": 1},
        )
    },
    "index names a folder": (partial(_shard_named, "inner"), r"tiny lacks inner, which its index"),
    "index of a list": (
        lambda folder: (
            _shard(folder),
            (folder / "model.safetensors.index.json").write_text('{"weight_map": ["a"]}'),
        ),
        r"index.json: weight_map is a list; it must be an object",
    ),
    "index without files": (
        lambda folder: (
            _shard(folder),
            (folder / "model.safetensors.index.json").write_text('{"metadata": {}}'),
        ),
        r"index.json has no weight_map from tensors to files; download it again",
    ),
    "damaged index": (_damaged_index, r"cannot read .*model.safetensors.index.json"),
    "tensor missing in shards": (_shard_without_tensor, rf"lacks the tensor '{UP_PROJ}'"),
    "no tensors": (lambda folder: _header(folder, b"{}"), r"tiny holds no tensors"),
    "header garbage": (
        lambda folder: _header(folder, b"\xff\x00 garbage"),
        r"model.safetensors has a damaged safetensors header.*download it again",
    ),
    "header of another kind": (
        lambda folder: _header(folder, b'["weight"]'),
        r"model.safetensors has a damaged safetensors header",
    ),
    "header nested": (
        lambda folder: _header(folder, b"[" * 100_000),
        r"model.safetensors has a damaged safetensors header",
    ),
    "header length": (
        lambda folder: (folder / "model.safetensors").write_bytes(b"\xff" * 8 + b"{}"),
        r"model.safetensors is truncated or no safetensors file",
    ),
    "empty file": (
        lambda folder: (folder / "model.safetensors").write_bytes(b""),
        r"model.safetensors is truncated or no safetensors file",
    ),
    "unknown dtype": (lambda f: _entry(f, dtype="F4"), r"'weight' has the unknown dtype 'F4'"),
    "unknown dtype of a long name": (
        lambda f: _header(f, b'{"%s":{"dtype":"%s"}}' % (b"w" * 10_000, b"F" * 10_000)),
        r"tensor 'w{197}\.\.\.' has the unknown dtype 'F{197}\.\.\.'; convert it to one of BF16,",
    ),
    "dtype of another kind": (lambda f: _entry(f, dtype=["F32"]), r"damaged safetensors header"),
    "shape and bytes differ": (
        lambda f: _entry(f, shape=[3]),
        r"'weight' of shape \[3\] takes 12 bytes, the header gives it 8",
    ),
    "shape is negative": (
        lambda f: _entry(f, shape=[-1, -2]),
        r"'weight' of shape \[-1, -2\] takes 8 bytes",
    ),
    "too many dimensions": (lambda f: _entry(f, shape=[1] * 65), r"more than 64 dimensions"),
    "shape is infinite": (
        lambda f: _header(f, b'{"w":{"dtype":"F32","shape":[1e999],"data_offsets":[0,8]}}'),
        r"damaged safetensors header",
    ),
    "shape is no list": (lambda f: _entry(f, shape="2"), r"must be lists of whole numbers"),
    "shape of texts": (lambda f: _entry(f, shape=["2"]), r"must be lists of whole numbers"),
    "shape of flags": (lambda f: _entry(f, shape=[True, 2]), r"must be lists of whole numbers"),
    "shape is fractional": (lambda f: _entry(f, shape=[2.0]), r"'2.0' is no whole number"),
    "shape of many digits": (
        lambda f: _header(f, b'{"w":{"dtype":"F32","shape":[%s],' % (b"9" * 4000)),
        r"damaged safetensors header \(ValueError: a number has 4000 digits\); download it again$",
    ),
    "tensors overlap": (
        partial(_pair, second=[4, 12], num_bytes=12),
        r"model.safetensors has a damaged .* tensor 'b' overlaps another one at byte",
    ),
    "tensors are the same": (
        partial(_pair, second=[0, 8], num_bytes=8),
        r"tensor 'a' overlaps another one at byte",
    ),
    "a gap between tensors": (
        partial(_pair, second=[12, 20], num_bytes=20),
        r"tensor 'b' follows a gap at byte .*; download it again",
    ),
    "bytes behind the last tensor": (
        partial(_pair, second=[8, 16], num_bytes=21),
        r"model.safetensors has 5 bytes behind its last tensor; download it again",
    ),
    "a name occurs twice": (
        lambda f: _header(
            f,
            b'{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},'
            b'"w":{"dtype":"F32","shape":[2],"data_offsets":[8,16]}}',
            bytes(16),
        ),
        r"damaged safetensors header \(ValueError: 'w' occurs twice\); download it again",
    ),
    "header in UTF-16": (
        lambda f: _header(f, json.dumps({"w": {}}).encode("utf-16")),
        r"damaged safetensors header",
    ),
    "name is no Unicode": (
        lambda f: _header(
            f, b'{"\\ud800":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}', bytes(8)
        ),
        r"damaged safetensors header \(UnicodeEncodeError",
    ),
    "weights are a folder": (
        partial(_in_place_of, "model.safetensors", Path.mkdir),
        r"cannot read .*model.safetensors: it is no file, or a link to none; download it again",
    ),
    "generation_config.json is a link to nothing": (
        partial(_in_place_of, "generation_config.json", lambda f: f.symlink_to("nowhere")),
        r"cannot read .*generation_config.json: it is no file, or a link to none",
    ),
    "index is a pipe": (
        lambda folder: (
            _shard(folder),
            _in_place_of("model.safetensors.index.json", os.mkfifo, folder),
        ),
        r"cannot read .*index.json: it is no file, or a link to none",
    ),
    "a tensor is in two shards": (
        partial(_repeated, {"other": "model-00001-of-00003.safetensors"}),
        rf"tensor '{UP_PROJ}' is in model-00001-of-00003.safetensors and in model-00002-of-00003."
        r"safetensors, and model.safetensors.index.json names neither for it",
    ),
    "no offsets": (lambda f: _entry(f, data_offsets=None), r"damaged safetensors header"),
    "beyond the end": (
        lambda f: _entry(f, data_offsets=[4, 12]),
        r"model.safetensors is truncated: tensor 'weight' ends .*download it again",
    ),
    "tensor missing": (
        lambda folder: _edit_tensors(folder, lambda tensors: tensors.pop(UP_PROJ)),
        rf"tiny lacks the tensor '{UP_PROJ}', which its config calls for",
    ),
    "wrong shape": (
        lambda folder: _edit_tensors(folder, lambda t: t.update({UP_PROJ: t[UP_PROJ][:5].clone()})),
        rf"'{UP_PROJ}' has shape \[5, 64\], its config calls for \[128, 64\]",
    ),
    "another size in config": (
        lambda folder: _edit_config(folder, hidden_size=32),
        r"has shape \[320, 64\], its config calls for \[320, 32\]",
    ),
    "int8": (
        lambda folder: _edit_tensors(folder, lambda t: t.update({UP_PROJ: t[UP_PROJ].char()})),
        rf"'{UP_PROJ}' is stored as torch.int8; quantised checkpoints are not supported",
    ),
    "all int8": (
        _all_int8,
        r"is stored as torch.int8; quantised",
    ),
    "float8": (
        lambda folder: _edit_tensors(
            folder, lambda t: t.update({UP_PROJ: t[UP_PROJ].to(torch.float8_e4m3fn)})
        ),
        rf"'{UP_PROJ}' is stored as torch.float8_e4m3fn; quantised",
    ),
    **{
        f"config without {entry}": (
            partial(_remove_from_config, entry=entry),
            rf"config.json lacks {entry}, which must be a whole number from 1 to",
        )
        for entry in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_attention_heads",
            "num_hidden_layers",
        )
    },
    "rope scaling": (
        lambda folder: _edit_config(folder, rope_scaling={"rope_type": "spiral", "factor": 2.0}),
        r'rope_scaling.rope_type is "spiral"; it must be one of default, linear, dynamic, llama3,',
    ),
    "rope scaling without factor": (
        lambda folder: _edit_config(folder, rope_scaling={"type": "linear"}),
        r"config.json lacks rope_scaling.factor, which must be a number from",
    ),
}


def _check_refused(folder: Path, message: str) -> None:
    """Opening an engine on it is refused with that message, and leaks nothing."""
    driver = FaultyDriver(HostDriver())
    config = EngineConfig((ModelSpec("a", folder),), memory_bytes=16 * MIB, max_num_seqs=2)
    with pytest.raises(ConfigError, match=message) as caught:
        Engine.open(config, driver=driver)
    assert type(caught.value) is ConfigError
    assert driver.is_unused
    driver.close()


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged(folder, damage):
    act, message = DAMAGE[damage]
    act(folder)
    _check_refused(folder, message)


@pytest.mark.parametrize("number", [1, 2, 3])
def test_the_index_says_which_of_equal_names_is_meant(folder, number):
    file = f"model-0000{number}-of-00003.safetensors"
    _repeated({UP_PROJ: file}, folder)
    assert Checkpoint.open(folder).tensors[UP_PROJ].file == folder / file


def test_tensors_may_lie_in_any_order_and_be_empty(folder):
    entry = {"dtype": "F32", "shape": [2]}
    empty = {"dtype": "F32", "shape": [0, 1 << 40], "data_offsets": [8, 8]}
    header = {
        "b": {**entry, "data_offsets": [8, 16]},
        "empty": empty,
        "a": {**entry, "data_offsets": [0, 8]},
        "__metadata__": {"format": "pt"},
    }
    _header(folder, json.dumps(header).encode() + b"   ", bytes(16))
    assert Checkpoint.open(folder).tensors.keys() == {"a", "b", "empty"}


def test_many_missing_shards_are_counted(folder):
    (folder / "model.safetensors").unlink()
    names = {f"tensor {i}": f"{i:03}.safetensors" for i in range(500)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    _check_refused(folder, r"lacks 000\.\S+, 001\.\S+, 002\.safetensors and 497 more, which")


def test_links_as_in_the_cache_of_the_hub(folder, tmp_path):
    """Each file of a snapshot is a link to a blob outside of it."""
    _shard(folder)
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "0123abc"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    for i, file in enumerate(sorted(folder.iterdir())):
        file.rename(blobs / str(i))
        (snapshot / file.name).symlink_to(Path("../../blobs") / str(i))
    config = EngineConfig((ModelSpec("a", snapshot),), memory_bytes=16 * MIB, max_num_seqs=2)
    engine = Engine.open(config)
    assert engine.models["a"].num_parameters > 0
    engine.close()


def test_a_path_that_cannot_be_looked_at(folder):
    with pytest.raises(ConfigError, match=r"^cannot read .*: OSError: .*File name too long"):
        Checkpoint.open(folder / ("x" * 300))


def test_truncated_anywhere(folder):
    """Cut within the length, the header or the data, and at their ends."""
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    header_bytes = struct.unpack("<Q", whole[:8])[0]
    data_start = 8 + header_bytes
    cuts = [0, 1, 7, 8, 9, 8 + header_bytes // 2, data_start - 1, data_start, data_start + 1]
    for cut in [*cuts, (data_start + len(whole)) // 2, len(whole) - 1]:
        file.write_bytes(whole[:cut])
        _check_refused(folder, r"model.safetensors is truncated.*download it again")


def test_random_damage_to_the_header(folder):
    """With any one byte changed, either the file still opens or the error names it."""
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    generator = torch.Generator().manual_seed(0)
    for _ in range(300):
        at = int(torch.randint(8 + 400, (), generator=generator))
        byte = int(torch.randint(256, (), generator=generator))
        file.write_bytes(whole[:at] + bytes([byte]) + whole[at + 1 :])
        message = "model.safetensors"
        try:
            Checkpoint.open(folder)
        except ConfigError as error:
            message = str(error)
        assert "model.safetensors" in message


def test_a_file_that_changes_while_it_is_read(folder):
    checkpoint = Checkpoint.open(folder)
    out = torch.empty(checkpoint.tensors[UP_PROJ].shape)
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 8])
    with pytest.raises(ConfigError, match=r"model.safetensors ended early"):
        read_into(checkpoint.tensors[UP_PROJ], Target(out))
    file.unlink()
    with pytest.raises(ConfigError, match=r"cannot read .*model.safetensors"):
        read_into(checkpoint.tensors[UP_PROJ], Target(out))


# --- loading -------------------------------------------------------------------------------


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize(
    ("stored", "wanted"),
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.bfloat16),
        (torch.float64, torch.float32),
        (torch.float16, torch.bfloat16),
    ],
)
def test_every_value_arrives(folder, sharded, stored, wanted):
    """Parameters of one stored tensor each, and one of two stored tensors, in every dtype."""
    _edit_tensors(folder, lambda t: t.update({name: t[name].to(stored) for name in t}))
    tensors = load_file(folder / "model.safetensors")
    if sharded:
        _shard(folder)
    checkpoint = Checkpoint.open(folder)
    assert checkpoint.tensors.keys() == tensors.keys()
    assert checkpoint.num_bytes == sum(tensor.nbytes for tensor in tensors.values())
    parameters = [
        Parameter(name, tuple(tensor.shape), wanted, (Source(name),))
        for name, tensor in tensors.items()
    ]
    gate, up = UP_PROJ.replace("up", "gate"), UP_PROJ
    sources = (Source(gate, (slice(0, 128),)), Source(up, (slice(128, 256),)))
    parameters.append(Parameter("fused", (256, 64), wanted, sources))
    sources = (
        Source(gate, (slice(None), slice(0, 128)), form=Form.TRANSPOSED),
        Source(up, (slice(None), slice(128, 256)), form=Form.TRANSPOSED),
    )
    with pytest.raises(ConfigError, match="shape"):
        check_sources(checkpoint, [Parameter("wrong", (256, 64), wanted, sources)])
    own = Source(UP_PROJ, (1,), form=Form.TRANSPOSED)
    parameters.append(Parameter("transposed", (2, 64, 128), wanted, (own,)))
    driver = HostDriver()
    pool = PagePool(driver, 4 * MIB, PAGE)
    store = WeightStore(pool, OWNER, parameters)
    assert store.populate()
    stored_at = [stored for stored, _ in store.jobs(checkpoint)]
    in_order = sorted(stored_at, key=lambda each: (each.file, each.offset_bytes))
    assert (stored_at, len(stored_at)) == (in_order, len(tensors) + 3)
    seen_bytes: list[int] = []
    store.load(checkpoint, seen_bytes.append)
    assert sum(seen_bytes) == checkpoint.num_bytes + tensors[gate].nbytes + 2 * tensors[up].nbytes
    for name, tensor in tensors.items():
        assert torch.equal(store.tensors[name], tensor.to(wanted))
    assert torch.equal(store.tensors["fused"], torch.cat([tensors[gate], tensors[up]]).to(wanted))
    assert torch.equal(store.tensors["transposed"][1], tensors[up].T.to(wanted))
    assert pool.usage().in_use_bytes == {OWNER: store.placement.num_bytes}
    store.close()
    assert not pool.usage().in_use_bytes
    pool.close()
    driver.close()


def test_conversion_of_a_tensor_larger_than_the_scratch(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    tensor = torch.randn(9 * MIB // 2 + 5).bfloat16()  # 9 MiB in bfloat16, the scratch is 8
    save_file({"weight": tensor}, tmp_path / "model.safetensors")
    out = torch.empty(tensor.shape)
    read_into(Checkpoint.open(tmp_path).tensors["weight"], Target(out))
    assert torch.equal(out, tensor.float())


def test_transposed_matrices_larger_than_the_scratch(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    tensor = torch.randn(2, 1500, 1500).bfloat16()  # 8.6 MiB, the scratch is 8
    save_file({"weight": tensor}, tmp_path / "model.safetensors")
    for dtype in (torch.bfloat16, torch.float32):
        out = torch.empty(tensor.shape, dtype=dtype)
        read_into(Checkpoint.open(tmp_path).tensors["weight"], Target(out, Form.TRANSPOSED))
        assert torch.equal(out, tensor.mT.to(dtype))


def test_dtype_of_a_checkpoint(folder):
    _edit_tensors(folder, lambda t: t.update({UP_PROJ: t[UP_PROJ].half()}))
    for entries, expected in [
        ({"torch_dtype": "bfloat16"}, torch.bfloat16),
        ({"torch_dtype": "torch.float16"}, torch.float16),
        ({"dtype": "float16", "torch_dtype": "float32"}, torch.float16),
        ({"dtype": "int8", "torch_dtype": "absent"}, torch.float32),  # of the largest tensor
        ({"dtype": "absent", "torch_dtype": "absent"}, torch.float32),
    ]:
        _edit_config(folder, **entries)
        assert stored_dtype(Checkpoint.open(folder)) == expected


# --- memory --------------------------------------------------------------------------------

_STATUS = """
import json, sys
def status():
    lines = open("/proc/self/status").read().splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    return {name: int(fields[name].split()[0]) * 1024 for name in ("VmHWM", "VmRSS")}
"""

_LOAD = """
from pathlib import Path
import torch
from aquifer.memory.driver.host import HostDriver
from aquifer.memory.pool import Kind, Owner, PagePool
from aquifer.models import plan_model
from aquifer.weights.checkpoint import Checkpoint
from aquifer.weights.forms import Form, Target
from aquifer.weights.store import WeightStore
checkpoint = Checkpoint.open(sys.argv[1])
plan = plan_model(checkpoint, getattr(torch, sys.argv[2]))
before = status()
store = WeightStore(PagePool(HostDriver(), 2**31), Owner("a", Kind.WEIGHTS), plan.parameters)
assert store.populate()
store.load(checkpoint)
print(json.dumps([store.placement.num_bytes, before["VmRSS"], status()["VmHWM"]]))
"""

_SERVE = """
from aquifer import LLM, SamplingParams
llm = LLM(sys.argv[1], memory="1GiB")
def measure():
    memory = llm.memory()
    [model] = memory.models.values()
    kv_bytes = model.kv_mapped_bytes + memory.idle_bytes
    return model.bytes_by_kind["weights"], kv_bytes, memory.process_resident_bytes
loaded = measure()
llm.generate([[1] * 100] * 8, SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False)
print(json.dumps([*loaded, *measure()]))
"""


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """About 200 MB of float32 in few tensors."""
    folder = tmp_path_factory.mktemp("checkpoints") / "large"
    return tiny_llama(
        folder, vocab_size=24000, hidden_size=640, intermediate_size=10240, num_hidden_layers=1
    )


def _measure(script: str, *arguments: object) -> list[int]:
    """Run in a new process and read its VmHWM, because ru_maxrss starts at the parent's peak."""
    command = [sys.executable, "-c", _STATUS + script, *map(str, arguments)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    figures: list[int] = json.loads(result.stdout)
    return figures


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_loading_never_holds_a_second_copy(large, dtype):
    weight_bytes, before_bytes, peak_bytes = _measure(_LOAD, large, dtype)
    assert weight_bytes > (190 if dtype == "float32" else 95) * MIB
    assert peak_bytes - before_bytes < weight_bytes + 64 * MIB


def test_decoding_mxfp4_never_holds_a_second_copy(tmp_path):
    """About 110 MiB of bfloat16, 30 MiB as stored."""
    config = transformers.GptOssConfig(
        vocab_size=320,
        hidden_size=1024,
        intermediate_size=1024,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=18,
        dtype="bfloat16",
    )
    config.save_pretrained(tmp_path)
    edit_config(tmp_path, **CONFIG)
    with made_checkpoint(tmp_path, 1) as folder:
        stored_bytes = Checkpoint.open(folder).num_bytes
        weight_bytes, before_bytes, peak_bytes = _measure(_LOAD, folder, "bfloat16")
    assert weight_bytes > 3 * stored_bytes
    assert weight_bytes > 108 * MIB
    assert peak_bytes - before_bytes < weight_bytes + 64 * MIB


@pytest.mark.skipif(torch.version.cuda is not None, reason="torch for CUDA alone holds more")
def test_resident_memory_of_the_whole_engine(large):
    """Weights, mapped KV, and at most 400 MB for everything else: Python, torch, scratch."""
    figures = _measure(_SERVE, large)
    for weight_bytes, kv_bytes, resident_bytes in (figures[:3], figures[3:]):
        assert weight_bytes > 190 * MIB
        assert resident_bytes <= weight_bytes + kv_bytes + 400 * 10**6
