"""A deterministic engine with the real engine's interface and no model, for tests of what stands above it.

Tokens 0..255 are bytes; the rest are control tokens. What it says depends on the prompt alone, plus the seed where
temperature is above zero: a prompt that holds `say:TEXT|` gets TEXT and an end token, any other an endless text.
`crash!` in a prompt ends the process during the step, `raise!` makes the step fail, `refuse!` is refused at submit.
"""

from __future__ import annotations

import os
import random
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slimserve.engine.driver import LoadedEngine, ProgressCallback
from slimserve.engine.messages import EngineInfo, EngineStats
from slimserve.engine.request import FinishReason, Request, TokenLogprob
from slimserve.engine.step import RequestOutput
from slimserve.errors import RefusalError, RequestError

BOS, END, IM_START, IM_END, THINK, END_THINK, CALL, END_CALL = range(256, 264)
CONTROL = {
    BOS: "<|begin|>",
    END: "<|end|>",
    IM_START: "<|im_start|>",
    IM_END: "<|im_end|>",
    THINK: "<think>",
    END_THINK: "</think>",
    CALL: "<tool_call>",
    END_CALL: "</tool_call>",
}
VOCAB = 272
BLOCK = 64


class FakeEngine:
    """See the module."""

    def __init__(self, *, step_seconds: float, tokens_per_step: int, max_sequences: int, max_queue: int) -> None:
        self._step_seconds = step_seconds
        self._tokens_per_step = tokens_per_step
        self._max_sequences = max_sequences
        self._max_queue = max_queue
        self._waiting: list[Request] = []
        self._running: list[Request] = []
        self._plans: dict[str, list[int] | None] = {}
        self._seen: set[tuple[int, ...]] = set()
        self._steps = self._queried = self._hit = 0

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._running)

    def submit(self, request: Request) -> None:
        text = bytes(t for t in request.prompt_token_ids if t < 256).decode("utf-8", "replace")
        if "refuse!" in text:
            raise RequestError("refused as asked", param="prompt", code="refused")
        if len(self._waiting) >= self._max_queue:
            raise RequestError("the queue is full", code="queue_full", status=429)
        script = re.search(r"say:(.*?)\|", text, re.DOTALL)
        self._plans[request.request_id] = encode(script.group(1)) if script else None
        self._waiting.append(request)

    def abort(self, request_id: str) -> None:
        self._waiting = [r for r in self._waiting if r.request_id != request_id]
        self._running = [r for r in self._running if r.request_id != request_id]
        self._plans.pop(request_id, None)

    def step(self) -> Sequence[RequestOutput]:
        self._steps += 1
        if self._step_seconds:
            time.sleep(self._step_seconds)
        outputs = []
        for request in list(self._running):
            self._check_doom(request)
            outputs.append(self._advance(request))
        while self._waiting and len(self._running) < self._max_sequences:
            request = self._waiting.pop(0)
            self._prefill(request)
            self._running.append(request)
        return outputs

    def read_stats(self) -> EngineStats:
        return EngineStats(
            num_waiting=len(self._waiting),
            num_running=len(self._running),
            cache_used=sum(r.num_tokens for r in self._running),
            cache_total=1_000_000,
            prefix_query_tokens=self._queried,
            prefix_hit_tokens=self._hit,
            cut_by={"window": 1} if self._hit else {},
            num_steps=self._steps,
        )

    def _check_doom(self, request: Request) -> None:
        text = bytes(t for t in request.prompt_token_ids if t < 256)
        if b"crash!" in text:
            os._exit(7)
        if b"raise!" in text:
            raise RuntimeError("as asked")

    def _prefill(self, request: Request) -> None:
        prompt = request.prompt_token_ids
        self._queried += len(prompt)
        for end in range(BLOCK, len(prompt), BLOCK):
            key = tuple(prompt[:end])
            if key in self._seen:
                request.num_cached = end
            elif len(self._seen) < 10_000:
                self._seen.add(key)
        self._hit += request.num_cached

    def _advance(self, request: Request) -> RequestOutput:
        first = not request.output_token_ids
        taken: list[int] = []
        finish = None
        while len(taken) < self._tokens_per_step and finish is None and request.max_tokens > 0:
            token = self._next(request)
            request.output_token_ids.append(token)
            taken.append(token)
            finish = self._finish(request, token)
        if request.max_tokens == 0:
            finish = FinishReason.LENGTH
        if finish is not None:
            self.abort(request.request_id)
        wanted = request.sampling.logprobs
        prompt_logprobs: tuple[TokenLogprob, ...] = ()
        if first and request.sampling.prompt_logprobs:
            prompt_logprobs = tuple(self._logprob(t, wanted or 0) for t in request.prompt_token_ids[1:])
        return RequestOutput(
            request.request_id,
            tuple(taken),
            () if wanted is None else tuple(self._logprob(t, wanted) for t in taken),
            prompt_logprobs,
            finish,
            num_prompt_tokens=len(request.prompt_token_ids),
            num_cached_tokens=request.num_cached,
        )

    def _next(self, request: Request) -> int:
        position = len(request.output_token_ids)
        plan = self._plans[request.request_id]
        if plan is not None:
            return plan[position] if position < len(plan) else END
        sampling = request.sampling
        seed = sampling.seed if sampling.temperature > 0 else 0
        return random.Random(f"{seed}/{len(request.prompt_token_ids)}/{position}").choice(b"abcdefghij klmnop")

    def _finish(self, request: Request, token: int) -> FinishReason | None:
        length = len(request.output_token_ids)
        may_stop = length > request.sampling.min_tokens
        if may_stop and (token in request.stop_token_ids or (token == END and not request.ignore_eos)):
            return FinishReason.STOP
        return FinishReason.LENGTH if length >= request.max_tokens else None

    @staticmethod
    def _logprob(token: int, num_top: int) -> TokenLogprob:
        others = [(other, -float(other + 2)) for other in range(max(0, num_top - 1))]
        return TokenLogprob(-0.25, ((token, -0.25), *others)[:num_top])


def encode(text: str) -> list[int]:
    """Bytes, with the control tokens that a script may hold."""
    names = {name: token for token, name in CONTROL.items()}
    ids: list[int] = []
    for piece in re.split("(" + "|".join(map(re.escape, names)) + ")", text):
        ids.extend([names[piece]] if piece in names else piece.encode("utf-8"))
    return ids


def build(arguments: dict[str, Any], progress: ProgressCallback) -> LoadedEngine:
    """The engine factory."""
    if path := arguments.get("pid_file"):
        Path(path).write_text(str(os.getpid()))
    for done in range(3):
        progress("weights", done, 2)
        time.sleep(arguments.get("load_seconds", 0.0) / 3)
    if arguments.get("fail_load") == "refuse":
        raise RefusalError("this model does not fit: 3 of 2 bytes")
    if arguments.get("fail_load") == "crash":
        os._exit(9)
    if arguments.get("fail_load") == "bug":
        raise ValueError("a bug")
    info = EngineInfo(
        vocab_size=VOCAB,
        max_request_tokens=arguments.get("max_request_tokens", 4096),
        max_sequences=arguments.get("max_sequences", 64),
        max_queue=arguments.get("max_queue", 1024),
        facts={"kind": "fake"},
    )
    engine = FakeEngine(
        step_seconds=arguments.get("step_seconds", 0.0),
        tokens_per_step=arguments.get("tokens_per_step", 1),
        max_sequences=info.max_sequences,
        max_queue=info.max_queue,
    )
    return LoadedEngine(engine, info)
