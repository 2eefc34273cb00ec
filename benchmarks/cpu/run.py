"""CPU benchmark: the engine and Transformers' `generate` on this machine: `make bench-cpu`.

Creates a random Llama of 100 million parameters, then runs three `aquifer bench` commands; their
results are the JSON files in this folder.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

RESULTS = Path(__file__).resolve().parent


def make_model(folder: Path) -> None:
    """Write a Llama of 100 M random parameters, grouped-query attention, tied embeddings."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=12,
        num_attention_heads=12,
        num_key_value_heads=4,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        eos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def bench(folder: Path, *arguments: str) -> None:
    """Run `aquifer bench` in a separate process, and copy its result here.

    It runs in `folder`, so that the command in the result has no other paths.
    """
    result = f"{arguments[0]}.json"
    command = [sys.executable, "-m", "aquifer", "bench", *arguments, "--output", result]
    subprocess.run(command, cwd=folder, check=True)
    shutil.copy(folder / result, RESULTS / result)


def main() -> None:
    """Run all three measurements."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model(folder / "llama-100m")
        bench(folder, "throughput", "llama-100m", "--transformers")
        bench(folder, "latency", "llama-100m", "--transformers")
        bench(folder, "overhead")


if __name__ == "__main__":
    main()
