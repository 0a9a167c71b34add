"""The real openai client against the server: streamed and whole replies agree, and carry what the API promises."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import io
import json
import random
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import psutil
import pytest
from serve_harness import Harness, harness

from slimserve.serve.log import RequestLog


@pytest.fixture(scope="module", params=[1, 3], ids=["one-token-steps", "three-token-steps"])
def server(request: pytest.FixtureRequest) -> Iterator[Harness]:
    with harness(tokens_per_step=request.param) as running:
        yield running
        running.wait_idle()


@pytest.fixture(scope="module")
def client(server: Harness) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=60)


def ask(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


def fold_chat(chunks: list[Any]) -> dict[int, dict[str, Any]]:
    """What a client ends up with after reading a chat stream."""
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for piece in chunk.choices:
            empty = {"content": "", "reasoning": "", "calls": {}, "finish": None, "logprobs": [], "ids": []}
            choice = choices.setdefault(piece.index, empty)
            assert choice["finish"] is None, "something came after the end"
            delta = piece.delta.model_dump()
            choice["content"] += delta.get("content") or ""
            choice["reasoning"] += delta.get("reasoning_content") or ""
            for call in delta.get("tool_calls") or []:
                known = choice["calls"].setdefault(call["index"], {"id": None, "name": None, "arguments": ""})
                if call.get("id"):
                    assert known["id"] is None, "an id came twice"
                    known["id"] = call["id"]
                    known["name"] = call["function"]["name"]
                known["arguments"] += call["function"]["arguments"] or ""
            choice["finish"] = piece.finish_reason
            if piece.logprobs:
                choice["logprobs"] += [entry.model_dump() for entry in piece.logprobs.content]
            choice["ids"] += piece.model_extra.get("token_ids") or []
    return choices


def fold_whole(reply: Any) -> dict[int, dict[str, Any]]:
    found = {}
    for choice in reply.choices:
        message = choice.message.model_dump()
        calls = {
            index: {"id": call["id"], "name": call["function"]["name"], "arguments": call["function"]["arguments"]}
            for index, call in enumerate(message.get("tool_calls") or [])
        }
        found[choice.index] = {
            "content": message["content"] or "",
            "reasoning": message.get("reasoning_content") or "",
            "calls": calls,
            "finish": choice.finish_reason,
            "logprobs": [entry.model_dump() for entry in choice.logprobs.content] if choice.logprobs else [],
            "ids": choice.model_extra.get("token_ids") or [],
        }
    return found


def without_ids(choices: dict[int, dict[str, Any]]) -> Any:
    """Call ids are fresh for each reply."""
    for choice in choices.values():
        for call in choice["calls"].values():
            assert call.pop("id"), "a call without an id"
    return choices


TOOLS: list[Any] = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
CALL = 'say:let me see <tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>|'
CHATS = [
    pytest.param({"messages": ask("say:hello wörld \U0001f600 안녕|")}, "stop", id="unicode"),
    pytest.param({"messages": ask("endless"), "max_tokens": 17, "seed": 3}, "length", id="length"),
    pytest.param({"messages": ask("say:one two three four|"), "stop": ["thr", "zzz"]}, "stop", id="stop-string"),
    pytest.param({"messages": ask("say:one two three|"), "stop": "three!"}, "stop", id="almost-a-stop-string"),
    pytest.param(
        {"messages": ask("say:abc|"), "logprobs": True, "top_logprobs": 3, "extra_body": {"return_token_ids": True}},
        "stop",
        id="logprobs",
    ),
    pytest.param({"messages": ask("endless"), "n": 3, "seed": 9, "max_tokens": 12}, "length", id="n"),
    pytest.param({"messages": ask("say:<think>hm</think>yes|")}, "stop", id="reasoning"),
    pytest.param({"messages": ask(CALL), "tools": TOOLS}, "tool_calls", id="call"),
    pytest.param({"messages": ask(CALL), "tools": TOOLS, "tool_choice": "none"}, "stop", id="no-calls-wanted"),
    pytest.param({"messages": ask(CALL), "tools": TOOLS, "max_tokens": 20}, "length", id="call-cut-off"),
    pytest.param({"messages": ask("say:|")}, "stop", id="nothing"),
]


@pytest.mark.parametrize(("body", "finish"), CHATS)
def test_chat_stream_and_whole_agree(server: Harness, client: openai.OpenAI, body: dict[str, Any], finish: str) -> None:
    whole = client.chat.completions.create(model="fake", **body)
    chunks = list(
        client.chat.completions.create(model="fake", stream=True, stream_options={"include_usage": True}, **body)
    )
    streamed = without_ids(fold_chat(chunks))
    assert streamed == without_ids(fold_whole(whole))
    assert {choice["finish"] for choice in streamed.values()} == {finish}
    assert len(streamed) == body.get("n", 1)
    assert whole.usage is not None and chunks[-1].usage is not None and chunks[-1].choices == []
    assert whole.usage.completion_tokens == chunks[-1].usage.completion_tokens
    assert whole.usage.prompt_tokens == chunks[-1].usage.prompt_tokens
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    assert all(chunk.usage is None for chunk in chunks[:-1])
    if "n" in body:
        assert len({choice["content"] for choice in streamed.values()}) == body["n"], "choices share their seed"
    for choice in streamed.values():
        assert not any("\ufffd" in text for text in (choice["content"], choice["reasoning"]))
        if "stop" in body and isinstance(body["stop"], list):
            assert choice["content"] == "one two "
        if body.get("logprobs"):
            assert len(choice["logprobs"]) == len(choice["ids"]) == whole.usage.completion_tokens
            assert [entry["token"] for entry in choice["logprobs"][:3]] == ["a", "b", "c"]
            assert all(len(entry["top_logprobs"]) == 3 for entry in choice["logprobs"])


COMPLETIONS = [
    pytest.param({"prompt": "say:hi there|"}, id="text"),
    pytest.param({"prompt": ["say:a|", "say:bb|", "x"], "max_tokens": 5}, id="texts"),
    pytest.param({"prompt": list(b"say:ids|")}, id="ids"),
    pytest.param({"prompt": [list(b"say:c|"), list(b"say:dd|")], "n": 2}, id="id-lists"),
    pytest.param({"prompt": "say:echo|", "echo": True, "logprobs": 2}, id="echo-logprobs"),
    pytest.param({"prompt": list(b"say:e|"), "echo": True}, id="echo-ids"),
    pytest.param({"prompt": "endless", "logprobs": 0, "max_tokens": 9}, id="logprobs-0"),
    pytest.param({"prompt": "say:ab cd ef|", "stop": "cd"}, id="stop"),
    pytest.param({"prompt": "abc", "echo": True, "max_tokens": 0, "logprobs": 1}, id="prompt-only"),
    pytest.param({"prompt": "say:a|", "extra_body": {"ignore_eos": True}, "max_tokens": 8}, id="ignore-eos"),
    pytest.param({"prompt": "xyz", "extra_body": {"stop_token_ids": list(b"abcdef")}}, id="stop-tokens"),
]


@pytest.mark.parametrize("body", COMPLETIONS)
def test_completion_stream_and_whole_agree(server: Harness, client: openai.OpenAI, body: dict[str, Any]) -> None:
    extra = {"return_token_ids": True, **body.get("extra_body", {})}
    body = {**body, "model": "fake", "temperature": 0, "extra_body": extra}
    whole = client.completions.create(**body)
    chunks = list(client.completions.create(stream=True, stream_options={"include_usage": True}, **body))
    found: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for piece in chunk.choices:
            choice = found.setdefault(piece.index, {"text": "", "ids": [], "finish": None, "logprobs": None})
            choice["text"] += piece.text
            choice["ids"] += piece.token_ids
            choice["finish"] = piece.finish_reason
            if piece.logprobs:
                lists = piece.logprobs.model_dump()
                known = choice["logprobs"] or {name: [] for name in lists}
                choice["logprobs"] = {name: known[name] + lists[name] for name in lists}
    expected = {
        choice.index: {
            "text": choice.text,
            "ids": choice.token_ids,
            "finish": choice.finish_reason,
            "logprobs": choice.logprobs.model_dump() if choice.logprobs else None,
        }
        for choice in whole.choices
    }
    assert found == expected
    assert chunks[-1].usage == whole.usage
    assert whole.usage is not None and whole.usage.completion_tokens == sum(len(c["ids"]) for c in expected.values())
    for choice in expected.values():
        if choice["logprobs"]:
            lists = choice["logprobs"]
            assert "".join(lists["tokens"]).startswith(choice["text"])
            assert len({len(values) for values in lists.values()}) == 1


def test_cached_tokens_are_told(server: Harness, client: openai.OpenAI) -> None:
    prompt = "say:x|" + "p" * 200
    for expected in (0, 192):
        usage = client.completions.create(model="fake", prompt=prompt).usage
        assert usage is not None and usage.prompt_tokens_details is not None
        assert usage.prompt_tokens_details.cached_tokens == expected


def test_tokenize_and_detokenize(server: Harness) -> None:
    reply = httpx.post(server.url + "/tokenize", json={"prompt": "héllo"}).json()
    assert reply["tokens"] == list("héllo".encode()) and reply["count"] == 6
    text = httpx.post(server.url + "/detokenize", json={"tokens": reply["tokens"]}).json()
    assert text == {"prompt": "héllo"}


def test_models_and_health_and_metrics(server: Harness, client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["fake", "other-name"]
    assert client.models.retrieve("other-name").id == "other-name"
    assert httpx.get(server.url + "/health").json() == {"status": "ok"}
    client.completions.create(model="fake", prompt="say:x|")
    text = httpx.get(server.url + "/metrics").text
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert float(values["slimserve_up"]) == 1
    assert float(values["slimserve_requests_running"]) == 0
    assert float(values["slimserve_prompt_tokens_total"]) > 0
    assert float(values["slimserve_generation_tokens_total"]) > 0
    assert float(values["slimserve_time_to_first_token_seconds_count"]) > 0
    assert float(values["slimserve_inter_token_seconds_count"]) > 0
    assert float(values["slimserve_prefix_query_tokens_total"]) > 0
    assert 'slimserve_prefix_cut_total{by="window"}' in values
    assert float(values['slimserve_requests_total{endpoint="completions",outcome="stop"}']) > 0


def test_one_row_per_request(server: Harness, client: openai.OpenAI) -> None:
    def rows() -> list[str]:
        return server.log.getvalue().splitlines()

    client.completions.create(model="fake", prompt="say:x|")
    before = len(rows())
    client.completions.create(model="fake", prompt="say:x|")
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model="fake", prompt="", max_tokens=3)
    list(client.chat.completions.create(model="fake", messages=ask("say:x|"), stream=True))
    new = rows()[before:]
    assert len(new) == 3
    assert "completions" in new[0] and " 200 " in new[0] and " stop " in new[0]
    assert " 400 " in new[1] and "holds no tokens" in new[1]
    assert "chat" in new[2] and " stop " in new[2]


class FullDisk(io.StringIO):
    def write(self, _: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("stream", [False, True])
def test_rows_that_cannot_be_written_fail_no_request(stream: bool) -> None:
    with harness() as server:
        closed = io.StringIO()
        closed.close()
        for log in (FullDisk(), closed):
            server.state.log = RequestLog(stream=log)
            body = {"model": "fake", "prompt": "say:yes|", "stream": stream}
            reply = httpx.post(server.url + "/v1/completions", json=body, timeout=60)
            assert reply.status_code == 200 and ("[DONE]" if stream else '"yes"') in reply.text
        assert server.state.metrics.requests.labels("completions", "stop")._value.get() == 2


def test_64_at_once_of_mixed_lengths(server: Harness) -> None:
    texts = [f"say:{'word ' * (index * 7 % 60)}{index}|" for index in range(64)]

    async def one(client: openai.AsyncOpenAI, index: int) -> str:
        stream = index % 2 == 0
        reply = await client.chat.completions.create(model="fake", messages=ask(texts[index]), stream=stream)
        if not stream:
            return reply.choices[0].message.content  # type: ignore[no-any-return]
        parts = [piece.choices[0].delta.content or "" async for piece in reply]
        return "".join(parts)

    async def everyone() -> list[str]:
        async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="x", max_retries=0) as client:
            return await asyncio.gather(*(one(client, index) for index in range(64)))

    assert asyncio.run(everyone()) == [text[4:-1] for text in texts]
    server.wait_idle()


@pytest.mark.parametrize("stream", [False, True])
def test_aborts_in_the_middle_free_everything(stream: bool) -> None:
    """Half of the clients leave early; the rest end normally, and nothing is left behind."""
    with harness(step_seconds=0.002, max_sequences=16) as server:
        generator = random.Random(5)

        async def one(client: httpx.AsyncClient, index: int) -> str:
            leaves = index % 2 == 0
            text = "endless" if leaves else "say:a full answer|"
            body = {"model": "fake", "messages": ask(text), "max_tokens": 3000, "stream": stream}
            work = client.post(server.url + "/v1/chat/completions", json=body, timeout=60)
            if not leaves:
                return (await work).text
            try:
                await asyncio.wait_for(work, generator.uniform(0.01, 0.3))
            except TimeoutError:
                return "left"
            return "stayed"

        async def everyone() -> list[str]:
            async with httpx.AsyncClient(limits=httpx.Limits(max_connections=64)) as client:
                return await asyncio.gather(*(one(client, index) for index in range(60)))

        replies = asyncio.run(everyone())
        assert replies.count("left") == 30
        assert sum("full answer" in reply or "[DONE]" in reply for reply in replies) == 30
        server.wait_idle()
        rows = server.log.getvalue().splitlines()[1:]
        # A client may leave before its request was read: such a connection has no row.
        assert sum(" stop " in row for row in rows) == 30
        assert [row for row in rows if " stop " not in row and " disconnect " not in row] == []


def test_a_closed_connection_frees_its_request_within_a_step() -> None:
    with harness(step_seconds=0.05) as server:
        body = {"model": "fake", "prompt": "endless", "max_tokens": 3000, "stream": True}
        with httpx.stream("POST", server.url + "/v1/completions", json=body, timeout=60) as reply:
            lines = reply.iter_lines()  # held: its end would be the end of the connection
            next(lines)
            assert server.stats().num_running == 1
        server.wait_idle()  # the reply would take 150 seconds
        steps = server.stats().num_steps
        server.wait_idle()
        assert server.stats().num_steps <= steps + 1, "the engine still works for a client that left"


def test_a_full_house_refuses_at_once() -> None:
    body = {"model": "fake", "prompt": "endless", "max_tokens": 4000, "stream": True}
    with harness(step_seconds=0.02, max_sequences=2, max_queue=3) as server, contextlib.ExitStack() as inside:
        for number in range(5):
            reply = inside.enter_context(httpx.stream("POST", server.url + "/v1/completions", json=body, timeout=60))
            assert reply.status_code == 200
            server.wait_for(lambda stats, number=number: stats.num_running == min(2, number + 1))
        server.wait_for(lambda stats: stats.num_waiting == 3)
        for _ in range(7):
            reply = httpx.post(server.url + "/v1/completions", json=body, timeout=60)
            assert reply.status_code == 429
            assert reply.json()["error"]["code"] == "queue_full" and reply.headers["retry-after"]
        inside.close()
        server.wait_idle()


def thousand(server: Harness, count: int) -> None:
    process = psutil.Process()
    with httpx.Client(timeout=60) as client:
        after_warm_up = 0
        for index in range(count):
            body = {"model": "fake", "prompt": f"say:reply {index}|", "stream": index % 3 == 0}
            reply = client.post(server.url + "/v1/completions", json=body)
            assert reply.status_code == 200
            if body["stream"]:
                events = [line[6:] for line in reply.text.splitlines() if line.startswith("data: ")]
                assert events.pop() == "[DONE]"
                text = "".join(json.loads(event)["choices"][0]["text"] for event in events)
            else:
                text = reply.json()["choices"][0]["text"]
            assert text == f"reply {index}"
            if index == count // 4:
                after_warm_up = process.memory_info().rss
        assert process.memory_info().rss - after_warm_up < 20 * 2**20, "memory grows with requests"


def test_1000_requests_in_a_row() -> None:
    with harness() as server:
        thousand(server, 1000)


@pytest.mark.slow
def test_soak_20000_requests() -> None:
    with harness() as server:
        thousand(server, 20_000)
