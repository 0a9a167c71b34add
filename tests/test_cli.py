"""The command line: verbs, exit codes, what goes where, a chat on a real terminal."""

from __future__ import annotations

import io
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_cli import fake_opener

from slimserve.cli import main as cli_main
from slimserve.cli import run
from slimserve.errors import FormatError, RefusalError, RunError, UsageError

SCRIPT = Path(__file__).with_name("fake_cli.py")


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    settings: dict[str, Any] = {}
    monkeypatch.setattr(run, "open_model", lambda *args, **kwargs: fake_opener(settings)(*args, **kwargs))
    yield settings


def test_verbs_are_the_files_of_the_folder() -> None:
    assert {"run", "list", "show", "doctor"} <= set(cli_main.verbs())
    assert not {"main", "terminal", "opening", "chatting"} & set(cli_main.verbs())


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([], ["run"]),
        (["some-profile"], ["run", "some-profile"]),
        (["some-profile", "-p", "list"], ["run", "some-profile", "-p", "list"]),
        (["--model", "x.gguf"], ["run", "--model", "x.gguf"]),
        (["list"], ["list"]),
        (["run", "list"], ["run", "list"]),
        (["--help"], ["--help"]),
        (["--version"], ["--version"]),
    ],
)
def test_a_profile_may_come_first(given: list[str], expected: list[str]) -> None:
    assert cli_main.with_verb(given, cli_main.verbs()) == expected


def test_one_answer_is_all_that_standard_output_holds(fake: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli_main.main(["any", "-p", "say:The answer, wörld \U0001f600|"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "The answer, wörld \U0001f600\n"
    assert "a note" in captured.err
    rates = re.search(
        r"\[prefill (\d+) tokens \(0 cached\), [\d.]+ tok/s \| decode (\d+) tokens.* \| stop\]", captured.err
    )
    assert rates is not None and int(rates[2]) == len("The answer, wörld \U0001f600".encode()) + 1


def test_quiet_says_nothing_but_the_answer(fake: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli_main.main(["any", "--quiet", "-p", "say:yes|"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "yes\n" and captured.err == ""


def test_system_raw_and_limits_reach_the_engine(fake: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli_main.main(["any", "--quiet", "--system", "say:from the system|", "-p", "x"]) == 0
    assert capsys.readouterr().out == "from the system\n"
    assert cli_main.main(["any", "--quiet", "--raw", "-p", "endless", "--max-tokens", "9"]) == 0
    first = capsys.readouterr().out
    assert len(first) == 10
    assert cli_main.main(["any", "--quiet", "--raw", "-p", "endless", "--max-tokens", "9"]) == 0
    assert capsys.readouterr().out == first, "one answer is greedy unless a flag says otherwise"
    texts = set()
    for seed in ("1", "2", "1"):
        assert (
            cli_main.main(["a", "--quiet", "-p", "x", "--max-tokens", "9", "--temperature", "1", "--seed", seed]) == 0
        )
        texts.add(capsys.readouterr().out)
    assert len(texts) == 2


def test_reasoning_goes_to_standard_error(fake: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli_main.main(["any", "-p", "say:<think>let me see</think>done|"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "done\n" and "let me see" in captured.err


def test_a_model_without_template_completes_and_says_so(
    fake: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    fake["chat"] = False
    assert cli_main.main(["any", "-p", "say:more text|"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "more text\n" and "cannot chat (the file holds no chat template)" in captured.err
    assert cli_main.main(["any", "-p", "x", "--system", "y"]) == 2


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UsageError("wrong"), 2),
        (RefusalError("does not fit"), 3),
        (RunError("failed"), 1),
        (FormatError("damaged"), 1),
        (ValueError("a bug"), 1),
        (KeyboardInterrupt(), 130),
    ],
)
def test_failures_are_one_sentence_and_a_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: BaseException, code: int
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise error

    monkeypatch.delenv("SLIMSERVE_DEBUG", raising=False)
    monkeypatch.setattr(run, "open_model", fail)
    assert cli_main.main(["any", "-p", "x"]) == code
    captured = capsys.readouterr()
    assert captured.out == "" and "Traceback" not in captured.err
    assert len(captured.err.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["any", "--serve", "-p", "x"], "exclude"),
        (["any", "--model", "x"], "leave one out"),
        (["any", "-p", "x", "--top-p", "0"], "--top-p"),
        (["any", "-p", "x", "--temperature", "3"], "--temperature"),
        (["any", "-p", "x", "--nonsense"], "--nonsense"),
        (["any", "-p", "x", "--seed", str(2**70)], "--seed"),
        (["any", "-p", ""], "empty"),
        (["one", "two", "-p", "x"], "two"),
    ],
)
def test_wrong_use_is_2_and_names_the_flag(
    fake: dict[str, Any], capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    assert cli_main.main(arguments) == 2
    assert words in capsys.readouterr().err


def test_a_prompt_that_cannot_fit_is_3(fake: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    fake["max_request_tokens"] = 50
    assert cli_main.main(["any", "-p", "x" * 100]) == 3
    assert "at most 50 tokens" in capsys.readouterr().err


def test_a_load_that_is_refused_is_3(fake: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    fake["fail_load"] = "refuse"
    assert cli_main.main(["any", "-p", "x"]) == 3
    assert "does not fit" in capsys.readouterr().err


def test_an_engine_that_fails_is_1_and_no_trace(fake: dict[str, Any], capfd: pytest.CaptureFixture[str]) -> None:
    assert cli_main.main(["any", "-p", "raise!"]) == 1
    err = capfd.readouterr().err
    assert "as asked" in err and "Traceback" not in err


def test_nobody_to_ask_for_a_profile_is_wrong_use(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    assert cli_main.main([]) == 2
    assert "slimserve list" in capsys.readouterr().err


def test_unknown_profiles_and_paths(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli_main.main(["no-such-profile-at-all", "-p", "x"]) == 2
    assert "no-such-profile-at-all" in capsys.readouterr().err
    assert cli_main.main(["--model", "/no/such/file.gguf", "-p", "x"]) == 2
    assert "/no/such/file.gguf" in capsys.readouterr().err


def test_doctor_reports_and_computes(capsys: pytest.CaptureFixture[str]) -> None:
    code = cli_main.main(["doctor"])
    out = capsys.readouterr().out
    for name in ("python", "torch", "instructions", "memory", "compiler", "cpu kernels", "cache", "gpu", "verdict"):
        assert name in out
    assert re.search(r"step on cpu +computes\n", out)
    assert code == (0 if "ready" in out else 1)


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry), "TERM": "dumb"}


def test_piped_bytes_that_are_not_utf_8_are_replaced() -> None:
    ended = subprocess.run(
        [sys.executable, str(SCRIPT), "{}", "any", "--quiet", "-p", "-"],
        input=b"say:caf\xc3\xa9 \xff!|",
        capture_output=True,
        timeout=60,
        env={**environment(), "LC_ALL": "C"},
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.decode() == "café \ufffd!\n"


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams_are_no_failure(tmp_path: Path, closed: str) -> None:
    out, err = tmp_path / "out", tmp_path / "err"
    command = f"{sys.executable} {SCRIPT} '{{}}' any -p 'say:hi|' >{out} 2>{err} {closed}"
    ended = subprocess.run(["bash", "-c", command], timeout=60, env=environment())
    assert ended.returncode == 0, err.read_text()
    assert out.read_text() == ("" if ">&-" in closed.replace("2>&-", "") else "hi\n")
    assert "Traceback" not in err.read_text() and ("2>&-" in closed or "decode" in err.read_text())


def test_a_reader_that_leaves_is_no_traceback() -> None:
    command = f"{sys.executable} {SCRIPT} '{{}}' any -p endless --max-tokens 4000 | head -c 5"
    ended = subprocess.run(["bash", "-c", command], capture_output=True, timeout=60, env=environment())
    assert len(ended.stdout) == 5 and b"Traceback" not in ended.stderr


def test_serve_says_where_and_ends_in_order() -> None:
    command = [sys.executable, str(SCRIPT), "{}", "any", "--serve", "--port", "0", "--served-name", "mine"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment())
    try:
        assert process.stderr is not None
        line = next(line for line in process.stderr if "serving" in line)
        found = re.search(r"serving mine at (http\S+)/v1", line)
        assert found is not None, line
        reply = httpx.post(found[1] + "/v1/completions", json={"prompt": "say:hi|", "model": "mine"}, timeout=60)
        assert reply.json()["choices"][0]["text"] == "hi"
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
        assert process.returncode == 0 and out == ""
        assert " stop " in err and "Traceback" not in err
    finally:
        process.kill()
        process.wait()


class Terminal:
    """A chat on a pseudo terminal: both output streams and the keyboard are one."""

    def __init__(self, *arguments: str, fake: str = '{"step_seconds": 0.01}') -> None:
        self.pid, self._fd = pty.fork()
        if self.pid == 0:
            os.execve(sys.executable, [sys.executable, str(SCRIPT), fake, *arguments], environment())
        self.seen = ""

    def send(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def until(self, pattern: str, seconds: float = 90.0) -> None:
        """Read until `pattern` has appeared; what was read up to its end is forgotten."""
        deadline = time.monotonic() + seconds
        while (match := re.search(pattern, self.seen)) is None:
            assert time.monotonic() < deadline, f"{pattern!r} did not come; seen: {self.seen!r}"
            if select.select([self._fd], [], [], 0.1)[0]:
                try:
                    self.seen += os.read(self._fd, 4096).decode("utf-8", "replace")
                except OSError:
                    raise AssertionError(f"{pattern!r} did not come; the command ended: {self.seen!r}") from None
        self.seen = self.seen[match.end() :]

    def end(self) -> int:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            done, status = os.waitpid(self.pid, os.WNOHANG)
            if done:
                os.close(self._fd)
                return os.waitstatus_to_exitcode(status)
            if select.select([self._fd], [], [], 0.1)[0]:
                try:
                    os.read(self._fd, 4096)
                except OSError:
                    continue
        os.kill(self.pid, 9)
        raise AssertionError("the command did not end")


def test_a_chat_survives_ctrl_c_and_ends_with_ctrl_d() -> None:
    terminal = Terminal("any")
    terminal.until("/quit")
    terminal.until("> ")
    terminal.send("say:first|\n")
    terminal.until("first\r\n")
    terminal.until(r"\[prefill .* \| stop\]")
    terminal.until("> ")
    terminal.send("/new\n")  # the fake model would find the first question's script in the conversation
    terminal.until("a new conversation")
    terminal.until("> ")
    terminal.send("endless\n")
    terminal.until("[a-p ]{12}")  # longer than the echo of the question, which would pass for a reply
    terminal.send("\x03")  # stops the reply
    terminal.until(r"\| stopped\]")
    terminal.until("> ")
    terminal.send("\x03")  # stops nothing: there is no reply
    terminal.until("Ctrl-D leaves")
    terminal.until("> ")
    terminal.send("/new\n")
    terminal.until("a new conversation")
    terminal.until("> ")
    terminal.send("say:still here|\n")
    terminal.until("still here\r\n")
    terminal.until("> ")
    terminal.send("\x04")
    assert terminal.end() == 0


def test_a_chat_remembers_and_a_full_context_does_not_end_it() -> None:
    terminal = Terminal("any", fake='{"max_request_tokens": 120}')
    terminal.until("> ")
    terminal.send("say:" + "a" * 30 + "|\n")
    terminal.until(r"\| stop\]")
    terminal.until("> ")
    terminal.send("x" * 90 + "\n")
    terminal.until("at most 120 tokens.*/new starts over")
    terminal.until("> ")
    terminal.send("/new\n")
    terminal.until("> ")
    terminal.send("say:ok|\n")
    terminal.until("ok\r\n")
    terminal.send("/quit\n")
    assert terminal.end() == 0


def test_without_a_profile_the_person_picks_one() -> None:
    terminal = Terminal()
    terminal.until("profile .number or name.: ")
    terminal.send("no such thing\n")
    terminal.until("not in the list")
    terminal.until("profile .number or name.: ")
    terminal.send("1\n")
    terminal.until("> ")
    terminal.send("/quit\n")
    assert terminal.end() == 0


def test_ctrl_c_in_one_answer_ends_with_130() -> None:
    terminal = Terminal("any", "-p", "endless")
    terminal.until("[a-p ]{5}")
    terminal.send("\x03")
    assert terminal.end() == 130


def test_an_empty_prompt_is_refused_before_anything_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli_main.main(["--model", "/no/such/file", "-p", ""]) == 2
    assert "the prompt is empty" in capsys.readouterr().err


def test_a_group_without_a_verb_shows_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli_main.main(["bench"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("Usage: slimserve bench") and "lists what there is" not in error


def test_an_import_that_ctrl_c_broke_off_is_an_interruption(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:  # as numpy's importer does
            raise ImportError("cannot load module more than once per process") from None

    monkeypatch.setattr(run, "open_model", broken)
    assert cli_main.main(["any", "-p", "x"]) == 130
    assert capsys.readouterr().err == "interrupted\n"
    monkeypatch.setattr(run, "open_model", lambda *_, **__: exec("raise ImportError('no such module')"))
    assert cli_main.main(["any", "-p", "x"]) == 1


def test_names_out_of_files_do_not_command_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise FormatError("tensor '\x1b[2J\u202ename\x9b' is missing")

    monkeypatch.setattr(run, "open_model", refuse)
    assert cli_main.main(["any", "-p", "x"]) == 1
    assert capsys.readouterr().err == "slimserve: tensor '\\x1b[2J\\u202ename\\x9b' is missing\n"
