"""Chat templates render as `transformers` renders them."""

import json
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from medha.errors import CheckpointInvalid, RequestInvalid
from medha_router.chat_template import ChatTemplate
from medha_router.conversations import one_call_each
from medha_router.openai_requests import ChatRequest, validate

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


TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Wetter, <b>überall</b>",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}},
                "required": ["city"],
            },
        },
    },
    {"type": "function", "function": {"name": "time", "parameters": {"type": "object", "properties": {}}}},
]
CALLED: list[dict[str, Any]] = [
    {"role": "user", "content": "Weather?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "call_123", "type": "function", "function": {"name": "weather", "arguments": {"city": "Köln", "n": [1, 2.5]}}},
            {"id": "call_456", "type": "function", "function": {"name": "time", "arguments": {}}},
        ],
    },
    {"role": "tool", "tool_call_id": "call_123", "name": "weather", "content": "sunny"},
    {"role": "tool", "tool_call_id": "call_456", "name": "time", "content": "noon"},
]  # fmt: skip
TOOL_TEMPLATES = {
    "hermes": """{%- if tools %}{{- '<tools>' }}{% for tool in tools %}{{- "\\n" + (tool | tojson) }}{% endfor %}{{- '</tools>' }}
{%- endif %}{%- for message in messages %}{%- if message.role == 'tool' %}
{{- '<tool_response>' + message.content + '</tool_response>' }}{%- else %}{{- message.role + ':' }}
{%- if message.content %}{{- message.content }}{%- endif %}
{%- for tool_call in message.tool_calls %}{%- if tool_call.function is defined %}{%- set tool_call = tool_call.function %}{%- endif %}
{{- '<tool_call>\\n{"name": "' ~ tool_call.name ~ '", "arguments": ' ~ (tool_call.arguments | tojson) ~ '}\\n</tool_call>' }}
{%- endfor %}{%- endif %}{%- endfor %}""",
    "llama": """{%- for message in messages %}{%- if 'tool_calls' in message %}{%- for call in message.tool_calls %}
{{- '{"name": "' + call.function.name + '", "parameters": ' }}{{- call.function.arguments | tojson }}{{- "}" }}{%- endfor %}
{%- elif message.role == "tool" %}{{- "ipython:" ~ (message.content | tojson) }}{%- else %}{{- message.content | trim }}{%- endif %}
{%- endfor %}{%- for t in tools or [] %}{{- t | tojson(indent=4) }}{%- endfor %}""",
    "mistral": """{%- for message in messages %}{%- if message.tool_calls is defined and message.tool_calls is not none %}
{{- "[TOOL_CALLS][" }}{%- for tool_call in message.tool_calls %}{%- set out = tool_call.function | tojson %}
{{- out[:-1] }}{{- ', "id": "' + tool_call.id[-9:] + '"}' }}{%- if not loop.last %}{{- ", " }}{%- endif %}{%- endfor %}{{- "]" }}
{%- elif message.role == "tool" %}{{- '[TOOL_RESULTS]{"content": ' + message.content|string + ', "call_id": "' + message.tool_call_id + '"}' }}
{%- else %}{{- message["content"] }}{%- endif %}{%- endfor %}""",
    "content that is none": """{% for message in messages %}{% if message['content'] is none %}{% for call in message['tool_calls'] %}
{{ call['function']['arguments'] | items | list }}{% endfor %}{% else %}{{ message['content'] + (message.name or '') }}{% endif %}
{% endfor %}{{ tools is not none }}""",
}


@pytest.mark.parametrize("name", TOOL_TEMPLATES)
@pytest.mark.parametrize("tools", [TOOLS, None], ids=["tools", "no tools"])
def test_tools_and_calls_are_shown_as_transformers_shows_them(
    name: str, tools: list[dict[str, Any]] | None
) -> None:
    source = TOOL_TEMPLATES[name]
    expected, _ = render_jinja_template([CALLED], tools=tools, chat_template=source, **SPECIAL)
    template = ChatTemplate(source, SPECIAL)
    assert template.render(CALLED, add_generation_prompt=False, tools=tools) == expected[0]
    assert template.knows_tools == ("tools" in source)


def test_a_request_reaches_the_template_in_the_form_that_transformers_documents() -> None:
    arguments = [json.dumps(call["function"]["arguments"]) for call in CALLED[1]["tool_calls"]]
    calls = [
        {**call, "function": {**call["function"], "arguments": text}}
        for call, text in zip(CALLED[1]["tool_calls"], arguments, strict=True)
    ]
    sent = [CALLED[0], {**CALLED[1], "tool_calls": calls}, *({**one, "name": None} for one in CALLED[2:])]
    request = validate(ChatRequest, {"model": "m", "messages": sent, "tools": TOOLS})
    assert request.messages_for_template() == CALLED
    assert [tool.function.for_template() for tool in request.tools or ()] == TOOLS


def test_arguments_that_are_no_object_stay_the_text_that_a_model_wrote() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": '}}
    sent = {"model": "m", "messages": [{"role": "assistant", "tool_calls": [call]}]}
    (message,) = validate(ChatRequest, sent).messages_for_template()
    assert message["tool_calls"][0]["function"]["arguments"] == '{"a": '


CONTINUED = (
    TEMPLATES["chatml"],
    "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</{{ m.role }}>{% endfor %}",
    "{% for m in messages %}[{{ m.content }}]{% endfor %}Hi. behind",
)


@pytest.mark.parametrize("last", ["Hi.", "  Hi. \n", "</s>", "a|im_end|b"])
@pytest.mark.parametrize("source", CONTINUED)
def test_a_message_that_is_continued_ends_the_text_as_in_transformers(source: str, last: str) -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": last}]
    expected, _ = render_jinja_template(
        [messages], chat_template=source, continue_final_message=True, **SPECIAL
    )
    template = ChatTemplate(source, SPECIAL)
    text = template.render(messages, add_generation_prompt=False, continue_final_message=True)
    assert text == expected[0]


@pytest.mark.parametrize(
    ("source", "content", "said"),
    [
        (TEMPLATES["chatml"], " ", "the last message has no text"),
        ("{{ messages[0].content }}", "Hi.", "does not show the last message"),
    ],
)
def test_what_cannot_be_continued_is_the_clients_error(source: str, content: str, said: str) -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": content}]
    with pytest.raises(RequestInvalid, match=said) as caught:
        ChatTemplate(source, SPECIAL).render(messages, continue_final_message=True)
    assert caught.value.param == "continue_final_message"


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


CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {}}}


@pytest.mark.parametrize(
    ("source", "message", "shown"),
    [
        ("{{ messages[0].reasoning_content }}", {"content": "Hi"}, "Hm."),
        ("{{ messages[0]['reasoning_content'] or messages[0].reasoning }}", {"content": "Hi"}, "Hm."),
        ("{{ messages[0]['reasoning'] }}", {"content": "Hi"}, "Hm."),
        ("{% if 'thinking' in messages[0] %}{{ messages[0].thinking }}{% endif %}", {"content": "Hi"}, "Hm."),
        (
            "{{ messages[0].thinking }}+{{ messages[0].content }}",
            {"content": "Hi", "tool_calls": [CALL]},
            "Hm.\nHi+",
        ),
        (
            "{{ messages[0].thinking }}+{{ messages[0].content }}",
            {"content": None, "tool_calls": [CALL]},
            "Hm.+",
        ),
    ],
)
def test_thoughts_of_messages_have_the_name_that_the_template_reads(
    source: str, message: dict[str, Any], shown: str
) -> None:
    thinking = {"role": "assistant", "reasoning_content": "Hm.", **message}
    assert ChatTemplate(source, {}).render([thinking]) == shown
    assert "Hm" not in ChatTemplate(source, {}).render([{"role": "assistant", **message}])


def test_thoughts_before_several_calls_stand_before_the_first() -> None:
    calls = [{**CALL, "id": id_} for id_ in ("a", "b")]
    whole = {"role": "assistant", "content": None, "reasoning_content": "Hm.", "tool_calls": calls}
    results = [{"role": "tool", "content": id_, "tool_call_id": id_, "name": "f"} for id_ in ("a", "b")]
    parts = one_call_each([whole, *results])
    assert [one.get("reasoning_content") for one in parts] == ["Hm.", None, None, None]
    assert [one["role"] for one in parts] == ["assistant", "tool", "assistant", "tool"]
