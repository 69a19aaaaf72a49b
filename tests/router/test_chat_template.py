"""Chat templates render as `transformers` renders them."""

from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from medha.errors import CheckpointInvalid, RequestInvalid
from medha_router.chat_template import ChatTemplate

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Be <b>brief</b> & kind. Ünïcode 日本"},
    {"role": "user", "content": "  Hello!\n"},
    {"role": "assistant", "content": "Hi."},
    {"role": "user", "content": "What's 1 < 2?"},
]
TEMPLATES = {
    "chatml": """{% for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{% endfor %}
{% if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{% endif %}""",
    "llama2": """{{ bos_token }}{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] %}
{% set rest = messages[1:] %}{% else %}{% set rest = messages %}{% endif %}
{% for message in rest %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('roles must alternate') }}{% endif %}
{% if message['role'] == 'user' %}{{ '[INST] ' + (system ~ '\\n' if loop.first else '') + message['content'].strip() + ' [/INST]' }}
{% else %}{{ ' ' + message['content'] + ' ' + eos_token }}{% endif %}{% endfor %}""",
    "loop controls, tojson and namespace": """{% set ns = namespace(count=0) %}
{% for message in messages %}
  {% if message.role == 'system' %}{% continue %}{% endif %}
  {% set ns.count = ns.count + 1 %}
  {{ message | tojson }}
  {% if ns.count == 2 %}{% break %}{% endif %}
{% endfor %}{{ ns.count }}{{ messages | tojson(indent=2) }}""",
    "generation tag": """{% for message in messages %}{% if message.role == 'assistant' %}
{% generation %}{{ message.content }}{{ eos_token }}{% endgeneration %}
{% else %}{{ message.content }}{% endif %}{% endfor %}""",
    "set inside the generation tag": """{% set name = 'outside' %}{% for message in messages %}
{% generation %}{% set name = message.role %}{{ name }}{{ loop.index }}{{ message.content }}{% endgeneration %}
{{ name }}{% endfor %}{{ name }}""",
    "loops, macros and tags inside the generation tag": """{% set ns = namespace(count=0) %}{% generation %}
{% for message in messages %}{% if loop.index == 3 %}{% break %}{% endif %}{% set ns.count = loop.index %}{% endfor %}
{% macro twice(text) %}{{ text }}{{ text }}{% endmacro %}{{ twice('<b>') }}{% generation %}x{% endgeneration %}
{% endgeneration %}{{ ns.count }}{{ twice is defined }}""",
    "absent tools": "{% if tools is not none %}tools{% endif %}{% if not documents %}none{% endif %}{{ enable_thinking }}",
}


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_text_is_that_of_transformers(name: str, add_generation_prompt: bool) -> None:
    variables = {"enable_thinking": False}
    expected, _ = render_jinja_template(
        [MESSAGES],
        chat_template=TEMPLATES[name],
        add_generation_prompt=add_generation_prompt,
        **SPECIAL,
        **variables,
    )
    template = ChatTemplate(TEMPLATES[name], SPECIAL)
    text = template.render(MESSAGES, add_generation_prompt=add_generation_prompt, variables=variables)
    assert text == expected[0]


def test_a_template_that_objects_is_the_clients_error_and_says_why() -> None:
    template = ChatTemplate(TEMPLATES["llama2"], SPECIAL)
    with pytest.raises(RequestInvalid, match="roles must alternate") as caught:
        template.render([{"role": "assistant", "content": "?"}])
    assert caught.value.param == "messages"


def test_developer_is_system_for_templates_that_do_not_know_it() -> None:
    message = [{"role": "developer", "content": "x"}]
    assert ChatTemplate("{{ messages[0].role }}", {}).render(message) == "system"
    assert ChatTemplate("{# developer #}{{ messages[0].role }}", {}).render(message) == "developer"


def test_a_template_cannot_reach_python_internals() -> None:
    with pytest.raises(RequestInvalid):
        ChatTemplate("{{ messages.__class__.__mro__[1].__subclasses__() }}", {}).render(MESSAGES)


def test_a_broken_template_names_its_line() -> None:
    with pytest.raises(CheckpointInvalid, match="line 2"):
        ChatTemplate("\n{% if %}", {})


def test_a_loop_that_is_left_from_inside_the_generation_tag_is_an_error_of_the_template() -> None:
    source = "{% for message in messages %}{% generation %}{% break %}{% endgeneration %}{% endfor %}"
    with pytest.raises(CheckpointInvalid, match="chat template has an error"):
        ChatTemplate(source, {})
