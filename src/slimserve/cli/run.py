"""`slimserve [PROFILE | --model PATH]`: chat, one answer, or an endpoint."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Annotated, Any
from urllib.parse import urlsplit

import typer

from slimserve.cli.chatting import chat_loop, one_answer
from slimserve.cli.opening import EngineFlags, Opened, open_model, pick_profile
from slimserve.cli.terminal import is_interactive, read_all_input, say, with_progress
from slimserve.engine.messages import EngineInfo
from slimserve.engine.request import SamplingParams
from slimserve.errors import UsageError
from slimserve.serve import limits


def command(
    profile: Annotated[str | None, typer.Argument(help="A profile of `slimserve list`.")] = None,
    model: Annotated[
        str | None, typer.Option("--model", metavar="PATH", help="A GGUF file or a model folder instead.")
    ] = None,
    weights: Annotated[
        str | None, typer.Option("--weights", help="synthetic: random weights at the profile's real geometry.")
    ] = None,
    prompt: Annotated[
        str | None, typer.Option("--prompt", "-p", metavar="TEXT", help="One answer; - reads standard input.")
    ] = None,
    serve: Annotated[bool, typer.Option("--serve", help="Open an OpenAI-compatible endpoint.")] = False,
    system: Annotated[str | None, typer.Option("--system", help="System message.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text as it is, without a chat template.")] = False,
    max_tokens: Annotated[
        int | None, typer.Option("--max-tokens", min=1, max=limits.MAX_TOKENS, help="Longest reply.")
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(
            "--temperature",
            min=0.0,
            max=limits.MAX_TEMPERATURE,
            help="0 is greedy; default: 0 for one answer, what the model's maker recommends in a chat.",
        ),
    ] = None,
    top_p: Annotated[float | None, typer.Option("--top-p", help="In (0, 1].")] = None,
    top_k: Annotated[int | None, typer.Option("--top-k", min=0, help="0 is off.")] = None,
    seed: Annotated[int | None, typer.Option("--seed", help="Same seed, same text.")] = None,
    ctx: Annotated[int | None, typer.Option("--ctx", min=64, help="Longest prompt + reply, in tokens.")] = None,
    max_seqs: Annotated[
        int | None, typer.Option("--max-seqs", min=1, max=4096, help="Requests that run at once.")
    ] = None,
    threads: Annotated[int | None, typer.Option("--threads", min=1, max=4096, help="CPU threads.")] = None,
    device: Annotated[str, typer.Option("--device", help="auto, cpu or cuda.")] = "auto",
    kv_dtype: Annotated[str | None, typer.Option("--kv-dtype", help="bf16 or fp8.")] = None,
    no_prefix_cache: Annotated[bool, typer.Option("--no-prefix-cache", help="Never reuse earlier prompts.")] = False,
    no_spec: Annotated[bool, typer.Option("--no-spec", help="Never draft tokens.")] = False,
    drafter: Annotated[
        str | None, typer.Option("--drafter", help="Who drafts tokens: lookup, nextn, dflash2, model or none.")
    ] = None,
    draft_model: Annotated[
        str | None, typer.Option("--draft-model", metavar="PATH", help="The drafter's own files, or a profile.")
    ] = None,
    drafts: Annotated[int | None, typer.Option("--drafts", min=1, max=15, help="Most drafted tokens a step.")] = None,
    draft_acceptance: Annotated[
        str | None,
        typer.Option(
            "--draft-acceptance",
            help="exact: a seed gives the same text as without drafts; rejection: the same distribution.",
        ),
    ] = None,
    host: Annotated[str, typer.Option("--host", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="Port to listen on; 0 picks one.")] = 8000,
    api_key: Annotated[
        str | None,
        typer.Option("--api-key", envvar="SLIMSERVE_API_KEY", help="Key that requests must bring."),
    ] = None,
    served_name: Annotated[
        list[str] | None,
        typer.Option("--served-name", help="Name of the model in the API (may be repeated)."),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="No rows per request, no rates.")] = False,
) -> None:
    """Chat with a profile or a model file, answer one prompt (-p), or serve it (--serve)."""
    if serve and prompt is not None:
        raise UsageError("--serve and --prompt exclude each other; leave one out")
    if profile is not None and model is not None:
        raise UsageError(f"both the profile {profile!r} and --model were given; leave one out")
    if top_p is not None and not 0 < top_p <= 1:
        raise UsageError(f"--top-p is {top_p}; it must be above 0 and at most 1")
    if seed is not None and not limits.MIN_SEED <= seed <= limits.MAX_SEED:
        raise UsageError(f"--seed is {seed}; it must fit into 64 bits")
    if profile is None and model is None:
        profile = pick_profile()
    flags = EngineFlags(
        ctx=ctx,
        max_seqs=max_seqs,
        threads=threads,
        device=device,
        kv_dtype=kv_dtype,
        prefix_cache=not no_prefix_cache,
        speculate=not no_spec,
        drafter=drafter,
        draft_model=draft_model,
        drafts=drafts,
        draft_acceptance=draft_acceptance,
    )
    text = None if prompt is None else (read_all_input() if prompt == "-" else prompt)
    if text is None and not serve and not is_interactive():
        text = read_all_input()
    if text == "":
        raise UsageError("the prompt is empty; give some text with --prompt or on standard input")
    opened = open_model(profile, model, flags, serving=serve, weights=weights)
    if serve:
        _serve(opened, host, port, api_key, tuple(served_name or ()), quiet)
        return
    chats = text is None
    given = {"temperature": temperature, "top_p": top_p, "top_k": top_k}
    sampling = choose_sampling(given, seed, opened.sampling if chats else {"temperature": 0.0})
    _talk(opened, text, system, raw, sampling, max_tokens, quiet)


def choose_sampling(
    given: Mapping[str, float | None], seed: int | None, defaults: Mapping[str, float]
) -> SamplingParams:
    """Flags over defaults; the seed folded into what random numbers take."""
    chosen: dict[str, Any] = {**defaults, **{name: value for name, value in given.items() if value is not None}}
    if "top_k" in chosen:
        chosen["top_k"] = int(chosen["top_k"])
    return SamplingParams(**chosen, seed=None if seed is None else seed & limits.MAX_SEED)


def _serve(opened: Opened, host: str, port: int, api_key: str | None, names: tuple[str, ...], quiet: bool) -> None:
    from slimserve.cli.terminal import LoadProgress
    from slimserve.serve.hosts import is_loopback
    from slimserve.serve.server import ServerOptions, serve

    progress = LoadProgress()

    def ready(info: EngineInfo, url: str) -> None:
        progress.close()
        opened.describe(info)
        if options.api_key is None and not is_loopback(urlsplit(url).hostname or host):
            say(f"whoever reaches {host} may use this server; --api-key asks for a key")
        say(f"serving {', '.join(options.names)} at {url}/v1 (Ctrl-C stops)")

    planned = {} if opened.plan is None else opened.plan.by_group()
    options = ServerOptions(names or opened.names, host, port, api_key or None, quiet, planned_memory=planned)
    try:
        serve(opened.spec, opened.text, options, progress, ready)
    finally:
        progress.close()


def _talk(
    opened: Opened,
    text: str | None,
    system: str | None,
    raw: bool,
    sampling: SamplingParams,
    max_tokens: int | None,
    quiet: bool,
) -> None:
    from slimserve.engine.process import ThreadEngine
    from slimserve.serve.local import LocalModel, Mailboxes

    problem = opened.text.chat_problem
    if problem is not None and not raw:
        if system is not None:
            raise UsageError(f"--system needs a chat template, but {opened.names[0]} has none: {problem}")
        say(f"{opened.names[0]} cannot chat ({problem}): it continues the text that you give it")
        raw = True
    if raw and system is not None:
        raise UsageError("--system needs the chat template; leave out --raw")
    if not os.environ.get("SLIMSERVE_DEBUG"):
        # What the engine has to say about a failure reaches the person as one sentence, not as a trace.
        logging.getLogger("slimserve").setLevel(logging.CRITICAL)
    mailboxes = Mailboxes()
    client = with_progress(lambda progress: ThreadEngine(opened.spec, mailboxes, progress))
    try:
        if text is None or not quiet:
            opened.describe(client.info)
        local = LocalModel(opened.text, client, mailboxes)
        if text is not None:
            one_answer(local, text, system, raw=raw, sampling=sampling, max_tokens=max_tokens, quiet=quiet)
        else:
            chat_loop(local, system, raw=raw, sampling=sampling, max_tokens=max_tokens, quiet=quiet)
    finally:
        client.shutdown(0.0)
