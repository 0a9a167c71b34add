"""A person and a model: turns, history, and Ctrl-C that stops a reply and nothing else."""

from __future__ import annotations

from typing import Any

from slimserve.cli.terminal import ask, say, speak
from slimserve.engine.request import SamplingParams
from slimserve.errors import RequestError
from slimserve.serve.local import LocalModel, Reply

_HELP = "/new starts over, /quit (or Ctrl-D) leaves, Ctrl-C stops a reply"


def play(reply: Reply, *, quiet: bool) -> tuple[str, bool]:
    """Print a reply as it comes; (its content, whether it was stopped by Ctrl-C)."""
    content: list[str] = []
    thinking = stopped = False
    try:
        for piece in reply:
            if piece.reasoning:
                if not thinking:
                    say("[thinking]")
                thinking = True
                _whisper(piece.reasoning)
            if piece.content:
                if thinking:
                    say("\n[answer]")
                thinking = False
                content.append(piece.content)
                speak(piece.content)
    except KeyboardInterrupt:
        stopped = True
    text = "".join(content)
    if not text.endswith("\n"):
        speak("\n")
    if not quiet:
        say(f"[{reply.rates.line()}]")
    return text, stopped


def _whisper(text: str) -> None:
    import sys

    sys.stderr.write(text)
    sys.stderr.flush()


def _messages(system: str | None) -> list[dict[str, Any]]:
    return [] if system is None else [{"role": "system", "content": system}]


def one_answer(
    model: LocalModel,
    text: str,
    system: str | None,
    *,
    raw: bool,
    sampling: SamplingParams,
    max_tokens: int | None,
    quiet: bool,
) -> None:
    """Answer (or continue) one text; KeyboardInterrupt if the person stopped it."""
    if raw:
        reply = model.complete(text, sampling, max_tokens=max_tokens)
    else:
        messages = [*_messages(system), {"role": "user", "content": text}]
        reply = model.chat(messages, sampling, max_tokens=max_tokens)
    _, stopped = play(reply, quiet=quiet)
    if stopped:
        raise KeyboardInterrupt


def chat_loop(
    model: LocalModel,
    system: str | None,
    *,
    raw: bool,
    sampling: SamplingParams,
    max_tokens: int | None,
    quiet: bool,
) -> None:
    """Take turns until the person leaves. A turn that fails is told and forgotten; the chat goes on."""
    say(_HELP)
    messages = _messages(system)
    while True:
        try:
            line = ask("> ")
        except EOFError:
            say()
            return
        except KeyboardInterrupt:
            say("\n(Ctrl-D leaves)")
            continue
        if line.strip() in ("/quit", "/exit"):
            return
        if line.strip() == "/new":
            messages = _messages(system)
            say("(a new conversation)")
            continue
        if line.strip() == "/help":
            say(_HELP)
            continue
        if not line.strip():
            continue
        try:
            if raw:
                play(model.complete(line, sampling, max_tokens=max_tokens), quiet=quiet)
            else:
                messages = _turn(model, messages, line, sampling, max_tokens, quiet)
        except RequestError as error:
            hint = "; /new starts over" if error.code == "context_length_exceeded" else ""
            say(f"({error}{hint})")


def _turn(
    model: LocalModel,
    messages: list[dict[str, Any]],
    line: str,
    sampling: SamplingParams,
    max_tokens: int | None,
    quiet: bool,
) -> list[dict[str, Any]]:
    asked = [*messages, {"role": "user", "content": line}]
    content, _ = play(model.chat(asked, sampling, max_tokens=max_tokens), quiet=quiet)
    return [*asked, {"role": "assistant", "content": content}]
