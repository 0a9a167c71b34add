"""CPU speed beside llama.cpp: the same files, threads and token ids, in turns, in one run.

    python tests/bench_llama_cpp.py [--threads 2] [--rounds 5] [--models qwen25-coder-0.5b,gemma3-270m]

Prefill of 512 tokens, decode of 64 tokens after 16, and aggregate decode of 8 streams (SlimServe only: llama.cpp's
single stream is its yardstick). Each round measures every engine once; medians and ranges over rounds. The output is
judged in the same run: llama.cpp is fed SlimServe's greedy tokens, and every other choice of its own is told with its
margin. In turns with the engines memory is read plainly, so that decode can be told as a fraction of the machine's read
rate. Needs llama-cpp-python built for this machine.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import llama_cpp
import numpy as np
import torch

from slimserve.engine.config import CacheConfig, CacheDtype, EngineConfig, SchedulerConfig
from slimserve.engine.loop import Engine
from slimserve.engine.request import Request, SamplingParams
from slimserve.fetch import settings
from slimserve.ops.cpu import library
from slimserve.weights.loader import load_model
from slimserve.weights.source import open_source

FILES = {
    "qwen25-coder-0.5b": "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
    "qwen25-coder-1.5b": "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
    "smollm2-135m": "SmolLM2-135M-Instruct.Q4_1.gguf",
    "gemma3-270m": "gemma-3-270m-q4_k_m.gguf",
}
GREEDY = SamplingParams(temperature=0.0)


class Own:
    """SlimServe in this process."""

    def __init__(self, path: Path, threads: int) -> None:
        torch.set_num_threads(threads)
        self.loaded = load_model(path)
        config = EngineConfig(
            num_threads=threads,
            cache=CacheConfig(dtype=CacheDtype.FP16, prefix_caching=False),
            scheduler=SchedulerConfig(max_sequences=8, max_context=1024, token_budget=512),
        )
        self.engine = Engine(self.loaded.model, config)
        self.count = 0

    def run(self, prompts: list[list[int]], max_tokens: int) -> tuple[list[list[int]], float, float]:
        """(tokens per prompt, seconds to the first token of all, seconds from there to the end)."""
        names = []
        for prompt in prompts:
            names.append(f"bench-{self.count}")
            self.count += 1
            self.engine.submit(Request(names[-1], list(prompt), GREEDY, max_tokens, ignore_eos=True))
        out: dict[str, list[int]] = {name: [] for name in names}
        started, first = time.perf_counter(), 0.0
        while self.engine.has_work:
            for output in self.engine.step():
                out[output.request_id] += output.token_ids
            if not first and all(out.values()):
                first = time.perf_counter()
                already = sum(map(len, out.values()))
        ended = time.perf_counter()
        self.decoded = sum(map(len, out.values())) - already
        return [out[name] for name in names], first - started, ended - first


class Peer:
    """llama.cpp through llama-cpp-python."""

    def __init__(self, path: Path, threads: int, flash: bool) -> None:
        self.llama = llama_cpp.Llama(
            str(path), n_ctx=1024, n_batch=512, n_threads=threads, n_threads_batch=threads, flash_attn=flash,
            verbose=False,
        )  # fmt: skip

    def _logits(self) -> np.ndarray:
        pointer = llama_cpp.llama_get_logits_ith(self.llama._ctx.ctx, -1)
        return np.ctypeslib.as_array(pointer, (self.llama.n_vocab(),))

    def _argmax(self) -> int:
        return int(self._logits().argmax())

    def margins(self, prompt: list[int], tokens: list[int]) -> list[float]:
        """For each of `tokens`, how far its logit lies below the best one, given those before it; nat."""
        self.llama.reset()
        self.llama.eval(prompt)
        below = []
        for token in tokens:
            logits = self._logits()
            below.append(float(logits.max() - logits[token]))
            self.llama.eval([token])
        return below

    def prefill(self, prompt: list[int]) -> float:
        self.llama.reset()
        started = time.perf_counter()
        self.llama.eval(prompt)
        return time.perf_counter() - started

    def decode(self, prompt: list[int], count: int) -> tuple[list[int], float]:
        self.llama.reset()
        self.llama.eval(prompt)
        tokens = [self._argmax()]
        started = time.perf_counter()
        for _ in range(count):
            self.llama.eval([tokens[-1]])
            tokens.append(self._argmax())
        return tokens, time.perf_counter() - started


def figure(values: list[float]) -> str:
    return f"{statistics.median(values):7.1f} ({min(values):.1f}-{max(values):.1f})"


def weight_bytes(path: Path) -> int:
    """Bytes that one token must read: every tensor but an embedding table that no head shares."""
    source = open_source(path)
    untied = "output.weight" in source.shapes
    tensors = (source.packed(name).data for name in source.shapes if not (untied and name == "token_embd.weight"))
    return sum(data.numel() * data.element_size() for data in tensors)


def measure(name: str, threads: int, rounds: int) -> None:
    path = settings.cache_folder() / "models" / FILES[name]
    own = Own(path, threads)
    peers = {"llama.cpp": Peer(path, threads, False), "llama.cpp flash": Peer(path, threads, True)}
    text = (Path(__file__).resolve().parent.parent / "docs" / "architecture.md").read_text(encoding="utf-8")
    ids = peers["llama.cpp"].llama.tokenize(text.encode(), add_bos=False)
    bos = peers["llama.cpp"].llama.tokenize(b"", add_bos=True)  # what the file's own rule puts first, if anything
    long, short = (bos + ids)[:512], bos + ids[512:528]
    many = [bos + ids[first : first + 16] for first in range(530, 530 + 8 * 20, 20)]
    rates: dict[tuple[str, str], list[float]] = {}

    def note(engine: str, what: str, rate: float) -> None:
        rates.setdefault((engine, what), []).append(rate)

    tokens: dict[str, list[int]] = {}

    def own_round() -> None:
        _, seconds, _ = own.run([long], 1)
        note("SlimServe", "prefill 512", 512 / seconds)
        (tokens["own"],), _, seconds = own.run([short], 65)
        note("SlimServe", "decode 1", own.decoded / seconds)
        _, _, seconds = own.run(many, 65)
        note("SlimServe", "decode 8", own.decoded / seconds)

    def peer_round(label: str, peer: Peer) -> None:
        note(label, "prefill 512", 512 / peer.prefill(long))
        tokens[label], seconds = peer.decode(short, 64)
        note(label, "decode 1", 64 / seconds)

    turns: list[Callable[[], None]] = [own_round]
    turns += [lambda label=label, peer=peer: peer_round(label, peer) for label, peer in peers.items()]
    turns.append(lambda: note("plain reads", "GB/s", library.read_rate() / 1e9))
    for turn in turns:
        turn()
    rates.clear()
    for _ in range(rounds):
        for turn in turns:
            turn()
    margins = peers["llama.cpp"].margins(short, tokens["own"])
    others = [margin for margin in margins if margin > 0]
    print(f"{name}, {threads} threads, {rounds} rounds; llama.cpp, fed SlimServe's {len(margins)} greedy tokens,")
    print(f"  prefers another {len(others)} times, by at most {max(others, default=0.0):.3f} nat")
    for (engine, what), values in sorted(rates.items()):
        print(f"  {engine:16s} {what:12s} {figure(values)}{'' if what == 'GB/s' else ' tok/s'}")
    for what in ("prefill 512", "decode 1"):
        mine = statistics.median(rates["SlimServe", what])
        ratios = ", ".join(f"{mine / statistics.median(rates[label, what]):.2f}x {label}" for label in peers)
        print(f"  {what}: {ratios}")
    read = statistics.median(rates["plain reads", "GB/s"])
    for label in ("SlimServe", *peers):
        moved = weight_bytes(path) * statistics.median(rates[label, "decode 1"]) / 1e9
        print(f"  {label} moves {moved:.1f} GB/s of weights at one stream, {moved / read:.0%} of plain reads")
    single = max(statistics.median(rates[label, "decode 1"]) for label in peers)
    eight = statistics.median(rates["SlimServe", "decode 8"])
    print(f"  8 streams: {eight / single:.2f}x the peer's faster single stream")
    own.engine.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--models", default="qwen25-coder-0.5b,gemma3-270m")
    arguments = parser.parse_args()
    for model in arguments.models.split(","):
        measure(model, arguments.threads, arguments.rounds)
