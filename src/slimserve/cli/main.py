"""The `slimserve` command: finds the verb, runs it, and turns every failure into one sentence and an exit code.

A verb is a module of this package with a function `command`, or with a typer application `group` where it has verbs
of its own; its file name is the verb's name. Anything else that comes first is a profile, so `slimserve PROFILE ...`
is short for `slimserve run PROFILE ...`.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import signal
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import slimserve
from slimserve import cli
from slimserve.cli.terminal import clean_argument, prepare_streams, say
from slimserve.errors import RequestError, SlimServeError

if TYPE_CHECKING:
    # At run time it is imported where Ctrl-C is already in hand.
    import typer

DEFAULT_VERB = "run"
_INTERRUPTED = 130

_HELP = """Chat with a language model on this machine, or serve it as an OpenAI-compatible endpoint.

slimserve                      pick a profile and chat

slimserve PROFILE              chat

slimserve PROFILE -p TEXT      one answer on standard output (- reads standard input)

slimserve PROFILE --serve      OpenAI-compatible endpoint

slimserve --model PATH ...     the same with a GGUF file or a model folder

`slimserve run --help` lists the options of these.
"""


def verbs() -> tuple[str, ...]:
    """Names of all verbs: modules of this package that have a `command` or a `group`."""
    names = (module.name for module in pkgutil.iter_modules(cli.__path__) if not module.name.startswith("_"))
    return tuple(sorted(n for n in names if hasattr(_module(n), "command") or hasattr(_module(n), "group")))


def _module(name: str) -> object:
    return importlib.import_module(f"slimserve.cli.{name}")


def build_app() -> typer.Typer:
    """The typer application with all verbs."""
    import typer

    app = typer.Typer(
        help=_HELP,
        add_completion=False,
        no_args_is_help=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
    )

    @app.callback(invoke_without_command=True)
    def root(version: bool = typer.Option(False, "--version", help="Print the version.")) -> None:
        if version:
            print(slimserve.__version__)
            raise typer.Exit(0)

    for name in verbs():
        group = getattr(_module(name), "group", None)
        if group is not None:
            app.add_typer(group, name=name)
        else:
            app.command(name=name)(getattr(_module(name), "command"))  # noqa: B009
    return app


def with_verb(arguments: Sequence[str], known: Sequence[str]) -> list[str]:
    """The arguments with `run` in front unless they begin with a verb or ask for general help."""
    if arguments and (arguments[0] in known or arguments[0] in ("-h", "--help", "--version")):
        return list(arguments)
    return [DEFAULT_VERB, *arguments]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code (0 done, 1 failed, 2 wrong use, 3 does not fit or is refused)."""
    prepare_streams()
    given = [clean_argument(argument) for argument in (sys.argv[1:] if arguments is None else arguments)]
    with _noted_interrupts() as interrupts:
        try:
            result = build_app()(with_verb(given, verbs()), prog_name="slimserve", standalone_mode=False)
        except KeyboardInterrupt:
            result = _INTERRUPTED
        except BrokenPipeError:
            # The reader of our output left; nothing more can be said there.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 1
        except Exception as error:
            # An import that Ctrl-C broke off may be tried again by its importer, and then fails in its own words.
            if type(error).__name__ != "Abort" and not (interrupts and isinstance(error, ImportError)):
                return _explain(error)
            result = _INTERRUPTED
    # Some versions of the option parser turn Ctrl-C into this code themselves.
    if result == _INTERRUPTED:
        say("interrupted")
    return int(result or 0)


@contextmanager
def _noted_interrupts() -> Iterator[list[int]]:
    """Ctrl-C raises KeyboardInterrupt as always, and is noted."""
    noted: list[int] = []

    def note(number: int, _frame: object) -> None:
        noted.append(number)
        raise KeyboardInterrupt

    try:
        mine = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if mine:
            signal.signal(signal.SIGINT, note)
    except ValueError:  # not the main thread
        mine = False
    try:
        yield noted
    finally:
        if mine:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def _explain(error: Exception) -> int:
    """One sentence on standard error; the exit code."""
    if os.environ.get("SLIMSERVE_DEBUG"):
        traceback.print_exception(error)
    if isinstance(error, RequestError):
        say(f"slimserve: {error}")
        return 1 if error.status >= 500 else 3 if error.code == "context_length_exceeded" else 2
    if isinstance(error, SlimServeError):
        say(f"slimserve: {error}")
        return error.exit_code
    # Wrong options: the option parser's own errors know their message and their exit code.
    format_message, exit_code = getattr(error, "format_message", None), getattr(error, "exit_code", None)
    if type(error).__name__ == "NoArgsIsHelpError" and callable(format_message):
        say(format_message())
        return 2
    if callable(format_message) and isinstance(exit_code, int):
        say(f"slimserve: {format_message()} (slimserve --help lists what there is)")
        return exit_code
    say(f"slimserve: unexpected {type(error).__name__}: {error}; set SLIMSERVE_DEBUG=1 to see where")
    return 1


if __name__ == "__main__":
    sys.exit(main())
