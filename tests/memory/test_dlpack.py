"""Tensors over addresses with nothing behind them."""

from __future__ import annotations

import gc

import torch

from aquifer.memory.driver.dlpack import tensor_over
from aquifer.memory.driver.host import HostDriver

PAGE = 4096
TIB = 1 << 40


def test_a_tensor_over_nothing_sees_what_is_mapped_later():
    driver = HostDriver()
    address = driver.reserve(TIB)
    tensor = tensor_over(address, TIB, torch.device("cpu"))
    assert (tensor.dtype, tensor.shape, tensor.stride()) == (torch.uint8, (TIB,), (1,))
    assert (tensor.data_ptr(), tensor.device.type) == (address, "cpu")
    far = TIB - 3 * PAGE
    driver.map(address + far, driver.create(PAGE, 1))
    words = tensor.view(torch.int32).as_strided((4, 8), (16, 1), far // 4)
    words.copy_(torch.arange(32).view(4, 8))
    del tensor
    gc.collect()
    assert words.sum() == 31 * 16
    driver.close()


def test_thousands_come_and_go():
    driver = HostDriver()
    address = driver.reserve(PAGE)
    driver.map(address, driver.create(PAGE, 1))
    for value in range(5000):
        tensor_over(address, PAGE, torch.device("cpu"))[value % PAGE] = value % 256
    assert tensor_over(address, PAGE, torch.device("cpu"))[4999 % PAGE] == 4999 % 256
    driver.close()
