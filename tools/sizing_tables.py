"""Write the tables of docs/guide/sizing.md, with the engine's own formulas.

python -m tools.sizing_tables
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tools.generated import with_part

from aquifer.cache.footprint import Footprint
from aquifer.models.registry import plan_model
from aquifer.sizes import format_size
from aquifer.weights.checkpoint import Checkpoint
from aquifer.weights.parameters import placed_bytes

ROOT = Path(__file__).parents[1]
GUIDE = ROOT / "docs" / "guide" / "sizing.md"
BEGIN, END = "<!-- {}: written by tools/sizing_tables.py -->\n", "<!-- end of {} -->\n"
PAGE_BYTES = 2 << 20  # a GPU's
OVERHEAD_BYTES = 1 << 30
BUDGETS_GIB = (18, 24, 48, 80)
REQUESTS_TOKENS = (100, 1024, 8192)


@dataclass(frozen=True)
class _Model:
    """What the tables say about a model."""

    name: str
    dtype: str
    max_model_len: int
    weight_bytes: int  # in whole pages
    footprint: Footprint

    @classmethod
    def read(cls, name: str, folder: str) -> _Model:
        plan = plan_model(Checkpoint.without_tensors(ROOT / folder))
        return cls(
            name,
            str(plan.kv_layout.dtype).removeprefix("torch."),
            plan.max_model_len,
            placed_bytes([plan.parameters], PAGE_BYTES)[0],
            Footprint(plan.kv_layout.token_bytes, PAGE_BYTES, PAGE_BYTES),
        )

    def request_bytes(self, num_tokens: int) -> int:
        """Pages of one request of so many tokens, prompt and output, in bytes."""
        return self.footprint.most(1, num_tokens) * PAGE_BYTES


LLAMA = ("Llama-3-8B", "benchmarks/gpu/models/llama-3-8b")
MODELS = (
    ("demo", "src/aquifer/bundled/demo"),
    ("Qwen3-0.6B", "benchmarks/gpu/models/qwen3-0.6b"),
    LLAMA,
)


def _row(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |\n"


def models_table() -> str:
    """What each model and its requests take, in pages of a GPU."""
    heads = [f"request of {count} tokens" for count in REQUESTS_TOKENS]
    table = _row("model", "weights", "KV of a token", "tokens in a page", *heads)
    table += _row(*["---"] * (4 + len(heads)))
    for name, folder in MODELS:
        model = _Model.read(name, folder)
        table += _row(
            f"{name}, {model.dtype}",
            format_size(model.weight_bytes),
            format_size(model.footprint.token_bytes),
            f"{model.footprint.block_tokens:.4g}",
            *(
                format_size(model.request_bytes(count))
                if count <= model.max_model_len
                else "beyond its context"
                for count in REQUESTS_TOKENS
            ),
        )
    return table


def budgets_table() -> str:
    """How many requests of Llama-3-8B run at once in some budgets."""
    model = _Model.read(*LLAMA)
    lengths = REQUESTS_TOKENS[1:]
    table = _row("budget", "for KV", "tokens", *(f"requests of {count}" for count in lengths))
    table += _row(*["---"] * (3 + len(lengths)))
    for budget_gib in BUDGETS_GIB:
        kv_bytes = (budget_gib << 30) - model.weight_bytes - OVERHEAD_BYTES
        table += _row(
            f"{budget_gib} GiB",
            format_size(kv_bytes),
            kv_bytes // model.footprint.token_bytes,
            *(kv_bytes // model.request_bytes(count) for count in lengths),
        )
    return table


def with_tables(guide: str) -> str:
    """The guide with its tables written anew."""
    for name, table in (("models", models_table()), ("budgets", budgets_table())):
        guide = with_part(guide, BEGIN.format(name), END.format(name), table)
    return guide


if __name__ == "__main__":
    GUIDE.write_text(with_tables(GUIDE.read_text(encoding="utf-8")), encoding="utf-8")
