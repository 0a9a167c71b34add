"""The whole way with a real model: file, tokenizer, engine process, HTTP; streamed, whole and local replies agree."""

from __future__ import annotations

import asyncio
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
