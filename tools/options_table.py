"""Write README's table of options, from `aquifer.options.OPTIONS`.

python -m tools.options_table
"""

from __future__ import annotations

from pathlib import Path

from tools.generated import with_part

from aquifer.option import Option
from aquifer.options import OPTIONS

README = Path(__file__).parents[1] / "README.md"
BEGIN = "<!-- options: written by tools/options_table.py -->\n"
END = "<!-- end of options -->\n"


def options_table() -> str:
    """The table in Markdown."""
    head = "| `aquifer serve` | `LLM(...)` | default | |\n|---|---|---|---|\n"
    return head + "".join(map(_row, OPTIONS))


def _row(option: Option) -> str:
    if option.is_argument:
        flag = f"`{option.metavar}...`"
    elif option.type is bool:
        flag = f"`{option.flag}`, `--no-...`"
    else:
        flag = f"`{option.flag} {option.metavar}`"
    if option.short:
        flag += f", `{option.short}`"
    keyword = f"`{option.name}=`" if "llm" in option.scopes else ""
    default = f"`{option.default_text}`" if option.default_text else option.unset
    return f"| {flag} | {keyword} | {default} | {option.help} |\n"


def with_table(readme: str) -> str:
    """README with its table written anew."""
    return with_part(readme, BEGIN, END, options_table())


if __name__ == "__main__":
    README.write_text(with_table(README.read_text(encoding="utf-8")), encoding="utf-8")
