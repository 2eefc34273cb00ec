"""Serve a model of Transformers on vAttention's KV tensors, with any attention kernel.

python examples/vattention.py [--model FOLDER] [--kernel sdpa|cudnn|flash|flashinfer] [PROMPT ...]
"""

from __future__ import annotations

import argparse
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer

from aquifer import vattention
from aquifer.config import BUNDLED_MODELS


def sdpa(query: Any, keys: Any, values: Any, scale: float, backend: Any = None) -> torch.Tensor:
    """A kernel of torch over one request; all tensors are [tokens, heads, dim]."""
    query, keys, values = (each.transpose(0, 1)[None] for each in (query, keys, values))
    with sdpa_kernel(backend) if backend else nullcontext():
        out = scaled_dot_product_attention(
            query, keys, values, is_causal=query.shape[2] > 1, scale=scale, enable_gqa=True
        )
    return out[0].transpose(0, 1)


def flashinfer(query: Any, keys: Any, values: Any, scale: float) -> Any:
    """FlashInfer's kernel of prompts, which takes decoding as a prompt of one token."""
    from flashinfer import single_prefill_with_kv_cache as kernel

    return kernel(query, keys, values, causal=True, sm_scale=scale)


KERNELS: dict[str, Any] = {
    "sdpa": sdpa,
    "cudnn": partial(sdpa, backend=SDPBackend.CUDNN_ATTENTION),
    "flash": partial(sdpa, backend=SDPBackend.FLASH_ATTENTION),
    "flashinfer": flashinfer,
}


def generate(model: Any, kv: Any, prompts: list[list[int]], num_new: int, kernel: Any) -> Any:
    """Greedy tokens after each prompt; as many prompts at once as memory allows."""
    tokens = [list(prompt) for prompt in prompts]
    waiting = list(range(len(prompts)))
    running: dict[int, int] = {}  # the reqid of each
    lengths = [0] * kv.max_batch  # of each reqid, with this step's tokens
    parts: list[tuple[int, int, int]] = []  # of this step: (reqid, first token, end)

    def attend(module: Any, query: Any, key: Any, value: Any, mask: Any, **options: Any) -> Any:
        """Write the KV of the step's tokens, which lie in one row, and attend to each request's."""
        rows = [end - start for _, start, end in parts]
        split = [each[0].transpose(0, 1).split(rows) for each in (query, key, value)]
        keys, values = kv[module.layer_idx]
        out = []
        for (reqid, start, end), q, k, v in zip(parts, *split, strict=True):
            keys[reqid, start:end], values[reqid, start:end] = k, v
            out.append(kernel(q, keys[reqid, :end], values[reqid, :end], options["scaling"]))
        return torch.cat(out)[None], None

    AttentionInterface.register("vattention", attend)
    model.set_attn_implementation("vattention")
    while waiting or running:
        while waiting and len(running) < kv.max_batch:
            request = waiting.pop(0)
            running[request] = kv.alloc_reqid(len(tokens[request]))
        starts = lengths.copy()
        for request, reqid in running.items():
            lengths[reqid] = len(tokens[request])
        while not kv.step(lengths):  # memory is short: the last request begins again later
            if len(running) == 1:
                raise SystemExit("there is too little memory for one request")
            request, reqid = running.popitem()
            kv.free_reqid(reqid)
            lengths[reqid] = 0
            waiting.insert(0, request)
        parts[:] = [(reqid, starts[reqid], lengths[reqid]) for reqid in running.values()]
        new = zip(running, parts, strict=True)
        ids = [token for request, (_, start, end) in new for token in tokens[request][start:end]]
        positions = [position for _, start, end in parts for position in range(start, end)]
        row = partial(torch.tensor, device=model.device)
        logits = model(row([ids]), position_ids=row([positions]), use_cache=False).logits[0]
        last = torch.tensor([end - start for _, start, end in parts]).cumsum(0) - 1
        for request, token in zip(list(running), logits[last].argmax(-1).tolist(), strict=True):
            tokens[request].append(token)
            if len(tokens[request]) == len(prompts[request]) + num_new:
                reqid = running.pop(request)
                kv.free_reqid(reqid)
                lengths[reqid] = 0
    return [ids[len(prompt) :] for ids, prompt in zip(tokens, prompts, strict=True)]


def main() -> None:
    """Run the example."""
    parser = argparse.ArgumentParser(description="vAttention's KV tensors under Transformers.")
    parser.add_argument("prompts", nargs="*", default=["Once upon a time", "The river"])
    parser.add_argument("--model", default=BUNDLED_MODELS["demo"], help="folder of a checkpoint")
    parser.add_argument("--kernel", default="sdpa", choices=KERNELS)
    parser.add_argument("--max-tokens", type=int, default=40)
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    model: Any = AutoModelForCausalLM.from_pretrained(arguments.model, dtype="auto").to(device)
    config, heads = model.config, model.config.num_attention_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    shape = (config.num_hidden_layers, 16, 512, config.num_key_value_heads, dim, model.dtype)
    with torch.inference_mode(), vattention.init(*shape, device=device) as kv:
        prompts = [tokenizer(prompt).input_ids for prompt in arguments.prompts]
        kernel = KERNELS[arguments.kernel]
        outputs = generate(model, kv, prompts, arguments.max_tokens, kernel)
    for prompt, ids in zip(arguments.prompts, outputs, strict=True):
        print(f"{prompt}|{tokenizer.decode(ids)}")


if __name__ == "__main__":
    main()
