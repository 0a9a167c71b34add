"""The measuring harness against loopback servers with different manners: counts are exact or the run says so."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from slimserve.errors import UsageError
from slimserve.measure.client import Endpoint, ServerError
from slimserve.measure.exact import ExactShape, exact_lines, run_exact
from slimserve.measure.figures import figure, percentile
from slimserve.measure.floor import floor_lines, floor_report
from slimserve.measure.prompts import fixed_text, prompt_source
from slimserve.measure.sustained import Load, run_sustained, sustained_lines
from slimserve.profiles.resolve import resolve


@dataclass
class Manners:
    """How a server behaves; `seen` holds the prompts of all requests with more than one output token."""

    token_ids: bool = True
    stream_usage: bool = True
    ignore_eos: bool = True
    stop_early: int = 0
    min_tokens: bool = False
    cached: int = 0
    token_seconds: float = 0.0
    drafts: bool = False
    steps: int = 0
    seen: list[Any] = field(default_factory=list)
    running: int = 0
    most_running: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


class Handler(BaseHTTPRequestHandler):
    manners: Manners

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _json(self, value: Any, status: int = 200) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        m = self.manners
        if self.path == "/metrics":
            return self._json({"error": {"message": "no such path"}}, 404) if not m.drafts else self._metrics(m.steps)
        return self._json({"data": [{"id": "a-model"}]})

    def _metrics(self, steps: int) -> None:
        """Counters of a server whose every step drafts two tokens, of which the first holds."""
        lines = [f"slimserve_{name}_total {steps}.0" for name in ("steps", "decode_rows")]
        lines.append(f"slimserve_decode_tokens_total {2 * steps}.0")
        for kind, held in (("drafted", (1, 1)), ("accepted", (1, 0))):
            for place, share in enumerate(held, start=1):
                labels = f'drafter="nextn",position="{place}"'
                lines.append(f"slimserve_{kind}_tokens_by_position_total{{{labels}}} {share * steps}.0")
        body = "\n".join(["# HELP x y", *lines, ""]).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        m = self.manners
        if self.path != "/v1/completions":
            if not m.token_ids or self.path != "/tokenize":
                return self._json({"error": {"message": "no such path"}}, 404)
            return self._json({"tokens": [len(word) for word in body["prompt"].split()]})
        prompt = body["prompt"]
        if not isinstance(prompt, str) and not m.token_ids:
            return self._json({"error": {"message": "prompt must be a string"}}, 422)
        if body.get("ignore_eos") and not m.ignore_eos:
            return self._json({"error": {"message": "unknown field ignore_eos"}}, 400)
        with m.lock:
            m.running += 1
            m.most_running = max(m.most_running, m.running)
            if body["max_tokens"] > 2:
                m.seen.append(prompt if isinstance(prompt, str) else tuple(prompt))
        try:
            self._answer(body, len(prompt.split()) if isinstance(prompt, str) else len(prompt))
        finally:
            with m.lock:
                m.running -= 1
        return None

    def _answer(self, body: dict[str, Any], prompt_tokens: int) -> None:
        m = self.manners
        early = m.stop_early if body["max_tokens"] > 2 else 0
        if m.min_tokens and body.get("min_tokens") == body["max_tokens"]:
            early = 0
        count = body["max_tokens"] - early
        with m.lock:
            m.steps += count // 2
        usage = {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": count,
            "prompt_tokens_details": {"cached_tokens": m.cached},
        }
        ids = list(range(count)) if body.get("return_token_ids") else None
        if not body.get("stream"):
            time.sleep(m.token_seconds * count)
            reason = "stop" if early else "length"
            choice: dict[str, Any] = {"text": "x " * count, "finish_reason": reason, "token_ids": ids}
            return self._json({"choices": [choice], "usage": usage})
        self.send_response(200)
        self.end_headers()
        for number in range(count):
            time.sleep(m.token_seconds)
            reason = None if number + 1 < count else "stop" if early else "length"
            choice = {"text": "x ", "finish_reason": reason, "token_ids": None if ids is None else [number]}
            self.wfile.write(f"data: {json.dumps({'choices': [choice]})}\n\n".encode())
        if m.stream_usage:
            self.wfile.write(f"data: {json.dumps({'choices': [], 'usage': usage})}\n\n".encode())
        self.wfile.write(b"data: [DONE]\n\n")
        return None


@pytest.fixture
def server() -> Iterator[tuple[str, Manners]]:
    manners = Manners()
    httpd = ThreadingHTTPServer(("127.0.0.1", 0), type("OneHandler", (Handler,), {"manners": manners}))
    thread = threading.Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"http://127.0.0.1:{httpd.server_port}/v1", manners
    finally:
        httpd.shutdown()
        httpd.server_close()
        thread.join()


SHAPE = ExactShape(prompt_tokens=40, output_tokens=12, concurrency=(1, 4), passes=2)


def test_counts_prompts_and_rates(server: Any) -> None:
    url, manners = server
    manners.token_seconds = 0.002
    report = run_exact(Endpoint(url), SHAPE)
    assert report["exact"] and report["model"] == "a-model" and report["prompts"] == "token ids"
    assert [row["concurrency"] for row in report["rows"]] == [1, 4]
    assert manners.most_running >= 4
    # One warm-up and two passes of 1 and of 4 requests, and no two prompts alike.
    assert len(manners.seen) == 15 == len(set(manners.seen))
    assert all(len(prompt) == 40 for prompt in manners.seen)
    one, four = report["rows"]
    assert 0 < one["output_tokens_per_second"]["median"] < 500
    assert four["output_tokens_per_second"]["median"] > 1.5 * one["output_tokens_per_second"]["median"]
    assert four["decode_tokens_per_second"] is not None
    assert one["first_token_seconds"]["median"] >= 0.002
    assert 0.001 < one["inter_token_seconds"]["p50"] < 0.05
    assert all(len(request["sha256"]) == 64 for request in one["requests"])
    assert any("yes" in line for line in exact_lines(report))
    json.dumps(report)


def test_steps_and_acceptance_are_told_apart(server: Any) -> None:
    url, manners = server
    report = run_exact(Endpoint(url), SHAPE)
    assert all(row["drafting"] is None and row["steps_per_second"] is None for row in report["rows"])
    manners.drafts, manners.token_seconds = True, 0.001
    report = run_exact(Endpoint(url), SHAPE)
    one, four = (row["drafting"] for row in report["rows"])
    assert (one["steps"], four["steps"]) == (2 * 6, 2 * 4 * 6), "the warm-up is not counted"
    assert one["tokens_per_row"] == 2.0 and one["acceptance"] == 0.5 and one["acceptance_by_position"] == [1.0, 0.0]
    rates = [report["rows"][0][name]["median"] for name in ("steps_per_second", "output_tokens_per_second")]
    assert rates[0] == pytest.approx(rates[1] / 2)
    words = "steps/s, 2.00 tokens per stream and step; nextn: 50% of the drafts held, by position 100% 0%"
    assert any(words in line for line in exact_lines(report))


def test_a_server_that_takes_text_only_gets_exact_texts(server: Any) -> None:
    url, manners = server
    manners.token_ids = False
    report = run_exact(Endpoint(url), SHAPE)
    assert report["exact"] and report["prompts"] == "text" and "text only" in report["notes"][0]
    assert all(isinstance(prompt, str) and len(prompt.split()) == 40 for prompt in manners.seen)
    assert len(set(manners.seen)) == len(manners.seen)


def test_a_server_without_usage_in_streams_is_not_streamed(server: Any) -> None:
    url, manners = server
    manners.stream_usage = False
    report = run_exact(Endpoint(url), SHAPE)
    assert report["exact"] and report["rows"][0]["first_token_seconds"]["median"] is None
    assert any("not streamed" in note for note in report["notes"])


def test_replies_that_end_early_make_the_run_inexact(server: Any) -> None:
    url, manners = server
    manners.ignore_eos, manners.stop_early = False, 3
    report = run_exact(Endpoint(url), SHAPE)
    assert not report["exact"]
    assert "9 output tokens instead of 12" in report["rows"][0]["problems"][0]
    assert any("ignore_eos is refused" in note for note in report["notes"])
    assert any("NO" in line for line in exact_lines(report))


def test_a_server_that_ends_in_spite_of_ignore_eos_is_asked_for_min_tokens(server: Any) -> None:
    url, manners = server
    manners.stop_early, manners.min_tokens = 3, True
    report = run_exact(Endpoint(url), SHAPE)
    assert report["exact"] and any("min_tokens is sent as well" in note for note in report["notes"])
    assert all(len(row["requests"]) == SHAPE.passes * row["concurrency"] for row in report["rows"])
    manners.min_tokens = False
    report = run_exact(Endpoint(url, "a-model"), SHAPE)
    assert not report["exact"] and "9 output tokens instead of 12 (finish stop)" in report["rows"][0]["problems"][0]


def test_reports_about_synthetic_weights_say_so(server: Any) -> None:
    url, _ = server
    named = Endpoint(url, "a-model-synthetic-weights")
    report = run_exact(named, replace(SHAPE, concurrency=(1,), passes=1))
    assert report["weights"] == "synthetic weights" and "[synthetic weights]" in exact_lines(report)[0]
    lasting = run_sustained(named, SHAPE, Load(0.2, None, 1))
    assert lasting["weights"] == "synthetic weights" and "[synthetic weights]" in sustained_lines(lasting)[0]
    assert run_exact(Endpoint(url), replace(SHAPE, concurrency=(1,), passes=1))["weights"] == ""


def test_cached_tokens_are_reported(server: Any) -> None:
    url, manners = server
    manners.cached = 16
    assert run_exact(Endpoint(url), SHAPE)["rows"][0]["cached_tokens"] == 32


def test_a_dead_server_is_one_sentence() -> None:
    with pytest.raises(ServerError, match=r"does not answer .* check that the server runs"):
        run_exact(Endpoint("http://127.0.0.1:9/v1"), SHAPE)
    with pytest.raises(UsageError, match="is no server address"):
        run_exact(Endpoint("localhost:8000"), SHAPE)


@pytest.mark.parametrize("bad", [{"prompt_tokens": 0}, {"passes": 0}, {"concurrency": ()}, {"concurrency": (0,)}])
def test_bad_shapes(bad: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        ExactShape(**bad)


def test_sustained_load_closed_and_open(server: Any) -> None:
    url, manners = server
    manners.token_seconds = 0.001
    closed = run_sustained(Endpoint(url), SHAPE, Load(seconds=0.3, concurrency=3))
    assert closed["exact"] and closed["failed"] == 0 and closed["requests"] >= 3 and manners.most_running >= 3
    opened = run_sustained(Endpoint(url), SHAPE, Load(seconds=0.5, rate=30.0))
    assert opened["failed"] == 0 and 3 <= opened["requests"] <= 40
    assert sustained_lines(opened)[0].startswith("a-model")
    with pytest.raises(UsageError, match="only one"):
        Load(rate=1.0, concurrency=1)


def test_the_fixed_text_is_fixed_and_offsets_differ(server: Any) -> None:
    assert fixed_text(50) == fixed_text(50) != fixed_text(50, seed=1)
    url, _ = server
    source = prompt_source(Endpoint(url).named(), first_offset=5)
    first, second = source.take(100), source.take(100)
    assert source.next_offset == 7 and first.value != second.value and first.num_tokens == 100
    again = prompt_source(Endpoint(url).named(), first_offset=5)
    assert again.take(100) == first


def test_figures() -> None:
    assert figure([]) is None and percentile([], 0.5) is None
    found = figure([3.0, 1.0, 2.0])
    assert found is not None and (found.median, found.lowest, found.highest, found.spread) == (2.0, 1.0, 3.0, 1.0)
    assert percentile(list(range(1, 101)), 0.99) == 99 and percentile([5.0], 0.5) == 5.0


def test_floor_report() -> None:
    report = floor_report(resolve("qwen25-coder-0.5b"), (1, 8), 1000, 35e9, "given")
    json.dumps(report)
    assert report["rows"][0]["bytes"] == pytest.approx(sum(report["rows"][0]["terms"].values()))
    assert report["rows"][0]["tokens_per_second"] == pytest.approx(35e9 / report["rows"][0]["bytes"])
    assert floor_lines(report)[-1].startswith("tok/s")
