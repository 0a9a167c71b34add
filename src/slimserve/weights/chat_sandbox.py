"""The sandbox in which chat templates run: jinja2 without reach into Python, and with bounds on time and size.

A template comes with the model file and is not trusted. Beyond jinja2's own sandbox, every loop pass, macro call,
filter, call and concatenation is charged to the budget of its render: processor time, and characters produced in all
(which also bounds the memory that a render can hold). Operations that make much from little (repetition, padding,
replacement, joins, powers) are priced before they run.
"""

from __future__ import annotations

import functools
import json
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Cycler, Joiner, Namespace
from jinja2.visitor import NodeTransformer

from slimserve.weights.tokenizer.prompt import restore_escaped_mark

_MAX_WIDTH = 10_000
_MAX_INTEGER_BITS = 10_000
_WIDE_FORMAT = re.compile(r"\d{5,}|\*|\{[^{}]*:[^{}]*\{")
_WIDTH_FUNCTIONS = frozenset(
    {"center", "ljust", "rjust", "zfill", "expandtabs", "indent", "wordwrap", "batch", "slice", "truncate"}
)
# Filters that hand containers on; all others may write them out as text, which is priced first.
_CONTAINER_FILTERS = frozenset(
    (
        "attr",
        "batch",
        "count",
        "d",
        "default",
        "dictsort",
        "first",
        "groupby",
        "items",
        "last",
        "length",
        "list",
        "map",
        "max",
        "min",
        "random",
        "reject",
        "rejectattr",
        "reverse",
        "select",
        "selectattr",
        "slice",
        "sort",
        "sum",
        "unique",
    )
)


class TemplateLimitError(jinja2.TemplateError):
    """A render went over one of its bounds."""


@dataclass(slots=True)
class Budget:
    """What one render may still use. deadline: thread processor time, seconds. characters: still to be produced."""

    deadline: float
    characters: int

    def tick(self) -> None:
        """One step: raises TemplateLimitError when time is up."""
        if time.thread_time() > self.deadline:
            raise TemplateLimitError("the template takes too long")

    def produce(self, amount: int) -> None:
        """Charge characters (or container entries); raises TemplateLimitError when they are used up."""
        self.characters -= amount
        if self.characters < 0:
            raise TemplateLimitError("the template produces too much text")

    def weigh(self, value: Any) -> None:
        """Charge the written form of a value: its leaves and entries, counted as often as they would be written."""
        stack = [value]
        steps = 0
        while stack:
            item = stack.pop()
            self.produce(len(item) + 2 if isinstance(item, str) else 8)
            steps += 1
            if steps % 1024 == 0:
                self.tick()
            if isinstance(item, Mapping):
                stack.extend(item.keys())
                stack.extend(item.values())
            elif isinstance(item, list | tuple | set | frozenset):
                stack.extend(item)


_budget: ContextVar[Budget] = ContextVar("chat_template_budget")
_mark: ContextVar[str] = ContextVar("chat_template_mark", default="")


def _charge(value: Any) -> Any:
    budget = _budget.get()
    budget.tick()
    if isinstance(value, str):
        budget.produce(len(value))
    elif isinstance(value, list | tuple | dict):
        budget.produce(8 * len(value))
    return value


def _price_call(name: str, subject: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Refuse a string operation whose result would be out of proportion, before it runs."""
    budget = _budget.get()
    values = [*args, *kwargs.values()]
    if name in _WIDTH_FUNCTIONS and any(isinstance(value, int) and abs(value) > _MAX_WIDTH for value in values):
        raise TemplateLimitError(f"`{name}` with a width over {_MAX_WIDTH}")
    if name == "replace" and isinstance(subject, str):
        strings = [value for value in values if isinstance(value, str)]
        if len(strings) == 2:
            count = subject.count(strings[0]) if strings[0] else len(subject) + 1
            budget.produce(count * len(strings[1]))
    if name in ("format", "format_map"):
        if isinstance(subject, str) and _WIDE_FORMAT.search(subject):
            raise TemplateLimitError("a format with a computed or very large width")
        budget.weigh(values)
    if name == "join":
        budget.weigh(values)
        budget.produce(sum(len(value) for value in (subject, *values) if isinstance(value, str)))


def _join_price(separator: Any, items: Any) -> None:
    if isinstance(separator, str) and isinstance(items, list | tuple):
        _budget.get().produce(len(separator) * len(items))


def _wrap_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        budget = _budget.get()
        budget.tick()
        start = 1 if hasattr(function, "jinja_pass_arg") else 0
        subject, rest = (args[start] if len(args) > start else None), args[start + 1 :]
        if name == "join":
            subject = list(subject or ())
            args = (*args[:start], subject, *rest)
            _join_price(rest[0] if rest else kwargs.get("d", ""), subject)
        if name not in _CONTAINER_FILTERS and not isinstance(subject, str):
            budget.weigh(subject)
        _price_call(name, subject, rest, kwargs)
        return _charge(function(*args, **kwargs))

    return bounded


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as templates of the model hub expect it: no HTML escapes, non-ASCII as it is."""
    if indent is not None and (len(indent) if isinstance(indent, str) else indent) > 64:
        raise TemplateLimitError("`tojson` with an indent over 64")
    text = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    return restore_escaped_mark(text, _mark.get())


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(str(message))


def _strftime_now(format: str) -> str:
    if len(format) > 256:
        raise TemplateLimitError("a date format over 256 characters")
    return datetime.now().strftime(format)


def _dictionary(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)


class _PlainNamespace(Namespace):
    """jinja2's namespace without underscore names."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        for name in dict(*args, **kwargs):
            _check_name(name)
        super().__init__(*args, **kwargs)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace cannot hold the name {name!r}")


class _GenerationTag(Extension):
    """`{% generation %}` marks assistant text for training; it prints its body."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _Metering(NodeTransformer):
    """Puts a budget step into every loop and macro, and sends `~` through the environment."""

    def _tick(self, line: int) -> nodes.Stmt:
        step = nodes.Call(nodes.EnvironmentAttribute("step"), [], [], None, None)
        statement = nodes.ExprStmt(step, lineno=line)
        statement.set_lineno(line)
        return statement

    def _with_tick(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, self._tick(node.lineno))
        return node

    # The names are those of jinja2's node types.
    visit_For = _with_tick  # noqa: N815
    visit_Macro = _with_tick  # noqa: N815
    visit_CallBlock = _with_tick  # noqa: N815

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        call = nodes.Call(nodes.EnvironmentAttribute("join_text"), node.nodes, [], None, None)
        return call.set_lineno(node.lineno)


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """The jinja2 environment of chat templates, metered. Rendering needs `limits` around it."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationTag, loopcontrols],
            finalize=self._finalize,
            # Constants are not folded: that would run operations outside any budget.
            optimized=False,
        )
        self.filters = {name: _wrap_filter(name, function) for name, function in self.filters.items()}
        self.filters["tojson"] = _wrap_filter("tojson", _to_json)
        ranged = self.globals["range"]
        self.globals = {
            "range": ranged,
            "dict": _dictionary,
            "namespace": _PlainNamespace,
            "cycler": Cycler,
            "joiner": Joiner,
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
        }

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        metered = _Metering().visit(tree)
        metered.set_environment(self)
        return metered

    @staticmethod
    def concat(pieces: Any) -> str:  # type: ignore[override]
        """Joins what a macro or a block has printed."""
        text = "".join(pieces)
        _budget.get().produce(len(text))
        return text

    @staticmethod
    def step() -> str:
        """One pass of a loop or macro."""
        _budget.get().tick()
        return ""

    @staticmethod
    def join_text(*values: Any) -> str:
        """`a ~ b`."""
        budget = _budget.get()
        budget.tick()
        budget.weigh(values)
        return "".join(map(str, values))

    @staticmethod
    def _finalize(value: Any) -> Any:
        if not isinstance(value, str):
            _budget.get().weigh(value)
        return value

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Prices `+`, `*`, `**` and `%` before they run."""
        budget = _budget.get()
        budget.tick()
        if operator == "*":
            for sequence, count in ((left, right), (right, left)):
                if isinstance(sequence, str | list | tuple) and isinstance(count, int):
                    budget.produce(8 * len(sequence) * max(count, 0))
        if operator == "%" and isinstance(left, str):
            _price_call("format", left, [right], {})
        if operator == "**" and isinstance(left, int) and isinstance(right, int):
            _check_bits(left.bit_length() * max(right, 0))
        if operator == "*" and isinstance(left, int) and isinstance(right, int):
            _check_bits(left.bit_length() + right.bit_length())
        if operator == "+" and isinstance(left, str | list | tuple) and isinstance(right, str | list | tuple):
            budget.produce(len(left) + len(right))
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        """Prices and charges every call that a template makes."""
        _budget.get().tick()
        bound = getattr(__obj, "__wrapped__", __obj)
        subject = getattr(bound, "__self__", None)
        if isinstance(subject, str):
            name = getattr(bound, "__name__", "")
            if name == "join" and args:
                args = (list(args[0]), *args[1:])
                _join_price(subject, args[0])
            _price_call(name, subject, args, kwargs)
        return _charge(super().call(__context, __obj, *args, **kwargs))


def _check_bits(bits: int) -> None:
    if bits > _MAX_INTEGER_BITS:
        raise TemplateLimitError("a number with too many digits")


@contextmanager
def limits(*, seconds: float, characters: int, mark: str = "") -> Iterator[Budget]:
    """Bounds for one render in this thread: processor time, characters in all; `mark`: see tokenizer.prompt."""
    budget = Budget(time.thread_time() + seconds, characters)
    budget_token, mark_token = _budget.set(budget), _mark.set(mark)
    try:
        yield budget
    finally:
        _budget.reset(budget_token)
        _mark.reset(mark_token)
