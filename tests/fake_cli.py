"""The `slimserve` command over the fake engine: `fake_cli.py JSON_ARGUMENTS [ARGUMENT ...]`.

{"chat": false} among the JSON arguments stands for a model without a chat template.
"""

from __future__ import annotations

import json
import sys
from typing import Any

sys.path.extend(__file__.rsplit("/", 1)[:1])

from fake_text import FakeText

from slimserve.cli import main as cli_main
from slimserve.cli import run
from slimserve.cli.opening import EngineFlags, Opened
from slimserve.engine.messages import EngineSpec


def fake_opener(fake: dict[str, Any]) -> Any:
    """A stand-in for opening.open_model."""

    def open_model(
        profile: str | None, model: str | None, flags: EngineFlags, *, serving: bool, weights: str | None = None
    ) -> Opened:
        text = FakeText()
        if not fake.get("chat", True):
            text.chat_problem = "the file holds no chat template"
        spec = EngineSpec("fake_engine:build", fake)
        return Opened(text, spec, ("fake",), "Fake", {"temperature": 0.5, "top_k": 5.0}, ("a note",))

    return open_model


if __name__ == "__main__":
    run.open_model = fake_opener(json.loads(sys.argv[1]))
    sys.exit(cli_main.main(sys.argv[2:]))
