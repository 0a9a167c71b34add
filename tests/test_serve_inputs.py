"""Every line of the replayable inputs that broke other servers gets its right answer, and the server lives on."""

from __future__ import annotations

import gzip
import json
import socket
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from pydantic import BaseModel, ValidationError
from serve_harness import Harness, harness

from slimserve.errors import RequestError
from slimserve.serve.limits import ServerLimits
from slimserve.serve.protocol import ChatBody, CompletionBody, DetokenizeBody, parse_body

CHAT = "/v1/chat/completions"
PLAIN = "/v1/completions"


@pytest.fixture(scope="module")
def server() -> Iterator[Harness]:
    with harness(max_request_tokens=2048) as running:
        yield running


@pytest.fixture(autouse=True)
def plain_request_succeeds_afterwards(server: Harness) -> Iterator[None]:
    yield
    body = chat_body(content="say:fine|")
    reply = httpx.post(server.url + CHAT, json=body, timeout=60)
    assert reply.status_code == 200
    assert reply.json()["choices"][0]["message"]["content"] == "fine"
    server.wait_idle()


def chat_body(content: Any = "say:yes|", **fields: Any) -> dict[str, Any]:
    return {"model": "fake", "messages": [{"role": "user", "content": content}], "max_tokens": 32, **fields}


def plain_body(**fields: Any) -> dict[str, Any]:
    return {"model": "fake", "prompt": "say:yes|", "max_tokens": 32, **fields}


def post(server: Harness, path: str, body: Any) -> httpx.Response:
    content = body if isinstance(body, bytes | str) else json.dumps(body)
    return httpx.post(server.url + path, content=content, headers={"content-type": "application/json"}, timeout=60)


def refused(reply: httpx.Response, param: str | None, status: int = 400) -> dict[str, Any]:
    assert reply.status_code == status, reply.text
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"] and error["code"]
    if param is not None:
        assert error["param"] is not None and error["param"].startswith(param), error
    return error


def tool(name: str = "f", parameters: Any = None) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters or {"type": "object"}}}


REFUSED_ON_BOTH = [
    pytest.param({"logit_bias": {"191222": -100}}, "logit_bias", id="1-bias-past-vocabulary"),
    pytest.param({"logit_bias": {"AI": -100}}, "logit_bias", id="1-bias-key-is-text"),
    pytest.param({"logit_bias": {"5": 1000}}, "logit_bias", id="1-bias-too-large"),
    pytest.param({"stop_token_ids": [151645]}, "stop_token_ids", id="2-stop-token-past-vocabulary"),
    pytest.param({"temperature": 999999}, "temperature", id="3-temperature"),
    pytest.param({"top_p": -1}, "top_p", id="3-top-p"),
    pytest.param({"repeat_penalty": 0}, "repeat_penalty", id="3-repeat-penalty-is-unknown"),
    pytest.param({"repetition_penalty": 0}, "repetition_penalty", id="3-repetition-penalty"),
    pytest.param({"stop": ["x"] * 500_000}, "stop", id="4-many-stops"),
    pytest.param({"stop": "x" * 500_000}, "stop", id="4-long-stop"),
    pytest.param({"n": 512}, "n", id="5-n-512"),
    pytest.param({"n": 0, "stream": True}, "n", id="5-n-0-streamed"),
    pytest.param({"regex": "^(.*)$"}, "regex", id="9-regex"),
    pytest.param({"regex": "^(|.*)$"}, "regex", id="9-regex-empty-branch"),
    pytest.param({"seed": 2**63}, "seed", id="16-seed"),
    pytest.param({"seed": 10**40}, "seed", id="16-seed-huge"),
    pytest.param({"surprise": 1}, "surprise", id="unknown-field"),
    pytest.param({"guided_json": {}}, "guided_json", id="guided"),
    pytest.param({"priority": 10**9}, "priority", id="priority"),
    pytest.param({"speculate": "no"}, "speculate", id="speculate-is-text"),
    pytest.param({"min_tokens": 100}, "min_tokens", id="min-tokens-above-max"),
    pytest.param({"top_k": -2}, "top_k", id="top-k"),
    pytest.param({"min_p": 2}, "min_p", id="min-p"),
    pytest.param({"presence_penalty": 3}, "presence_penalty", id="presence"),
    pytest.param({"stream": "yes"}, "stream", id="stream-is-text"),
    pytest.param({"stream_options": {"x": 1}}, "stream_options", id="stream-option"),
    pytest.param({"stream_options": {"include_usage": True}}, "stream_options", id="stream-options-alone"),
    pytest.param({"cache_salt": "x" * 1000}, "cache_salt", id="salt"),
    pytest.param({"stop": [""]}, "stop", id="empty-stop"),
    pytest.param({"store": True}, "store", id="store"),
    pytest.param({"max_tokens": 5000}, "max_tokens", id="too-many-tokens"),
]


@pytest.mark.parametrize("path", [CHAT, PLAIN])
@pytest.mark.parametrize(("fields", "param"), REFUSED_ON_BOTH)
def test_a_bad_field_is_refused_by_name(server: Harness, path: str, fields: dict[str, Any], param: str) -> None:
    body = chat_body(**fields) if path == CHAT else plain_body(**fields)
    refused(post(server, path, body), param)


REFUSED_CHAT = [
    pytest.param({"tools": [], "tool_choice": "required"}, "tool_choice", id="11-required-without-tools"),
    pytest.param({"tools": [tool()], "tool_choice": "required"}, "tool_choice", id="11-required"),
    pytest.param(
        {"tools": [tool()], "tool_choice": {"type": "function", "function": {"name": "absent"}}},
        "tool_choice",
        id="11-absent-tool",
    ),
    pytest.param({"messages": []}, "messages", id="12-no-messages"),
    pytest.param({"response_format": {"type": "json_object"}}, "response_format", id="json-object"),
    pytest.param({"top_logprobs": 21, "logprobs": True}, "top_logprobs", id="top-logprobs"),
    pytest.param({"top_logprobs": 2}, "top_logprobs", id="top-logprobs-alone"),
    pytest.param({"modalities": ["text", "audio"]}, "modalities", id="audio"),
    pytest.param({"audio": {"voice": "x"}}, "audio", id="audio-options"),
    pytest.param({"functions": []}, "functions", id="functions"),
    pytest.param({"max_tokens": 5, "max_completion_tokens": 6}, "max_completion_tokens", id="two-limits"),
    pytest.param({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", id="reserved-kwarg"),
    pytest.param({"chat_template_kwargs": {"fail": True}}, "messages", id="template-fails"),
    pytest.param({"messages": [{"role": "robot", "content": "x"}]}, "messages.0.role", id="role"),
    pytest.param({"messages": [{"role": "user"}]}, "messages.0.content", id="no-content"),
    pytest.param(
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages.0.content.0.type",
        id="image",
    ),
]


@pytest.mark.parametrize(("fields", "param"), REFUSED_CHAT)
def test_a_bad_chat_field_is_refused_by_name(server: Harness, fields: dict[str, Any], param: str) -> None:
    refused(post(server, CHAT, chat_body() | fields), param)


REFUSED_PLAIN = [
    pytest.param({"prompt": []}, "prompt", id="no-prompt"),
    pytest.param({"prompt": ""}, "prompt", id="empty-prompt"),
    pytest.param({"prompt": [[]]}, "prompt", id="empty-ids"),
    pytest.param({"prompt": [1, "x"]}, "prompt", id="mixed"),
    pytest.param({"prompt": [99999]}, "prompt", id="id-past-vocabulary"),
    pytest.param({"prompt": [-1]}, "prompt", id="negative-id"),
    pytest.param({"prompt": [1 << 70]}, "prompt", id="huge-id"),
    pytest.param({"prompt": ["x"] * 300}, "prompt", id="many-prompts"),
    pytest.param({"prompt": ["x"] * 200, "n": 2}, "n", id="many-choices"),
    pytest.param({"suffix": "x"}, "suffix", id="suffix"),
    pytest.param({"best_of": 3}, "best_of", id="best-of"),
    pytest.param({"logprobs": 21}, "logprobs", id="logprobs"),
    pytest.param({"max_tokens": 0}, "max_tokens", id="nothing-asked"),
    pytest.param({"messages": []}, "messages", id="messages"),
]


@pytest.mark.parametrize(("fields", "param"), REFUSED_PLAIN)
def test_a_bad_completion_field_is_refused_by_name(server: Harness, fields: dict[str, Any], param: str) -> None:
    refused(post(server, PLAIN, plain_body() | fields), param)


@pytest.mark.parametrize("path", [CHAT, PLAIN])
def test_6_ten_thousand_nested_arrays_name_their_field(server: Harness, path: str) -> None:
    body = chat_body() if path == CHAT else plain_body()
    text = json.dumps(body)[:-1] + ', "odd": ' + "[" * 10_000 + "]" * 10_000 + "}"
    assert refused(post(server, path, text), "odd")["code"] == "too_deep"


def test_7_half_a_surrogate_pair_names_the_message(server: Harness) -> None:
    text = json.dumps(chat_body("emoji PLACE")).replace("PLACE", "\\ud83d")
    refused(post(server, CHAT, text), "messages.0.content")
    text = json.dumps(plain_body(prompt="emoji PLACE")).replace("PLACE", "\\ud83d")
    refused(post(server, PLAIN, text), "prompt")
    whole = json.dumps(chat_body("say:\U0001f600|"))  # a whole pair, escaped the same way
    assert "\\ud83d" in whole
    assert post(server, CHAT, whole).json()["choices"][0]["message"]["content"] == "\U0001f600"


def history(arguments: Any) -> list[dict[str, Any]]:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "say:done|"},
    ]


def test_8_history_calls(server: Harness) -> None:
    where = "messages.1.tool_calls.0.function.arguments"
    refused(post(server, CHAT, chat_body() | {"messages": history('{"city": "Os')}), where)
    refused(post(server, CHAT, chat_body() | {"messages": history("[1]")}), where)
    for arguments in ("null", "", "{}", None, '{"a": 1}'):
        reply = post(server, CHAT, chat_body() | {"messages": history(arguments)})
        assert reply.status_code == 200, reply.text
        assert reply.json()["choices"][0]["message"]["content"] == "done"


def test_10_tool_schemas_are_data(server: Harness) -> None:
    array = {"type": "object", "properties": {"a": {"type": "array", "items": {"type": "string", "pattern": "^x$"}}}}
    nested = {
        "type": "object",
        "properties": {"o": {"type": "object", "properties": {"s": {"type": "string", "maxLength": 2000}}}},
    }
    for schema in (array, nested):
        reply = post(server, CHAT, chat_body(tools=[tool("f", schema)]))
        assert reply.status_code == 200, reply.text


def test_13_two_live_requests_with_one_id(server: Harness) -> None:
    headers = {"x-request-id": "the-same"}
    with httpx.Client(timeout=60) as client:
        body = chat_body("endless", max_tokens=400, stream=True)
        with client.stream("POST", server.url + CHAT, json=body, headers=headers) as first:
            assert first.status_code == 200 and first.headers["x-request-id"] == "the-same"
            second = client.post(server.url + CHAT, json=chat_body(), headers=headers)
            assert second.status_code == 200 and second.headers["x-request-id"] == "the-same"
            assert "[DONE]" in first.read().decode()


def test_14_echo_with_logprobs_and_no_tokens(server: Harness) -> None:
    reply = post(server, PLAIN, plain_body(prompt="abcd", echo=True, logprobs=1, max_tokens=0))
    assert reply.status_code == 200, reply.text
    choice = reply.json()["choices"][0]
    assert choice["text"] == "abcd" and choice["finish_reason"] == "length"
    assert choice["logprobs"]["tokens"] == ["a", "b", "c", "d"]
    assert choice["logprobs"]["token_logprobs"] == [None, -0.25, -0.25, -0.25]
    assert choice["logprobs"]["text_offset"] == [0, 1, 2, 3]
    assert reply.json()["usage"]["completion_tokens"] == 0


def test_log_probabilities_of_prompts_are_bounded(server: Harness) -> None:
    prompts = ["say:yes|" + "x" * 1500] * 64
    error = refused(post(server, PLAIN, plain_body(prompt=prompts, echo=True, logprobs=20)), "logprobs")
    assert error["code"] == "too_many"
    assert post(server, PLAIN, plain_body(prompt=prompts[:2], echo=True, logprobs=20)).status_code == 200


def test_15_control_look_alikes_stay_text(server: Harness) -> None:
    text = 'Repeat "hello </think> world", "<|im_end|>"'
    reply = post(server, CHAT, chat_body(text))
    assert reply.status_code == 200
    tokens = post(server, "/tokenize", {"messages": [{"role": "user", "content": text}]}).json()["tokens"]
    assert bytes(token for token in tokens if token < 256).decode().count("<|im_end|>") == 1


def test_17_an_assistant_turn_without_content_is_empty(server: Harness) -> None:
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": None},
        {"role": "user", "content": "say:ok|"},
    ]
    reply = post(server, CHAT, chat_body() | {"messages": messages})
    assert reply.status_code == 200
    assert reply.json()["choices"][0]["message"]["content"] == "ok"


@pytest.mark.parametrize("path", [CHAT, PLAIN, "/tokenize", "/detokenize"])
@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"null", b'"x"', b"{} {}", b"\xff\xfe", b'{"a": NaN}', b'{"a": 1e999x}', b"[" * 100_000],
    ids=repr,
)
def test_bodies_that_are_no_json_object(server: Harness, path: str, body: bytes) -> None:
    refused(post(server, path, body), None)


@pytest.mark.parametrize(
    ("body", "name"),
    [
        ('{"prompt": "a", "max_tokens": 1, "max_tokens": 2}', "max_tokens"),
        ('{"prompt": "a", "prompt": "a"}', "prompt"),
        ('{"prompt": "a", "metadata": {"b": "", "c": "", "\\u0062": ""}}', "b"),
        ('{"prompt": "a", "metadata": {"\\ud800": "", "\\ud800": ""}}', "?"),
        ('{"prompt": "a", "' + "x" * 1000 + '": 1, "' + "x" * 1000 + '": 1}', "x" * 64),
    ],
    ids=["two values", "one value twice", "deep and escaped", "half a character", "long"],
)
def test_no_name_stands_twice_in_an_object(server: Harness, body: str, name: str) -> None:
    for size in (0, 100_000):  # on the event loop and in a thread
        assert refused(post(server, PLAIN, body + " " * size), name)["code"] == "duplicate_field"


def test_a_compressed_body_is_refused_as_such(server: Harness) -> None:
    for kind in ("gzip", "br, gzip", "x" * 1000):
        headers = {"content-encoding": kind}
        reply = httpx.post(server.url + PLAIN, content=gzip.compress(b'{"prompt": "x"}'), headers=headers)
        assert refused(reply, None, 415)["code"] == "unsupported_encoding"
    plain = httpx.post(server.url + PLAIN, json=plain_body(), headers={"content-encoding": "identity"}, timeout=60)
    assert plain.status_code == 200


def test_one_spelling_per_token_and_short_complaints(server: Harness) -> None:
    for key in ("01", "00", "0000000005"):
        assert refused(post(server, PLAIN, plain_body(logit_bias={key: 1})), "logit_bias")["code"] == "invalid_token_id"
    assert post(server, PLAIN, plain_body(logit_bias={"0": 1, "10": -1})).status_code == 200
    error = refused(post(server, PLAIN, '{"prompt": [' + "9" * 4000 + "]}"), "prompt")
    assert len(error["message"]) < 200


@pytest.mark.parametrize("path", [CHAT, PLAIN])
def test_a_reply_that_cannot_be_begun_leaves_nothing_running(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ArithmeticError("as asked")

    monkeypatch.setattr("slimserve.serve.chat.ChatReply", fail)
    monkeypatch.setattr("slimserve.serve.completions.CompletionReply", fail)
    with harness(step_seconds=0.01) as running:
        body = chat_body("endless", max_tokens=3000) if path == CHAT else plain_body(prompt="endless", max_tokens=3000)
        error = refused(post(running, path, body), None, 500)
        assert error["code"] == "internal_error"
        running.wait_idle(10)


def test_hostile_escapes_cost_linear_time(server: Harness) -> None:
    body = b'{"prompt": "' + b'\\"' * 2_000_000  # a string that never ends, full of quotes
    refused(httpx.post(server.url + PLAIN, content=body, timeout=60), None)


def test_a_body_that_is_too_long_is_refused_before_it_is_read() -> None:
    from slimserve.serve.limits import ServerLimits

    with harness(limits=ServerLimits(max_body_bytes=1000)) as small:
        refused(post(small, PLAIN, plain_body(prompt="x" * 2000)), None, 413)

        def pieces() -> Iterator[bytes]:  # no content-length
            for _ in range(100):
                yield b"x" * 100

        refused(httpx.post(small.url + PLAIN, content=pieces(), timeout=60), None, 413)
        assert post(small, PLAIN, plain_body()).status_code == 200


def test_a_prompt_that_is_too_long_gets_one_400_with_counts(server: Harness) -> None:
    for path, body in ((CHAT, chat_body("x" * 3000, stream=True)), (PLAIN, plain_body(prompt="x" * 3000, stream=True))):
        error = refused(post(server, path, body), None)
        assert error["code"] == "context_length_exceeded"
        assert "2048" in error["message"] and "30" in error["message"]


def test_harmless_fields_are_accepted(server: Harness) -> None:
    fields = {
        "n": 1,
        "user": "u",
        "metadata": {"a": "b"},
        "store": False,
        "service_tier": "auto",
        "parallel_tool_calls": True,
        "frequency_penalty": 0,
        "presence_penalty": None,
        "logit_bias": None,
        "response_format": {"type": "text"},
        "modalities": ["text"],
        "functions": None,
        "tools": [],
        "tool_choice": "auto",
        "seed": -5,
        "prompt_cache_key": "k",
    }
    assert post(server, CHAT, chat_body(**fields)).status_code == 200


def test_other_model_names_are_not_found(server: Harness) -> None:
    for path, body in ((CHAT, chat_body(model="gpt-4")), (PLAIN, plain_body(model="gpt-4"))):
        assert refused(post(server, path, body), "model", 404)["code"] == "model_not_found"
    assert post(server, CHAT, chat_body(model="other-name")).json()["model"] == "other-name"


def test_unknown_paths_and_methods_are_error_objects(server: Harness) -> None:
    refused(httpx.get(server.url + "/v2/nothing"), None, 404)
    refused(httpx.get(server.url + CHAT), None, 405)
    refused(httpx.get(server.url + "/v1/models/none"), "model", 404)


def test_a_key_is_asked_for_where_one_is_set() -> None:
    with harness(api_key="sesame") as locked:
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "sesame"}):
            refused(httpx.get(locked.url + "/v1/models", headers=headers), None, 401)
        assert httpx.get(locked.url + "/v1/models", headers={"authorization": "Bearer sesame"}).status_code == 200
        assert httpx.get(locked.url + "/health").status_code == 200


def test_a_page_of_another_origin_needs_a_key(server: Harness) -> None:
    place = server.url.partition("://")[2]
    for origin in ("http://evil.example", "https://localhost.evil.example:80", "http://127.0.0.1.evil.example"):
        error = refused(httpx.post(server.url + PLAIN, json=plain_body(), headers={"origin": origin}), None, 403)
        assert error["code"] == "foreign_origin"
        assert httpx.get(server.url + "/v1/models", headers={"origin": origin}).status_code == 200
    for origin in (f"http://{place}", "http://localhost:3000", "http://[::1]:5173", "app://notes", "null"):
        reply = httpx.post(server.url + PLAIN, json=plain_body(), headers={"origin": origin}, timeout=60)
        assert reply.status_code == 200, origin
    with harness(api_key="sesame") as locked:
        headers = {"origin": "http://evil.example", "authorization": "Bearer sesame"}
        reply = httpx.post(locked.url + PLAIN, json=plain_body(), headers=headers, timeout=60)
        assert reply.status_code == 200


def test_the_engines_own_refusal_reaches_the_client(server: Harness) -> None:
    for stream in (False, True):
        error = refused(post(server, PLAIN, plain_body(prompt="refuse!", stream=stream)), "prompt")
        assert error["code"] == "refused"


def test_parameters_are_named_as_the_client_wrote_them(server: Harness) -> None:
    refused(post(server, PLAIN, plain_body(stop=[1])), "stop.0")
    assert refused(post(server, PLAIN, plain_body(stop=5)), "stop")["param"] == "stop"
    error = refused(post(server, CHAT, chat_body(tools=["x"])), "tools.0")
    assert error["param"] == "tools.0" and "valid object" in error["message"], error
    error = refused(post(server, CHAT, chat_body() | {"messages": [{"role": "user", "content": ["x"]}]}), "messages")
    assert error["param"].startswith("messages.0.content"), error
    assert refused(post(server, PLAIN, rb'{"prompt": "x", "\ud83d": 1}'), "?")["code"] == "invalid_unicode"


@pytest.mark.parametrize("name", ["self", "continue_final_message", "add_generation_prompt"])
def test_template_variables_cannot_take_the_place_of_arguments(server: Harness, name: str) -> None:
    refused(post(server, CHAT, chat_body(chat_template_kwargs={name: True})), f"chat_template_kwargs.{name}")


def test_numbers_that_no_machine_reads(server: Harness) -> None:
    assert "digits" not in refused(post(server, PLAIN, '{"prompt": "x", "seed": ' + "9" * 5000 + "}"), None)["message"]
    for arguments in ('{"a": ' + "9" * 5000 + "}", '{"a": NaN}', '{"a":' * 3000 + "1" + "}" * 3000):
        error = refused(post(server, CHAT, chat_body() | {"messages": history(arguments)}), "messages.1.tool_calls")
        assert "sys." not in error["message"] and "recursion" not in error["message"], error


MILLION = 1_000_000


@pytest.mark.parametrize(
    ("path", "text", "param"),
    [
        (PLAIN, '{"prompt": [' + "[]," * MILLION + "[]]}", "prompt"),
        (CHAT, '{"messages": [{"role": "user", "content": [' + "{}," * MILLION + "{}]}]}", "messages"),
        (CHAT, '{"messages": [{"role": "user", "content": [' + '"",' * MILLION + '""]}]}', "messages"),
        (PLAIN, '{"prompt": "x", "stop_token_ids": [' + "0.5," * MILLION + "1]}", "stop_token_ids"),
        (PLAIN, '{"prompt": "x", "zzz": [' + '{"a":1},' * MILLION + "1]}", "zzz"),
    ],
    ids=["lists", "parts", "texts", "numbers", "objects"],
)
def test_a_million_entries_are_refused_before_each_is_looked_at(
    server: Harness, path: str, text: str, param: str
) -> None:
    assert len(refused(post(server, path, text), param)["message"]) < 400


MANY = {f"k{number}": 1 for number in range(100_000)}
USER = {"role": "user", "content": "x"}


@pytest.mark.parametrize(
    ("kind", "fields", "param"),
    [
        (CompletionBody, {"prompt": "x", **MANY}, "k0"),
        (ChatBody, {"messages": [{**USER, **MANY}]}, "messages.0.k0"),
        (ChatBody, {"messages": [{**USER, "content": [1] * 1024}] * 100}, "messages.0.content.0"),
        (ChatBody, {"messages": [{**USER, "content": [{"x": 1}] * 1024}] * 100}, "messages.0.content.0.type"),
        (ChatBody, {"messages": [{**USER, "content": [{"type": "text", **MANY}]}]}, "messages.0.content.0"),
        (ChatBody, {"messages": [{}] * 4096}, "messages.0.role"),
        (ChatBody, {"messages": [USER], "tools": [{"type": "function", "function": {"name": "f", **MANY}}]}, "tools.0"),
        (ChatBody, {"messages": [USER], "response_format": {"type": "text", **MANY}}, "response_format"),
        (ChatBody, {"messages": [USER], "stream_options": MANY}, "stream_options.k0"),
        (CompletionBody, {"prompt": "x", "stop_token_ids": ["x"] * 128}, "stop_token_ids.0"),
        (DetokenizeBody, {"tokens": ["x"] * 100_000}, "tokens.0"),
    ],
)
def test_a_body_of_many_faults_costs_few_complaints(kind: type[BaseModel], fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as raised:
        parse_body(kind, fields)
    assert raised.value.param is not None and raised.value.param.startswith(param)
    cause = raised.value.__cause__
    assert isinstance(cause, ValidationError) and cause.error_count() <= 3


def test_names_as_long_as_a_body_are_shortened(server: Harness) -> None:
    reply = post(server, PLAIN, {"prompt": "x", "z" * 10_000_000: 1})
    assert len(reply.content) < 1000 and refused(reply, "zzz")["code"] == "unknown_field"


def test_strings_of_a_body_are_bounded(server: Harness) -> None:
    many = "{" + ",".join(f'"k{number}":1' for number in range(500_001)) + "}"
    error = refused(post(server, CHAT, f'{{"messages":[],"tools":{many}}}'), "tools")
    assert error["code"] == "too_many"


def test_bodies_share_one_budget() -> None:
    with harness(limits=ServerLimits(max_bodies_bytes=3_000_000)) as running:
        slow = socket.create_connection(("127.0.0.1", running.port))
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 2500000\r\n\r\n"
        slow.sendall(head + b" " * 2_400_000)
        while running.state.bodies.held_bytes < 2_400_000:
            time.sleep(0.01)
        error = refused(post(running, PLAIN, {"prompt": "say:yes|", "user": "x" * 700_000}), None, 429)
        assert error["code"] == "busy"
        assert post(running, PLAIN, plain_body()).status_code == 200
        slow.close()
        while running.state.bodies.held_bytes:
            time.sleep(0.01)
        assert post(running, PLAIN, {"prompt": "say:yes|" + "x" * 700_000}).json()["error"]["code"] != "busy"
        assert running.state.bodies.held_bytes == 0


def test_what_tokenize_takes_is_bounded(server: Harness) -> None:
    refused(post(server, "/tokenize", {"prompt": "x" * (2**20 + 1)}), "prompt")
    body = {"messages": [{"role": "assistant", "content": "", "reasoning_content": "x" * (2**20 + 1)}]}
    refused(post(server, "/tokenize", body), "messages")
    assert post(server, "/tokenize", {"prompt": "x" * 2**20}).json()["count"] == 2**20
