"""From checked bodies to engine submissions: sampling, seeds, lengths. All refusals happen here, before any work."""

from __future__ import annotations

import secrets
import uuid
from collections.abc import Sequence

from slimserve.engine.messages import EngineInfo, Submit
from slimserve.engine.request import SamplingParams
from slimserve.errors import RequestError
from slimserve.serve import limits
from slimserve.serve.protocol import GenerationFields
from slimserve.serve.text import TextModel

_SEED_MASK = 2**63 - 1
_MOST_DIGITS = 20


def fold_seed(seed: int | None, choice: int) -> int:
    """The seed of one choice: the client's seed plus the choice's index, folded into [0, 2^63); fresh if None."""
    if seed is None:
        return secrets.randbits(63)
    return (seed + choice) & _SEED_MASK


def check_token_ids(token_ids: Sequence[int], vocab_size: int, param: str) -> None:
    """Every id must exist in the vocabulary."""
    if not token_ids:
        return
    worst = max(token_ids)
    if worst >= vocab_size or min(token_ids) < 0:
        bad = worst if worst >= vocab_size else min(token_ids)
        raise RequestError(
            f"`{param}`: token id {str(bad)[:_MOST_DIGITS]} is outside the vocabulary of {vocab_size} tokens",
            param=param,
            code="invalid_token_id",
        )


def check_characters(num_characters: int, model: TextModel, info: EngineInfo, param: str) -> None:
    """Refuse a text that is too long whatever its tokens are, before the work of tokenizing it."""
    least = model.least_tokens(num_characters)
    if least > info.max_request_tokens:
        raise RequestError(
            f"the prompt has {num_characters} characters, at least {least} tokens; this server takes at most "
            f"{info.max_request_tokens} tokens of prompt and reply together",
            param=param,
            code="context_length_exceeded",
        )


def check_length(num_prompt: int, max_tokens: int | None, info: EngineInfo, *, param: str, tokens_param: str) -> int:
    """The number of tokens that may be generated; RequestError with the counts if the request can never fit."""
    room = info.max_request_tokens - num_prompt
    if num_prompt == 0:
        raise RequestError(f"`{param}` holds no tokens", param=param, code="empty_prompt")
    if room < 0 or (room == 0 and max_tokens != 0):
        raise RequestError(
            f"the prompt has {num_prompt} tokens; this server takes at most {info.max_request_tokens} tokens of "
            "prompt and reply together",
            param=param,
            code="context_length_exceeded",
        )
    if max_tokens is None:
        return room
    if max_tokens > room:
        raise RequestError(
            f"`{tokens_param}` is {max_tokens}, but after the prompt's {num_prompt} tokens only {room} of "
            f"{info.max_request_tokens} are left",
            param=tokens_param,
            code="context_length_exceeded",
        )
    return max_tokens


def logit_bias(body: GenerationFields, vocab_size: int) -> tuple[tuple[int, float], ...]:
    """The (token id, bias) pairs of a body."""
    pairs: list[tuple[int, float]] = []
    for key, value in (body.logit_bias or {}).items():
        # One spelling per token: the biases of two would add up.
        if not (key.isascii() and key.isdigit() and len(key) <= 10 and (key == "0" or key[0] != "0")):
            raise RequestError(
                f"`logit_bias`: key {key[:32]!r} is not a token id", param="logit_bias", code="invalid_token_id"
            )
        check_token_ids([int(key)], vocab_size, "logit_bias")
        if not -limits.MAX_BIAS <= value <= limits.MAX_BIAS:
            raise RequestError(
                f"`logit_bias`: {value} for token {key} is outside [-{limits.MAX_BIAS:g}, {limits.MAX_BIAS:g}]",
                param="logit_bias",
                code="invalid_value",
            )
        pairs.append((int(key), float(value)))
    return tuple(pairs)


def sampling(
    body: GenerationFields, vocab_size: int, *, choice: int, logprobs: int | None, prompt_logprobs: bool = False
) -> SamplingParams:
    """How choice number `choice` draws its tokens."""
    top_k = body.top_k or 0
    return SamplingParams(
        temperature=1.0 if body.temperature is None else float(body.temperature),
        top_k=0 if top_k < 0 else min(top_k, vocab_size),
        top_p=1.0 if body.top_p is None else float(body.top_p),
        min_p=float(body.min_p or 0.0),
        repetition_penalty=1.0 if body.repetition_penalty is None else float(body.repetition_penalty),
        presence_penalty=float(body.presence_penalty or 0.0),
        frequency_penalty=float(body.frequency_penalty or 0.0),
        logit_bias=logit_bias(body, vocab_size),
        seed=fold_seed(body.seed, choice),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        min_tokens=body.min_tokens or 0,
    )


def check_stream_options(body: GenerationFields) -> None:
    """Options of a stream belong to streams."""
    if body.stream_options is not None and not body.stream:
        raise RequestError("`stream_options` needs `stream`: true", param="stream_options", code="invalid_value")


def stop_strings(body: GenerationFields) -> tuple[str, ...]:
    """The stop strings of a body."""
    if body.stop is None:
        return ()
    return (body.stop,) if isinstance(body.stop, str) else tuple(body.stop)


def submission(
    body: GenerationFields,
    prompt_token_ids: list[int],
    info: EngineInfo,
    params: SamplingParams,
    max_tokens: int,
) -> Submit:
    """One engine request."""
    stop_token_ids = body.stop_token_ids or []
    check_token_ids(stop_token_ids, info.vocab_size, "stop_token_ids")
    if params.min_tokens > max_tokens:
        raise RequestError(
            f"`min_tokens` is {params.min_tokens}, more than the {max_tokens} tokens that may be generated",
            param="min_tokens",
            code="invalid_value",
        )
    return Submit(
        request_id=uuid.uuid4().hex,
        prompt_token_ids=prompt_token_ids,
        sampling=params,
        max_tokens=max_tokens,
        stop_token_ids=list(stop_token_ids),
        ignore_eos=bool(body.ignore_eos),
        priority=body.priority or 0,
        cache_salt=body.cache_salt or "",
        speculate=body.speculate is not False,
    )
