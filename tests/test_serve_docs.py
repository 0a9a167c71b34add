"""docs/serving.md says what the code does: every field and every bound is in it."""

from __future__ import annotations

from pathlib import Path

from slimserve.profiles.registry import load_catalog
from slimserve.serve import limits, protocol
from slimserve.serve.metrics import Metrics
from slimserve.serve.parsers import call_format, reasoning_format

TEXT = (Path(__file__).parent.parent / "docs" / "serving.md").read_text(encoding="utf-8")


def test_every_field_is_documented() -> None:
    for kind in (protocol.ChatBody, protocol.CompletionBody):
        missing = [name for name in kind.model_fields if name not in ("model", "stream") and f"`{name}" not in TEXT]
        assert missing == [], f"{kind.__name__}: docs/serving.md leaves out {missing}"


def test_every_bound_is_documented() -> None:
    numbers = (
        limits.MAX_JSON_DEPTH,
        limits.MAX_JSON_CONTAINERS,
        limits.MAX_JSON_STRINGS,
        limits.MAX_KEYS,
        limits.MAX_SCORED,
        limits.MAX_PARTS,
        limits.MAX_TOKENIZE_CHARACTERS,
        limits.MAX_DETOKENIZE,
        limits.MAX_PROMPTS,
        limits.MAX_N,
        limits.MAX_CHOICES,
        limits.MAX_MESSAGES,
        limits.MAX_STOPS,
        limits.MAX_STOP_LENGTH,
        limits.MAX_STOP_TOKENS,
        limits.MAX_LOGIT_BIAS,
        limits.MAX_TOP_LOGPROBS,
        limits.MAX_PRIORITY,
        limits.MAX_CACHE_SALT,
        limits.MAX_TOOLS,
        limits.MAX_METADATA,
        limits.MAX_USER,
        limits.MAX_TEMPLATE_KWARGS,
        int(limits.MAX_BIAS),
        int(limits.MAX_REPETITION_PENALTY),
        limits.ServerLimits().max_body_bytes >> 20,
        limits.ServerLimits().max_bodies_bytes >> 20,
    )
    words = TEXT.replace(",", " ").replace(";", " ").replace(".", " ").split()
    assert [number for number in numbers if str(number) not in words] == []


def test_every_metric_is_documented() -> None:
    names = {family.name for family in Metrics().registry.collect()}
    assert [name for name in sorted(names) if name not in TEXT] == []


def test_reply_formats_of_all_profiles_exist() -> None:
    for name, record in load_catalog().records.items():
        for known, given in ((call_format, record.tool_parser), (reasoning_format, record.reasoning_parser)):
            assert not given or known(given), name
