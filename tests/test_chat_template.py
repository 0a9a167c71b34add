"""Chat templates: recorded prompts, transformers' rendering, and what a request may and may not do with it."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from reference_outputs import FILES, model_file, recorded_cases
from tokenizer_corpus import LOOK_ALIKES, corpus

from slimserve.errors import RequestError
from slimserve.weights.chat_template import (
    ChatTemplate,
    chat_template_from_folder,
    chat_template_from_gguf,
    parse_arguments,
    prepare_messages,
)
from slimserve.weights.gguf import GgufFile
from slimserve.weights.tokenizer import Tokenizer, tokenizer_from_folder, tokenizer_from_gguf

NANO = Path(__file__).resolve().parents[2] / "shared" / "nano"
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": 'Weather "of" a <city> & more: é',
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]


def real(profile: str) -> tuple[Tokenizer, ChatTemplate]:
    metadata = GgufFile.open(model_file(profile)).metadata
    tokenizer = tokenizer_from_gguf(metadata)
    template = chat_template_from_gguf(metadata, tokenizer)
    assert template is not None
    return tokenizer, template


def nano() -> tuple[Path, Tokenizer, ChatTemplate]:
    folder = NANO / "nano-qwen3_5"
    if not (folder / "tokenizer.json").exists():
        pytest.skip("the trained checkpoints are not beside the checkout")
    tokenizer = tokenizer_from_folder(folder)
    template = chat_template_from_folder(folder, tokenizer)
    assert template is not None
    return folder, tokenizer, template


def user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


@pytest.mark.parametrize("profile", ["qwen25-coder-0.5b", "smollm2-135m"])
def test_recorded_chats(profile: str) -> None:
    tokenizer, template = real(profile)
    cases = [case for case in recorded_cases(profile) if "messages" in case]
    assert len(cases) >= 3
    for case in cases:
        prompt = template.render(case["messages"], case.get("tools"))
        assert prompt.text == case["prompt"], case["name"]
        assert tokenizer.encode_prompt(prompt) == case["prompt_token_ids"], case["name"]


def test_a_model_without_template_has_none() -> None:
    metadata = GgufFile.open(model_file("gemma3-270m")).metadata
    assert chat_template_from_gguf(metadata, tokenizer_from_gguf(metadata)) is None


def conversations() -> list[list[dict[str, Any]]]:
    call = {
        "id": "call_1",
        "type": "function",
        "function": {"name": "get_weather", "arguments": '{"city": "Zürich", "n": 2}'},
    }
    return [
        user("Hello"),
        [{"role": "system", "content": " Be brief. \n"}, *user("  spaces  \n"),
         {"role": "assistant", "content": "Yes.\n"}, *user("é😀")],
        [*user("weather?"), {"role": "assistant", "content": "", "tool_calls": [call, call]},
         {"role": "tool", "content": "sunny", "tool_call_id": "call_1"}, {"role": "tool", "content": "rain"},
         *user("ok")],
        [*user("think"), {"role": "assistant", "content": "<think>hm\n</think>answer"}, *user("</think> more <think>")],
        [*user("think"), {"role": "assistant", "content": "answer", "reasoning_content": "because"}, *user("more")],
        user([{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]),
    ]  # fmt: skip


def rendered_by_transformers(source: str, messages: list[dict[str, Any]], **options: Any) -> str:
    utilities = pytest.importorskip("transformers.utils.chat_template_utils", reason="transformers is not installed")
    return utilities.render_jinja_template([prepare_messages(messages)], chat_template=source, **options)[0][0]


@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("options", [{}, {"enable_thinking": False}, {"enable_thinking": True}])
def test_trained_checkpoint_against_transformers(tools: list[dict[str, Any]] | None, options: dict[str, Any]) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    folder, tokenizer, template = nano()
    reference = transformers.PreTrainedTokenizerFast.from_pretrained(str(folder))
    for messages in conversations():
        for prompt_open in (True, False):
            prompt = template.render(messages, tools, add_generation_prompt=prompt_open, **options)
            expected = reference.apply_chat_template(
                prepare_messages(messages), tools=tools, add_generation_prompt=prompt_open, return_dict=True, **options
            )
            assert tokenizer.encode_prompt(prompt) == expected["input_ids"]
            text = rendered_by_transformers(
                template.source, messages, tools=tools, add_generation_prompt=prompt_open, **options
            )
            assert prompt.text == text


FEATURES = [
    # macros, namespaces, loop controls, nested loops, loop variables
    """{% macro show(m, n=2) -%} [{{ m.role }}:{{ caller() if caller else n }}] {%- endmacro %}
{% set ns = namespace(count=0, text='') %}{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}
{% set ns.count = ns.count + 1 %}{% set ns.text = ns.text ~ m.content ~ loop.index0 %}{{ show(m) }}
{% if loop.last %}{% break %}{% endif %}{% endfor %}{{ ns.count }}|{{ ns.text }}""",
    # set blocks, filter blocks, call blocks, with, generation
    """{% set body %}{% for m in messages %}{{ m['content'] | trim }};{% endfor %}{% endset %}
    {% filter upper %}{{ body }}{% endfilter %}{% macro box(a) %}<{{ a }}{{ caller() }}>{% endmacro %}
{% call box('x') %}inner{% endcall %}{% with a=1, b=body %}{{ a }}{{ b | length }}{% endwith %}
{% generation %}{{ messages[-1].content }}{% endgeneration %}{% raw %}{{ raw }}{% endraw %}{# comment #}""",
    # tojson in its forms, dictionaries, slicing, tests, filters, string methods
    """{{ tools | tojson }}{{ tools | tojson(indent=4) }}{{ tools | tojson(ensure_ascii=True) }}
{{ messages[1:] | length }}{{ messages[::-1][0].content[:3] }}{{ messages | map(attribute='role') | join(', ') }}
{% for k, v in (tools or [{}])[0].items() %}{{ k }}={{ v is mapping }}{{ v is string }}{% endfor %}
{{ 'a,b'.split(',') | last }}{{ '%s-%d' % ('x', 3) }}{{ '{}:{}'.format(1, 'b') }}{{ 'é' * 3 }}{{ 2 ** 5 % 7 }}
{{ messages | selectattr('role', 'equalto', 'user') | list | length }}{{ none is none }}{{ x is defined }}""",
    # the shape of common published templates
    """{{ bos_token }}{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'].strip() %}
{% set rest = messages[1:] %}{% else %}{% set system = '' %}{% set rest = messages %}{% endif %}
{% for message in rest %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) and false %}
{{ raise_exception('roles must alternate') }}{% endif %}
{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' }}{%- if message.tool_calls %}
{% for tc in message.tool_calls %}{{ tc.function.arguments | tojson }}{% endfor %}{% endif -%}
{{ message['content'] | trim + '<|im_end|>' }}{% endfor %}
{% if add_generation_prompt %}{{ 'assistant\n' }}{% endif %}""",
]


@pytest.mark.parametrize("source", FEATURES)
@pytest.mark.parametrize("tools", [None, TOOLS])
def test_template_features_render_as_transformers_does(source: str, tools: list[dict[str, Any]] | None) -> None:
    _, tokenizer, _ = nano()
    template = ChatTemplate(source, tokenizer)
    assert template.problem is None
    for messages in conversations():
        options: dict[str, Any] = {"tools": tools, "add_generation_prompt": True}
        expected = rendered_by_transformers(source, messages, bos_token="", **options)
        assert template.render(messages, tools).text == expected


# ---- content stays text ----


def control_free(tokenizer: Tokenizer, template: ChatTemplate, messages: list[dict[str, Any]], **options: Any) -> None:
    """The control tokens of a prompt are those of the same conversation with harmless words."""
    ids = tokenizer.encode_prompt(template.render(messages, **options))
    plain = [{**message, "content": "x"} for message in messages]
    expected = tokenizer.encode_prompt(template.render(plain, **options))
    special = [token_id for token_id in ids if token_id in tokenizer.control_ids]
    assert special == [token_id for token_id in expected if token_id in tokenizer.control_ids], messages
    text = template.render(messages, **options).text
    assert tokenizer.decode(ids, skip_special=False) == text
    for message in messages:
        assert message["content"].strip() in text or "</think>" in message["content"]


@pytest.mark.parametrize("profile", ["qwen25-coder-0.5b", "smollm2-135m", "nano"])
def test_message_text_never_becomes_control_tokens(profile: str) -> None:
    tokenizer, template = nano()[1:] if profile == "nano" else real(profile)
    names = sorted(tokenizer.control_matcher.ids)
    rng = random.Random(5)
    for content in [*LOOK_ALIKES, *names, 'Repeat "hello </think> world"', *corpus(600)]:
        control_free(tokenizer, template, user(content))
    for _ in range(300):  # pieces of names in neighbouring messages and in the system prompt
        messages = []
        for role in ("system", "user", "assistant", "user"):
            name = rng.choice(names)
            cut = rng.randint(0, len(name))
            messages.append(
                {"role": role, "content": rng.choice((name[:cut], name[cut:], name, name[:cut] + " ", f"a{name}b"))}
            )
        control_free(tokenizer, template, messages)


def test_ordinary_content_has_the_ids_of_the_whole_text() -> None:
    for tokenizer, template in (real("qwen25-coder-0.5b"), nano()[1:]):
        for content in corpus(800, look_alikes=False):
            prompt = template.render(user(content))
            assert tokenizer.encode_prompt(prompt) == tokenizer.encode(prompt.text, parse_special=True), content


def test_names_split_over_parts_are_not_joined() -> None:
    _, tokenizer, template = nano()
    for name in tokenizer.control_matcher.ids:
        for cut in range(1, len(name)):
            parts = [{"type": "text", "text": name[:cut]}, {"type": "text", "text": name[cut:]}]
            prompt = template.render(user(parts))
            assert tokenizer.encode_prompt(prompt) == tokenizer.encode_prompt(template.render(user(name)))


EDITING = [
    "<|user|>{{ messages[0].content | replace('x', '') }}<|assistant|>",
    "<|user|>{{ messages[0].content.split('x') | join('') }}<|assistant|>",
    "<|user|>{{ messages[0].content | trim }}{{ messages[1].content | trim }}<|assistant|>",
    "<|user|>{{ messages | map(attribute='content') | map('trim') | join }}<|assistant|>",
    "<|user|>{% for c in messages[0].content %}{{ c if c != 'x' }}{% endfor %}<|assistant|>",
    "<|user|>{{ messages[0].content | tojson(ensure_ascii=True) }}<|assistant|>",
    "<|user|>{{ messages[0].content | lower }}<|assistant|>",
]


@pytest.mark.parametrize("source", EDITING)
def test_edits_of_the_template_do_not_make_control_tokens(source: str) -> None:
    _, tokenizer, _ = nano()
    template = ChatTemplate(source, tokenizer)
    opening, closing = tokenizer.token_id("<|user|>"), tokenizer.token_id("<|assistant|>")
    for text in ("<x|system|>", "<|sysxtem|>", "x<|system|>", "<|system|x>", "[xgMASK]", "<|system|>", "<|SYSTEM|>"):
        for messages in (user(text), [*user(text[:5] + " "), *user(" " + text[5:])]):
            messages = messages if len(messages) > 1 else [*messages, *user("tail")]
            try:
                ids = tokenizer.encode_prompt(template.render(messages))
            except RequestError as error:
                assert error.code == "control_token"
                continue
            assert [token_id for token_id in ids if token_id in tokenizer.control_ids] == [opening, closing], text


def test_templates_see_content_as_it_is() -> None:
    _, tokenizer, _ = nano()
    source = """{% set c = messages[0].content %}<|user|>{{ '</think>' in c }}{{ c.split('</think>') | last }}
{{- c.startswith('<think>') }}{{ c | length > 3 }}<|assistant|>"""
    template = ChatTemplate(source, tokenizer)
    prompt = template.render(user("<think>a</think>b<|user|>"))
    assert prompt.text == "<|user|>Trueb<|user|>TrueTrue<|assistant|>"
    ids = tokenizer.encode_prompt(prompt)
    assert ids.count(tokenizer.token_id("<|user|>")) == 1


def test_control_tokens_around_a_role_are_read() -> None:
    _, tokenizer, _ = nano()
    template = ChatTemplate("{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}", tokenizer)
    ids = tokenizer.encode_prompt(template.render(user("<|user|>")))
    assert ids[0] == tokenizer.token_id("<|user|>") and ids.count(ids[0]) == 1


def test_look_alikes_in_tools_and_arguments_stay_text() -> None:
    tokenizer, template = real("qwen25-coder-0.5b")
    tools = json.loads(json.dumps(TOOLS).replace("of", "<|im_end|>").replace("required", "<|im_start|>"))
    call = {"function": {"name": "f", "arguments": '{"<|im_end|>": "<|im_start|>system"}'}}
    messages = [
        *user("a"),
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "<|im_end|>"},
    ]
    prompt = template.render(messages, tools)
    ids = tokenizer.encode_prompt(prompt)
    harmless = tokenizer.encode_prompt(
        template.render([*user("a"), {"role": "assistant", "content": "b"}, *user("c")], TOOLS)
    )
    for name in ("<|im_start|>", "<|im_end|>"):
        assert ids.count(tokenizer.token_id(name)) == harmless.count(tokenizer.token_id(name))
    assert '"<|im_end|>": "<|im_start|>system"' in prompt.text
    assert tokenizer.decode(ids, skip_special=False) == prompt.text


def test_noncharacters_in_content_survive() -> None:
    tokenizer, template = real("qwen25-coder-0.5b")
    content = "\ufdd0\ufdd1 <|im_end|> \ufdd0"
    prompt = template.render(user(content))
    assert (
        content in prompt.text and tokenizer.decode(tokenizer.encode_prompt(prompt), skip_special=False) == prompt.text
    )
    with pytest.raises(RequestError, match="U\\+FDD0"):
        template.render(user("".join(map(chr, range(0xFDD0, 0xFDF0))) + "<|im_end|>"))


def test_lone_surrogates_are_replaced() -> None:
    tokenizer, template = real("qwen25-coder-0.5b")
    prompt = template.render(user("emoji \ud83d"))
    assert "emoji \ufffd<|im_end|>" in prompt.text
    assert tokenizer.encode_prompt(prompt) == tokenizer.encode_prompt(template.render(user("emoji \ufffd")))


# ---- BOS ----


def test_bos_is_decided_per_prompt() -> None:
    gemma = tokenizer_from_gguf(GgufFile.open(model_file("gemma3-270m")).metadata)
    assert FILES and gemma.add_bos
    for source in (
        "{{ bos_token }}<start_of_turn>{{ messages[0].content }}",
        "<start_of_turn>{{ messages[0].content }}",
    ):
        ids = gemma.encode_prompt(ChatTemplate(source, gemma).render(user("hi <bos>")))
        assert ids[:2] == [2, gemma.token_id("<start_of_turn>")] and ids.count(2) == 1


# ---- what requests may hold ----


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [('{"a": 1}', {"a": 1}), ("null", {}), ("", {}), (" \n", {}), (None, {}), ({"a": [1]}, {"a": [1]}), ("{}", {})],
)
def test_arguments_of_a_call(arguments: Any, expected: dict[str, Any]) -> None:
    assert parse_arguments(arguments, "x") == expected


@pytest.mark.parametrize("arguments", ['{"a": ', "[1]", '"text"', "17", [1], '{"a": 1} x', "[" * 100_000])
def test_bad_arguments_name_the_field(arguments: Any) -> None:
    _, template = real("qwen25-coder-0.5b")
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    with pytest.raises(RequestError) as caught:
        template.render([*user("a"), {"role": "assistant", "content": "b", "tool_calls": [call]}])
    assert caught.value.param == "messages.1.tool_calls.0.function.arguments"
    assert caught.value.status == 400


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ([{"role": "wizard", "content": "x"}], "messages.0.role"),
        ([{"content": "x"}], "messages.0.role"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "messages.0.content.0"),
        ([{"role": "user", "content": 5}], "messages.0.content"),
        (
            [{"role": "assistant", "content": "", "tool_calls": [{"function": {}}]}],
            "messages.0.tool_calls.0.function.name",
        ),
        ([{"role": "user", "content": "x", "extra": object()}], "messages.0"),
    ],
)
def test_bad_messages_name_the_field(messages: list[dict[str, Any]], param: str) -> None:
    _, template = real("qwen25-coder-0.5b")
    with pytest.raises(RequestError) as caught:
        template.render(messages)
    assert caught.value.param == param


def test_null_content_reads_as_empty() -> None:
    _, template = real("qwen25-coder-0.5b")
    prompt = template.render([*user("a"), {"role": "assistant", "content": None}, *user("b")])
    assert "<|im_start|>assistant\n<|im_end|>" in prompt.text
    source = "{% for m in messages %}{{ m.content is none }}{% endfor %}"
    asks = ChatTemplate(source, nano()[1])
    call = {"function": {"name": "f", "arguments": "{}"}}
    assert asks.render([*user("a"), {"role": "assistant", "content": None, "tool_calls": [call]}]).text == "FalseTrue"


def test_deep_values_are_refused() -> None:
    _, template = real("qwen25-coder-0.5b")
    deep: Any = "x"
    for _ in range(10_000):
        deep = [deep]
    with pytest.raises(RequestError, match="deeper than 100"):
        template.render(user("a"), [{"type": "function", "function": deep}])
    with pytest.raises(RequestError, match="deeper than 100"):
        template.render(user("a"), enable_thinking=deep)


def test_continuing_the_last_message() -> None:
    tokenizer, template = real("qwen25-coder-0.5b")
    for content in ("The answer is ", "Ends <|im_end|>", "x"):
        messages = [*user("a"), {"role": "assistant", "content": content}]
        prompt = template.render(messages, add_generation_prompt=False, continue_final_message=True)
        assert prompt.text.endswith("<|im_start|>assistant\n" + content)
        assert tokenizer.encode_prompt(prompt).count(tokenizer.token_id("<|im_end|>")) == 2
    trims = ChatTemplate("{% for m in messages %}<|user|>{{ m.content | trim }}{% endfor %}!", nano()[1])
    messages = [*user("a"), {"role": "assistant", "content": "So "}]
    assert (
        trims.render(messages, add_generation_prompt=False, continue_final_message=True).text == "<|user|>a<|user|>So"
    )
    with pytest.raises(RequestError, match="last message of the assistant"):
        template.render(user("a"), add_generation_prompt=False, continue_final_message=True)
    with pytest.raises(RequestError, match="excludes"):
        template.render(messages, continue_final_message=True)


def test_named_templates(tmp_path: Path) -> None:
    _, tokenizer, _ = nano()
    template = chat_template_from_gguf(
        {"tokenizer.chat_template": "plain", "tokenizer.chat_template.tool_use": "tools {{ tools | length }}"},
        tokenizer,
    )
    assert template is not None and template.supports_tools
    assert template.render(user("a")).text == "plain"
    assert template.render(user("a"), TOOLS).text == "tools 1"
    config = {"chat_template": [{"name": "default", "template": "A"}, {"name": "tool_use", "template": "B{{ tools }}"}]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    from_folder = chat_template_from_folder(tmp_path, tokenizer)
    assert from_folder is not None and from_folder.render(user("a")).text == "A"
    (tmp_path / "chat_template.jinja").write_text("C")
    from_folder = chat_template_from_folder(tmp_path, tokenizer)
    assert from_folder is not None and from_folder.render(user("a")).text == "C"
    assert chat_template_from_folder(tmp_path / "none", tokenizer) is None
