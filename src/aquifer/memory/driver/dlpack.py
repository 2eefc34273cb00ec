"""A tensor over addresses that may not be mapped yet.

Every other way to make a tensor from an address asks the device whose address it is, and fails
where nothing is mapped yet. A DLPack capsule states place and shape, and is believed.
"""

from __future__ import annotations

import ctypes

import torch
from torch.utils.dlpack import from_dlpack

_DEVICE_TYPES = {"cpu": 1, "cuda": 2}  # DLDeviceType
_UINT = 1  # DLDataTypeCode
_CAPSULE_NAME = b"dltensor"  # the capsule refers to these bytes, so they live as long as the module


class _DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("dtype_code", ctypes.c_uint8),
        ("dtype_bits", ctypes.c_uint8),
        ("dtype_lanes", ctypes.c_uint16),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
    )


class _DLManagedTensor(ctypes.Structure):
    _fields_ = (
        ("dl_tensor", _DLTensor),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )


class _Block(ctypes.Structure):
    """What one `malloc` holds: the capsule's content, and the shape that it points to."""

    _fields_ = (("managed", _DLManagedTensor), ("shape", ctypes.c_int64 * 1))


def tensor_over(address: int, num_bytes: int, device: torch.device) -> torch.Tensor:
    """A uint8 tensor over `num_bytes` from `address` on, which is believed to be on `device`.

    The tensor keeps nothing alive but its own description.
    """
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    libc.malloc.argtypes = [ctypes.c_size_t]
    pointer = libc.malloc(ctypes.sizeof(_Block))
    if pointer is None:
        raise MemoryError
    block = _Block.from_address(pointer)
    block.shape[0] = num_bytes
    block.managed = _DLManagedTensor(
        dl_tensor=_DLTensor(
            data=address,
            device_type=_DEVICE_TYPES[device.type],
            device_id=device.index or 0,
            ndim=1,
            dtype_code=_UINT,
            dtype_bits=8,
            dtype_lanes=1,
            shape=pointer + _Block.shape.offset,
            strides=None,
            byte_offset=0,
        ),
        manager_ctx=None,
        # C's own `free` deletes the block, which begins with what it is called with. A deleter
        # written in Python could be called when the interpreter is gone already.
        deleter=ctypes.cast(libc.free, ctypes.c_void_p).value,
    )
    new_capsule = ctypes.pythonapi.PyCapsule_New
    new_capsule.restype = ctypes.py_object
    new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    tensor: torch.Tensor = from_dlpack(new_capsule(pointer, _CAPSULE_NAME, None))
    return tensor
