"""Chat templates are rendered as Transformers does it, and can do nothing else."""

from __future__ import annotations

from collections import OrderedDict
from enum import StrEnum
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from aquifer.errors import RequestError
from aquifer.text.chat_template import ChatTemplate

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
CONVERSATION: list[dict[str, Any]] = [
    {"role": "system", "content": 'Be <brief> & "exact".'},
    {"role": "user", "content": "Wie heißt das?"},
    {"role": "assistant", "content": "Ein Wort.", "reasoning": "short"},
    {"role": "user", "content": [{"type": "text", "text": "x"}], "names": ("a", "b")},
]


class Role(StrEnum):
    USER = "user"


TEMPLATES = [
    "{{ bos_token }}{% for m in messages %}\n  {% if loop.first %}\n{{ m.role }}\n{% endif %}\n"
    "  {{- m['content'] | string | trim }}{{ eos_token }}\n{% endfor %}\n"
    "{% if add_generation_prompt %}go{% endif %}",
    "{% for m in messages %}{{ m | tojson }}\n{% endfor %}",
    "{{ messages | tojson(indent=2) }} {{ messages | tojson(ensure_ascii=true, sort_keys=true) }}",
    "{{ messages[1] | tojson(separators=(',', ':')) }}",
    "{% for m in messages %}{% if loop.index == 2 %}{% continue %}{% endif %}{{ m.role }}"
    "{% if loop.index == 3 %}{% break %}{% endif %}{% endfor %}",
    "{% for m in messages %}{% generation %}{% set x = m.role %}{{ x }}{% endgeneration %}{{ x }}\n"
    "{% endfor %}",
    "{% set ns = namespace(n=0, self='me', names=[]) %}{% for m in messages %}"
    "{% set ns.n = ns.n + m.content | length %}{% endfor %}{{ ns.n }}{{ ns.self }}",
    "{% set d = dict(a=1, **{'b': 2}) %}{{ d | tojson }}{{ dict.fromkeys(['x', 'y'], 0) }}",
    "{% for m in messages %}{{ m.reasoning_content }}|{{ m.thinking }}|{{ m.reasoning }}\n"
    "{% endfor %}",
    "{{ tools is none }}{{ documents is none }}{{ tools is defined }}{{ unknown is defined }}",
    "{{ strftime_now('%Y') | length }}{{ flag }}{{ level + 1 }}{{ table.a[0] }}{{ kind.title() }}",
    "{% macro tag(name) %}<{{ name }}>{% endmacro %}{{ tag(messages[0]['role']) }}"
    "{{ range(3) | list }}{{ messages[3].names }}",
]


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("add_generation_prompt", [False, True])
def test_the_text_is_that_of_transformers(template: str, add_generation_prompt: bool) -> None:
    variables = {
        "flag": True,
        "level": 2,
        "table": OrderedDict(a=[1.5, None]),
        "kind": Role.USER,
    }
    ours = ChatTemplate(template, TOKENS).render(CONVERSATION, add_generation_prompt, variables)
    theirs, _ = render_jinja_template(
        conversations=[CONVERSATION],
        chat_template=template,
        add_generation_prompt=add_generation_prompt,
        **TOKENS,
        **variables,
    )
    assert ours == theirs[0]


@pytest.mark.parametrize("name", ["reasoning_content", "thinking", "reasoning"])
@pytest.mark.parametrize("other", [{}, {"thinking": None}, {"reasoning_content": "first"}])
def test_reasoning_has_the_names_that_templates_read(name: str, other: dict[str, Any]) -> None:
    message = {"role": "assistant", "content": "", name: "so", **other}
    template = "{{ messages | tojson(sort_keys=true) }}"
    theirs, _ = render_jinja_template(conversations=[[message]], chat_template=template)
    assert ChatTemplate(template, {}).render([message], False, {}) == theirs[0]


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='x') }}",
        "{{ dict.mro() }}",
        "{{ namespace.__init__.__globals__ }}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
        "{{ namespace(_a=1) }}",
        "{{ namespace({'__init__': 1}) }}",
        "{% include 'file' %}",
        "{{ range(10 ** 7) }}",
        "{{ raise_exception('no') }}",
    ],
)
def test_what_the_sandbox_refuses(template: str) -> None:
    messages = [{"role": "user", "content": "hi"}]
    with pytest.raises(RequestError, match="chat template refused"):
        ChatTemplate(template, {}).render(messages, False, {})
    assert messages == [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    "name",
    [
        "dict.__class__",
        "raise_exception.__globals__",
        "namespace.__init__",
        "messages.__class__",
        "''.format.__self__",
        "'{0.__class__}'.format(messages)",
    ],
)
def test_names_that_are_python_s_are_undefined(name: str) -> None:
    assert ChatTemplate(f"{{{{ {name} }}}}", {}).render([], False, {}) == ""


def test_values_that_are_not_json_are_refused() -> None:
    with pytest.raises(RequestError, match="object is not a type of JSON"):
        ChatTemplate("", {}).render([{"role": "user", "content": object()}], False, {})
