"""Reply parsers: reasoning, content and tool calls, the same however the reply is sliced."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_outputs import model_file, recorded_cases

from slimserve.errors import UsageError
from slimserve.serve.parsers import (
    CALL_FORMATS,
    ReplyParser,
    ToolSet,
    call_format,
    detect_call_format,
    detect_reasoning_format,
    new_call_id,
    opens_reasoning,
    reasoning_format,
)
from slimserve.weights.gguf import GgufFile

THINK = reasoning_format("think")
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "days": {"type": "integer"},
                    "options": {"type": "object"},
                    "unit": {"enum": ["c", "f"]},
                    "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                },
            },
        },
    },
    {"type": "function", "function": {"name": "ping"}},
]


class Reply:
    """What the deltas of a reply add up to; calls as (id, name, arguments)."""

    def __init__(self) -> None:
        self.content = ""
        self.reasoning = ""
        self.calls: list[list[Any]] = []

    def add(self, delta: Any) -> None:
        self.content += delta.content
        self.reasoning += delta.reasoning
        for piece in delta.tool_calls:
            if piece.index == len(self.calls):
                assert piece.call_id and piece.name
                self.calls.append([piece.call_id, piece.name, ""])
            else:
                # Later pieces belong to the last call and carry neither id nor name.
                assert piece.index == len(self.calls) - 1 and piece.call_id is None and piece.name is None
            self.calls[piece.index][2] += piece.arguments

    @property
    def view(self) -> tuple[str, str, list[list[Any]]]:
        return self.reasoning, self.content, self.calls


def parser(form: str | None, *, reasoning: bool = True, in_reasoning: bool = False, tools: Any = TOOLS) -> ReplyParser:
    numbers = itertools.count()
    return ReplyParser(
        THINK if reasoning else None,
        None if form is None else call_format(form),
        None if tools is None else ToolSet.of(tools),
        in_reasoning=in_reasoning,
        call_id=lambda: f"id{next(numbers)}",
    )


def parse(text: str, form: str | None, cuts: list[int] | None = None, **options: Any) -> Reply:
    """The reply, pushed in slices that end at `cuts`."""
    reply, run = Reply(), parser(form, **options)
    edges = [0, *sorted({cut % (len(text) + 1) for cut in cuts or []}), len(text)]
    for start, end in itertools.pairwise(edges):
        reply.add(run.push(text[start:end]))
    reply.add(run.flush())
    return reply


def calls(*items: tuple[str, Any]) -> list[list[Any]]:
    return [[f"id{index}", name, arguments] for index, (name, arguments) in enumerate(items)]


HERMES_CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
GLM_CALL = "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Oslo</arg_value></tool_call>"
XML_CALL = "<tool_call>\n<function=get_weather>\n<parameter=city>\nOslo\n</parameter>\n</function>\n</tool_call>"
OSLO = ("get_weather", '{"city": "Oslo"}')

CASES: list[tuple[str, str | None, dict[str, Any], str, str, list[list[Any]]]] = [
    # text, format, options, reasoning, content, calls
    ("Hello", "hermes", {}, "", "Hello", []),
    ("  Hello \n", "hermes", {}, "", "  Hello \n", []),
    (" \n", "hermes", {}, "", " \n", []),
    ("", "hermes", {}, "", "", []),
    ("<think>a\nb</think>c", "hermes", {}, "a\nb", "c", []),
    ("\n<think>\n a \n</think>\n\nc\n", "hermes", {}, "a", "c\n", []),
    ("<think></think>Hi", None, {}, "", "Hi", []),
    ("<think>never closed", None, {}, "never closed", "", []),
    ("<think>cut </thi", None, {}, "cut </thi", "", []),
    ("<thi", None, {}, "", "<thi", []),
    ("<thin>x", None, {}, "", "<thin>x", []),
    ("a</think>b", None, {"in_reasoning": True}, "a", "b", []),
    ("\na", None, {"in_reasoning": True}, "a", "", []),
    ("<think>a</think>b", None, {"in_reasoning": True}, "a", "b", []),
    ("</think>b", None, {"in_reasoning": True}, "", "b", []),
    ("a</think>b", None, {}, "", "a</think>b", []),
    ('Repeat "hello </think> world" <think>', None, {}, "", 'Repeat "hello </think> world" <think>', []),
    ("<think>a</think>b", None, {"reasoning": False}, "", "<think>a</think>b", []),
    # calls in their plain forms
    (HERMES_CALL, "hermes", {}, "", "", calls(OSLO)),
    (GLM_CALL, "glm47", {}, "", "", calls(OSLO)),
    (XML_CALL, "qwen3_xml", {}, "", "", calls(OSLO)),
    (HERMES_CALL, "qwen25", {}, "", "", calls(OSLO)),
    # with text around, two of them, behind and inside reasoning
    (f"I look.\n{HERMES_CALL}\nDone.\n", "hermes", {}, "", "I look.\nDone.\n", calls(OSLO)),
    (f"{HERMES_CALL}\n{HERMES_CALL}\n", "hermes", {}, "", "", calls(OSLO, OSLO)),
    (f"{GLM_CALL}{GLM_CALL}", "glm47", {}, "", "", calls(OSLO, OSLO)),
    (f"{XML_CALL}\n{XML_CALL}\n", "qwen3_xml", {}, "", "", calls(OSLO, OSLO)),
    (f"<think>x\n</think>\n\n{GLM_CALL}", "glm47", {}, "x", "", calls(OSLO)),
    (f"<think>x {GLM_CALL} y</think>z", "glm47", {}, "x\ny", "z", calls(OSLO)),
    (f"<think>x\n{HERMES_CALL}", "hermes", {}, "x", "", calls(OSLO)),
    (f"hm {XML_CALL}", "qwen3_xml", {"in_reasoning": True}, "hm", "", calls(OSLO)),
    # a function that the request does not declare is no call inside reasoning, and one outside
    ("<think><tool_call>f</tool_call></think>", "glm47", {}, "<tool_call>f</tool_call>", "", []),
    ("<tool_call>f</tool_call>", "glm47", {}, "", "", calls(("f", "{}"))),
    # zero arguments
    ("<tool_call>ping</tool_call>", "glm47", {}, "", "", calls(("ping", "{}"))),
    ("<tool_call>\nping\n</tool_call>", "glm47", {}, "", "", calls(("ping", "{}"))),
    ("<tool_call><function=ping></function></tool_call>", "qwen3_xml", {}, "", "", calls(("ping", "{}"))),
    ("<tool_call>\n<function=ping>\n</function>\n</tool_call>", "qwen3_xml", {}, "", "", calls(("ping", "{}"))),
    ('<tool_call>{"name": "ping"}</tool_call>', "hermes", {}, "", "", calls(("ping", "{}"))),
    ('<tool_call>{"name": "ping", "arguments": null}</tool_call>', "hermes", {}, "", "", calls(("ping", "{}"))),
    ('<tool_call>{"name": "ping", "arguments": {}}</tool_call>', "hermes", {}, "", "", calls(("ping", "{}"))),
    # JSON: key order, string arguments, escapes, tags inside strings, several objects between two tags
    ('<tool_call>{"arguments": {"a": "}"}, "name": "f"}</tool_call>', "hermes", {}, "", "",
     calls(("f", '{"a": "}"}'))),
    ('<tool_call>{"name":"f","arguments":"{\\"a\\": 1}"}</tool_call>', "hermes", {}, "", "", calls(("f", '{"a": 1}'))),
    ('<tool_call>{"id": 7, "name": "f", "parameters": {"a": [1, {"b": "\\"}"}]}}</tool_call>', "hermes", {}, "", "",
     calls(("f", '{"a": [1, {"b": "\\"}"}]}'))),
    ('<tool_call>{"name": "f", "arguments": {"a": "</tool_call>"}}</tool_call>!', "hermes", {}, "", "!",
     calls(("f", '{"a": "</tool_call>"}'))),
    ('<tool_call>{"name": "f"}\n{"name": "g"}</tool_call>', "hermes", {}, "", "", calls(("f", "{}"), ("g", "{}"))),
    ('<tool_call>{"name": "\\u0066"}</tool_call>', "hermes", {}, "", "", calls(("f", "{}"))),
    # no calls: text in the place of one stays text, to the last character
    ("a <tool_call> b", "hermes", {}, "", "a <tool_call> b", []),
    ("a\n<tool_call>\n{\"x\": 1}</tool_call> ", "hermes", {}, "", "a\n<tool_call>\n{\"x\": 1}</tool_call> ", []),
    ("<tool_call>{\"name\": 5}", "hermes", {}, "", "<tool_call>{\"name\": 5}", []),
    ("<tool_call>{\"name\": \"a b\"}", "hermes", {}, "", "<tool_call>{\"name\": \"a b\"}", []),
    ("<tool_call> <tool_call>" + GLM_CALL, "glm47", {}, "", "<tool_call> <tool_call>", calls(OSLO)),
    ("the <tool_call> tag opens a call", "glm47", {}, "", "the <tool_call> tag opens a call", []),
    ("<tool_call>", "glm47", {}, "", "<tool_call>", []),
    (HERMES_CALL, "hermes", {"tools": None}, "", HERMES_CALL, []),
    (HERMES_CALL, None, {}, "", HERMES_CALL, []),
    # values by their declared type
    ("<tool_call>get_weather<arg_key>city</arg_key><arg_value>5</arg_value><arg_key>days</arg_key><arg_value>5"
     "</arg_value></tool_call>", "glm47", {}, "", "", calls(("get_weather", '{"city": "5", "days": 5}'))),
    ('<tool_call>get_weather\n<arg_key>options</arg_key>\n<arg_value>{"a": [1, true]}</arg_value>\n</tool_call>',
     "glm47", {}, "", "", calls(("get_weather", '{"options": {"a": [1, true]}}'))),
    ("<tool_call>f<arg_key>a</arg_key><arg_value>x \"y\"\n<b></arg_value></tool_call>", "glm47", {}, "", "",
     calls(("f", '{"a": "x \\"y\\"\\n<b>"}'))),
    ("<tool_call>f<arg_key>a</arg_key><arg_value>True</arg_value></tool_call>", "glm47", {}, "", "",
     calls(("f", '{"a": true}'))),
    ("<tool_call>f<arg_key>a</arg_key><arg_value>NaN</arg_value></tool_call>", "glm47", {}, "", "",
     calls(("f", '{"a": "NaN"}'))),
    ("<tool_call>get_weather<arg_key>unit</arg_key><arg_value>c</arg_value><arg_key>maybe</arg_key><arg_value>null"
     "</arg_value></tool_call>", "glm47", {}, "", "", calls(("get_weather", '{"unit": "c", "maybe": null}'))),
    ("<function=get_weather><parameter=city>\n\nA\n</b>\n\n</parameter><parameter=days>3</parameter></function>",
     "qwen3_xml", {}, "", "", calls(("get_weather", '{"city": "\\nA\\n</b>\\n", "days": 3}'))),
    # calls that end wrongly keep what they said, and lose no text
    ('<tool_call>{"name": "f", "arguments": {"a": 1}} and more', "hermes", {}, "", "and more",
     calls(("f", '{"a": 1}'))),
    ("<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value> and", "glm47", {}, "", "and", calls(("f", '{"a": 1}'))),
    ("<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value><tool_call>ping</tool_call>", "glm47", {}, "", "",
     calls(("f", '{"a": 1}'), ("ping", "{}"))),
    ("<tool_call><function=f><parameter=a>1</parameter><x>", "qwen3_xml", {}, "", "<x>", calls(("f", '{"a": 1}'))),
    # cut off
    ('<tool_call>{"name": "f", "arguments": {"a": "b', "hermes", {}, "", "", calls(("f", '{"a": "b'))),
    ('<tool_call>{"name": "f", "argu', "hermes", {}, "", '<tool_call>{"name": "f", "argu', []),
    ("<tool_call>get_weather<arg_key>city</arg_key><arg_value>Os", "glm47", {}, "", "",
     calls(("get_weather", '{"city": "Os'))),
    ("<tool_call>get_weather<arg_key>days</arg_key><arg_value>1", "glm47", {}, "", "",
     calls(("get_weather", '{"days": '))),
    ("a\n<tool_call>get_wea", "glm47", {}, "", "a\n<tool_call>get_wea", []),
    # Qwen 2.5's other forms, for declared functions only
    ('```json\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n```', "qwen25", {}, "", "", calls(OSLO)),
    ('```\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n``` ok', "qwen25", {}, "", "ok", calls(OSLO)),
    ('<tools>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tools>', "qwen25", {}, "", "", calls(OSLO)),
    (' {"name": "get_weather", "arguments": {"city": "Oslo"}}', "qwen25", {}, "", "", calls(OSLO)),
    ('```json\n{"name": "other", "arguments": {}}\n```', "qwen25", {}, "",
     '```json\n{"name": "other", "arguments": {}}\n```', []),
    ('```json\n{"name": "get_weather"}\n```', "qwen25", {}, "", '```json\n{"name": "get_weather"}\n```', []),
    ('\n{"a": 1}', "qwen25", {}, "", '\n{"a": 1}', []),
    ("x\n```python\nprint({1: 2})\n```\ny ``` z", "qwen25", {}, "", "x\n```python\nprint({1: 2})\n```\ny ``` z", []),
    # long runs of white space are text
    ("a" + " " * 5000 + "b", "hermes", {}, "", "a" + " " * 5000 + "b", []),
    ("a" + "\n" * 1024 + HERMES_CALL, "hermes", {}, "", "a", calls(OSLO)),
    ("a" + "\n" * 1025 + HERMES_CALL, "hermes", {}, "", "a" + "\n" * 1025, calls(OSLO)),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(CASES)))
def test_replies_at_once_and_character_by_character(number: int) -> None:
    text, form, options, reasoning, content, expected = CASES[number]
    whole = parse(text, form, **options)
    assert whole.view == (reasoning, content, expected)
    single = parse(text, form, list(range(len(text))), **options)
    assert single.view == whole.view


PIECES = st.sampled_from(
    [
        "<think>", "</think>", "<tool_call>", "</tool_call>", "<function=", "<arg_key>", "</arg_key>", "<arg_value>",
        "</arg_value>", "<parameter=a>", "</parameter>", "</function>", "```json", "```", "<tools>", "</tools>",
        '{"name": "ping", "arguments": {', '{"name": "f"', '"arguments": ', '"}', "}", "{", '"', "\\", ", ",
        ": ", "null", "ping", "get_weather", "city", ">", "<", "\n", " ", "  \n", "x", "1", "é", "😀",
        HERMES_CALL, GLM_CALL, XML_CALL,
    ]
)  # fmt: skip


@settings(max_examples=1500, deadline=None)
@given(
    pieces=st.lists(PIECES, max_size=14),
    form=st.sampled_from([None, *CALL_FORMATS]),
    cuts=st.lists(st.integers(0, 400), max_size=30),
    reasoning=st.booleans(),
    in_reasoning=st.booleans(),
    tools=st.sampled_from([None, TOOLS, []]),
)
def test_any_slicing_gives_the_same_reply(
    pieces: list[str], form: str | None, cuts: list[int], reasoning: bool, in_reasoning: bool, tools: Any
) -> None:
    text = "".join(pieces)
    options = {"reasoning": reasoning, "in_reasoning": in_reasoning, "tools": tools}
    whole = parse(text, form, **options)
    assert parse(text, form, cuts, **options).view == whole.view
    if form is None or tools is None:
        assert not whole.calls
        assert not reasoning or len(whole.reasoning) + len(whole.content) <= len(text)
        if not reasoning:
            assert whole.content == text


@settings(max_examples=300, deadline=None)
@given(
    value=st.dictionaries(
        st.text(max_size=8),
        st.recursive(st.none() | st.booleans() | st.integers() | st.text(), lambda inner: st.lists(inner, max_size=3)),
        max_size=4,
    ),
    cuts=st.lists(st.integers(0, 400), max_size=10),
    ascii_only=st.booleans(),
)
def test_json_arguments_arrive_as_they_were_written(value: dict[str, Any], cuts: list[int], ascii_only: bool) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only)
    for shape in (f'{{"name": "f", "arguments": {text}}}', f'{{"arguments": {text}, "name": "f"}}'):
        reply = parse(f"<tool_call>\n{shape}\n</tool_call>", "hermes", cuts)
        assert [call[1:] for call in reply.calls] == [["f", text]] and reply.content == ""


@settings(max_examples=300, deadline=None)
@given(text=st.text(max_size=40), cuts=st.lists(st.integers(0, 400), max_size=10))
def test_text_values_survive_their_tags(text: str, cuts: list[int]) -> None:
    if "<" in text:
        text = text.replace("<", "<b>")
    glm = f"<tool_call>get_weather<arg_key>city</arg_key><arg_value>{text}</arg_value></tool_call>"
    xml = f"<tool_call>\n<function=get_weather>\n<parameter=city>\n{text}\n</parameter>\n</function>\n</tool_call>"
    for form, reply_text in (("glm47", glm), ("qwen3_xml", xml)):
        reply = parse(reply_text, form, cuts)
        assert json.loads(reply.calls[0][2]) == {"city": text}


def test_what_is_held_back_is_bounded() -> None:
    """However long the text in a place, only a bounded part of it has not been given out."""
    long = "x" * 300_000
    for form, start, grows in [
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "', True),
        ("hermes", '<tool_call>{"arguments": {"a": "', False),
        ("hermes", '<tool_call>{"', False),
        ("hermes", '<tool_call>{"name": "', False),
        ("glm47", "<tool_call>", False),
        ("glm47", "<tool_call>f<arg_key>", False),
        ("glm47", "<tool_call>get_weather<arg_key>city</arg_key><arg_value>", True),
        ("glm47", "<tool_call>get_weather<arg_key>days</arg_key><arg_value>", True),
        ("qwen3_xml", "<tool_call><function=", False),
        ("qwen3_xml", "<tool_call><function=f><parameter=", False),
        ("qwen3_xml", "<tool_call><function=f><parameter=a>", True),
        ("qwen25", "```json\n{", False),
        ("qwen25", "```", False),
        ("hermes", "<think>", False),
        ("hermes", "\n" * 5000, False),
    ]:
        run, reply = parser(form), Reply()
        reply.add(run.push(start + long))
        given_out = len(reply.content) + len(reply.reasoning) + sum(len(call[2]) for call in reply.calls)
        assert given_out >= len(long) - (1 << 16) - 300, (form, start)
        assert bool(reply.calls and len(reply.calls[0][2]) > 1000) == grows, (form, start)


def test_many_false_beginnings_cost_little() -> None:
    text = '<tool_call>{"arguments": "' * 20_000
    reply = parse(text, "hermes", list(range(0, len(text), 5000)))
    assert reply.content == text and not reply.calls


def test_ids_are_unique() -> None:
    ids = {new_call_id() for _ in range(1000)}
    assert len(ids) == 1000 and all(name.startswith("call_") for name in ids)
    run = ReplyParser(None, call_format("glm47"), ToolSet.of(TOOLS))
    delta = run.push(GLM_CALL * 3)
    assert len({piece.call_id for piece in delta.tool_calls}) == 3


def test_formats_by_name_and_by_template() -> None:
    assert call_format("qwen3_coder").name == call_format("qwen3_5").name == "qwen3_xml"
    assert call_format("glm45").name == "glm47"
    with pytest.raises(UsageError, match="unknown tool-call format 'x'; known: glm45, glm47"):
        call_format("x")
    with pytest.raises(UsageError, match="unknown reasoning format 'x'"):
        reasoning_format("x")
    assert detect_call_format("{{ '<tool_call>' }}<arg_key>").name == "glm47"  # type: ignore[union-attr]
    assert detect_call_format("<tool_call><function=name>").name == "qwen3_xml"  # type: ignore[union-attr]
    assert detect_call_format('<tool_call>{"arguments": }<think>').name == "hermes"  # type: ignore[union-attr]
    assert detect_call_format("no tools here") is None
    assert detect_reasoning_format("<think>") is THINK and detect_reasoning_format("x") is None
    assert opens_reasoning(THINK, "<|assistant|>\n<think>\n") and not opens_reasoning(THINK, "<think></think>")
    assert not opens_reasoning(None, "<think>")


def test_the_recorded_tool_reply() -> None:
    metadata = GgufFile.open(model_file("qwen25-coder-0.5b")).metadata
    form = detect_call_format(metadata["tokenizer.chat_template"])
    assert form is not None and form.name == "qwen25"
    assert detect_reasoning_format(metadata["tokenizer.chat_template"]) is None
    case = next(case for case in recorded_cases("qwen25-coder-0.5b") if "tools" in case)
    text = case["text"].split("<|im_end|>")[0]
    run = ReplyParser(None, form, ToolSet.of(case["tools"]))
    reply = Reply()
    for character in text:
        reply.add(run.push(character))
    reply.add(run.flush())
    assert reply.content == ""
    assert [(name, json.loads(arguments)) for _, name, arguments in reply.calls] == [("get_weather", {"city": "Oslo"})]
