"""Write README's table of the models that are served, from `aquifer.models.families.FAMILIES`.

python -m tools.support_table
"""

from __future__ import annotations

from pathlib import Path

from tools.generated import with_part

from aquifer.models.families import FAMILIES

README = Path(__file__).parents[1] / "README.md"
BEGIN = "<!-- models: written by tools/support_table.py -->\n"
END = "<!-- end of models -->\n"

_OTHERS = (
    "most other decoder-only models that Transformers has, as well as what our own decoder lacks "
    "of a family: OPT-350M, older Falcons"
)
_REFUSED = (
    "encoder-decoders, other models with recurrent state, ALiBi or attention sinks, multimodal "
    "checkpoints, and quantised ones except GPT-OSS in MXFP4"
)


def support_table() -> str:
    """The table in Markdown."""
    described = ", ".join(f"`{model_type}`" for model_type in sorted(FAMILIES))
    rows = (
        ("our own decoder, by `model_type`", described),
        ("through Transformers, with our KV cache", _OTHERS),
        ("refused at load, with the reason", _REFUSED),
    )
    return "| | |\n|---|---|\n" + "".join(f"| {name} | {what} |\n" for name, what in rows)


def with_table(readme: str) -> str:
    """README with its table written anew."""
    return with_part(readme, BEGIN, END, support_table())


if __name__ == "__main__":
    README.write_text(with_table(README.read_text(encoding="utf-8")), encoding="utf-8")
