"""Bounds of everything a client may send, checked before costly work. `docs/serving.md` lists them for users."""

from __future__ import annotations

from dataclasses import dataclass

MAX_JSON_DEPTH = 64
"""Nesting of arrays and objects in a body."""

MAX_JSON_CONTAINERS = 100_000
"""Arrays and objects in a body: each costs a hundred times the bytes that spell it."""

MAX_JSON_STRINGS = 500_000
"""Strings in a body, names of fields among them."""

MAX_KEYS = 64
"""Keys of objects that have keys of their own kind: parts of a content, `response_format`."""

MAX_PROMPTS = 256
"""Prompts of one completion request."""

MAX_N = 64
"""Choices per prompt."""

MAX_CHOICES = 256
"""Prompts times n of one request."""

MAX_MESSAGES = 4096
"""Messages of one chat request."""

MAX_PARTS = 1024
"""Parts of one message's content."""

MAX_STOPS = 16
MAX_STOP_LENGTH = 1024
"""Stop strings, and the characters of each."""

MAX_STOP_TOKENS = 128
MAX_LOGIT_BIAS = 1024
MAX_BIAS = 100.0

MAX_TOP_LOGPROBS = 20

MAX_SCORED = 2**20
"""Log probabilities of prompt tokens that one request may ask for: tokens of all prompts x n x (1 + logprobs)."""

MAX_TEMPERATURE = 2.0
MAX_REPETITION_PENALTY = 10.0
MAX_PENALTY = 2.0
"""Presence and frequency penalties lie in [-2, 2]."""

MAX_SEED = 2**63 - 1
MIN_SEED = -(2**63)

MAX_TOKENS = 2**31 - 1
MAX_TOP_K = 2**31 - 1
MAX_PRIORITY = 1000
MAX_CACHE_SALT = 256

MAX_TOOLS = 128
MAX_TOOL_CALLS = 128
MAX_TOOL_NAME = 64
MAX_METADATA = 16
MAX_USER = 512
MAX_TEMPLATE_KWARGS = 32

MAX_TOKENIZE_CHARACTERS = 2**20
"""Characters that /tokenize takes in one go, or eight per token of the context where that is more."""

MAX_DETOKENIZE = 4 * 2**20
"""Tokens that /detokenize takes in one go."""

INLINE_BODY_BYTES = 64 * 2**10
"""Bodies up to this size are parsed on the event loop; larger ones in a worker thread."""


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """Bounds that a server's owner may set.

    max_body_bytes: larger bodies get 413 before they are read. max_bodies_bytes: what the bodies of all requests may
    take together until their prompts are tokens; more get 429. max_open: requests (choices) that may wait or
    run at once; more get 429 before any work. keep_alive_seconds: silence in a stream after which a comment
    line is sent, so that proxies keep the connection open.
    """

    max_body_bytes: int = 32 * 2**20
    max_bodies_bytes: int = 256 * 2**20
    max_open: int = 1024
    keep_alive_seconds: float = 15.0
