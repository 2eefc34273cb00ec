"""Triton kernels, each beside a plain torch reference that specifies it and runs on the CPU."""

from aquifer.kernels._triton import (
    KERNEL_ALIGNMENT_BYTES,
    Recording,
    compilations,
    compiled_together,
    kernel_folder,
    start_compiler,
)

__all__ = [
    "KERNEL_ALIGNMENT_BYTES",
    "Recording",
    "compilations",
    "compiled_together",
    "kernel_folder",
    "start_compiler",
]
