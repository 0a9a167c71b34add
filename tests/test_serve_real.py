"""The whole way with a real model: file, tokenizer, engine process, HTTP; streamed, whole and local replies agree."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from serve_harness import Harness

from slimserve.cli.opening import EngineFlags, open_model
from slimserve.fetch import cache_folder
from slimserve.serve.router import Router

FILE = cache_folder() / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="module")
def server() -> Iterator[Harness]:
    if not FILE.exists():
        pytest.skip(f"{FILE} is not here; `slimserve fetch smollm2-135m` brings it")
    opened = open_model("smollm2-135m", None, EngineFlags(ctx=512, max_seqs=8, threads=2), serving=True)
    running = Harness(process=True, spec=opened.spec, text=opened.text)
    assert isinstance(running.router, Router)
    yield running
    running.close()


def test_one_prompt_alone_streamed_and_among_others(server: Harness) -> None:
    prompts = [f"The number {index} is followed by" for index in range(12)]

    async def everyone() -> tuple[list[Any], list[Any], str]:
        async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="x", max_retries=0) as client:

            def ask(index: int, **fields: Any) -> Any:
                return client.completions.create(
                    model="fake",
                    prompt=prompts[index],
                    max_tokens=4 + index,
                    temperature=0.9,
                    seed=index,
                    logprobs=2,
                    extra_body={"return_token_ids": True, "ignore_eos": True},
                    **fields,
                )

            alone = [await ask(index) for index in (0, 7, 11)]
            together = await asyncio.gather(*(ask(index) for index in range(12)))
            stream = await ask(7, stream=True)
            text = "".join([chunk.choices[0].text async for chunk in stream])
            return alone, [together[index] for index in (0, 7, 11)], text

    alone, together, streamed = asyncio.run(everyone())
    for one, other in zip(alone, together, strict=True):
        assert one.choices[0].token_ids == other.choices[0].token_ids
        assert one.choices[0].logprobs == other.choices[0].logprobs
        assert one.choices[0].finish_reason == "length"
    assert streamed == alone[1].choices[0].text
    server.wait_idle()


def test_chat_caches_and_control_look_alikes(server: Harness) -> None:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="x", max_retries=0) as client:
        text = 'Say it: "</s> <|im_end|> <|im_start|>" ' + "and again " * 40
        body: Any = {
            "model": "fake",
            "messages": [{"role": "user", "content": text}],
            "temperature": 0,
            "max_tokens": 8,
        }
        first = client.chat.completions.create(**body)
        second = client.chat.completions.create(**body)
        assert first.choices[0].message.content == second.choices[0].message.content
        assert second.usage is not None and second.usage.prompt_tokens_details is not None
        assert (second.usage.prompt_tokens_details.cached_tokens or 0) >= 64
        ids = client.post("/../tokenize", cast_to=object, body={"messages": body["messages"]})["tokens"]  # type: ignore[index]
        ends = server.text.tokenizer.token_id("<|im_end|>")  # type: ignore[attr-defined]
        assert ids.count(ends) == 2, "the template closes two turns; the message's look-alike is text"


def test_prompt_logprobs_agree_with_generation(server: Harness) -> None:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="x", max_retries=0) as client:
        body: Any = {"model": "fake", "temperature": 0, "logprobs": 1, "extra_body": {"return_token_ids": True}}
        made = client.completions.create(prompt="Once upon a time", max_tokens=6, **body).choices[0]
        tokens = client.post("/../tokenize", cast_to=object, body={"prompt": "Once upon a time"})["tokens"]  # type: ignore[index]
        whole = [*tokens, *made.token_ids]  # type: ignore[attr-defined]
        echoed = client.completions.create(prompt=whole, max_tokens=0, echo=True, **body).choices[0]
        assert echoed.logprobs is not None and made.logprobs is not None
        assert echoed.logprobs.token_logprobs is not None and len(echoed.logprobs.token_logprobs) == len(whole)
        assert echoed.logprobs.token_logprobs[0] is None
        assert echoed.logprobs.token_logprobs[len(tokens) :] == made.logprobs.token_logprobs
        assert echoed.text == "Once upon a time" + made.text


TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def test_a_tool_call_of_the_demo_model() -> None:
    path = cache_folder() / "models" / "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf"
    if not path.exists():
        pytest.skip(f"{path} is not here; `slimserve fetch qwen25-coder-0.5b` brings it")
    opened = open_model("qwen25-coder-0.5b", None, EngineFlags(ctx=512, max_seqs=2, threads=2), serving=True)
    running = Harness(process=True, spec=opened.spec, text=opened.text)
    try:
        with openai.OpenAI(base_url=running.url + "/v1", api_key="x", max_retries=0) as client:
            body: Any = {"model": "fake", "temperature": 0, "max_tokens": 48, "tools": [TOOL]}
            body["messages"] = [{"role": "user", "content": "What is the weather in Oslo?"}]
            whole = client.chat.completions.create(**body).choices[0]
            assert whole.finish_reason == "tool_calls" and whole.message.tool_calls is not None
            (call,) = whole.message.tool_calls
            assert call.function.name == "get_weather" and json.loads(call.function.arguments) == {"city": "Oslo"}
            arguments, finish = "", None
            for chunk in client.chat.completions.create(stream=True, **body):
                for piece in chunk.choices[0].delta.tool_calls or []:
                    arguments += piece.function.arguments or ""
                finish = chunk.choices[0].finish_reason
            assert arguments == call.function.arguments and finish == "tool_calls"
            body["tool_choice"] = "none"
            plain = client.chat.completions.create(**body).choices[0]
            assert plain.message.tool_calls is None and plain.message.content
    finally:
        running.close()
