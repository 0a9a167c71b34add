"""Strict reading of a record's TOML: types, bounds, and unknown keys refused with the nearest valid name."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from slimserve.errors import UsageError


def nearest(name: str, valid: Iterable[str]) -> str:
    """' (did you mean X?)', or the valid names where none is near."""
    names = sorted(valid)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    if close:
        return f" (did you mean {close[0]}?)"
    return f" (valid: {', '.join(names)})" if names else ""


class Table:
    """One TOML table being read: every key is read once, and `finish` refuses the rest by name."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self._values = values
        self.where = where
        self._known: set[str] = set()

    def error(self, key: str, problem: str) -> UsageError:
        """A sentence that names file, key and problem."""
        return UsageError(f"{self.where}: {key} {problem}")

    def raw(self, key: str) -> Any:
        """The value as it stands, or None."""
        self._known.add(key)
        return self._values.get(key)

    def _typed(self, key: str, kinds: type | tuple[type, ...], words: str, default: Any, required: bool) -> Any:
        value = self.raw(key)
        if value is None:
            if required:
                raise self.error(key, "is missing")
            return default
        if not isinstance(value, kinds) or (isinstance(value, bool) and kinds is not bool):
            raise self.error(key, f"is {value!r}, expected {words}")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """A non-empty string; required without a default."""
        value: str = self._typed(key, str, "text", default, default is None)
        if default is None and not value.strip():
            raise self.error(key, "is empty")
        return value

    def choice(self, key: str, choices: Sequence[str], default: str | None = None) -> str:
        """One of `choices`."""
        value = self.text(key, default)
        if value not in choices:
            raise self.error(key, f"is {value!r}{nearest(value, choices)}")
        return value

    def boolean(self, key: str, default: bool | None = None) -> bool:
        """true or false."""
        return bool(self._typed(key, bool, "true or false", default, default is None))

    def integer(self, key: str, default: int | None = None, *, minimum: int = 0, maximum: int = 1 << 50) -> int:
        """A whole number within bounds."""
        value: int = self._typed(key, int, "a whole number", default, default is None)
        if not minimum <= value <= maximum:
            raise self.error(key, f"is {value}, expected {minimum} to {maximum}")
        return value

    def optional_integer(self, key: str, *, minimum: int = 0, maximum: int = 1 << 50) -> int | None:
        """A whole number within bounds, or None where absent."""
        return self.integer(key, minimum=minimum, maximum=maximum) if self.raw(key) is not None else None

    def number(self, key: str, *, minimum: float, maximum: float) -> float | None:
        """A number within bounds, or None where absent."""
        value = self._typed(key, (int, float), "a number", None, False)
        if value is not None and not minimum <= value <= maximum:
            raise self.error(key, f"is {value}, expected {minimum:g} to {maximum:g}")
        return None if value is None else float(value)

    def texts(self, key: str) -> tuple[str, ...]:
        """A list of strings, empty where absent."""
        values = self._typed(key, list, "a list of texts", [], False)
        if not all(isinstance(value, str) for value in values):
            raise self.error(key, f"is {values!r}, expected a list of texts")
        return tuple(values)

    def numbers(self, key: str) -> tuple[float, ...]:
        """A list of numbers, empty where absent."""
        values = self._typed(key, list, "a list of numbers", [], False)
        if not all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
            raise self.error(key, f"is {values!r}, expected a list of numbers")
        return tuple(float(value) for value in values)

    def mapping(self, key: str) -> Mapping[str, Any]:
        """A free table, empty where absent."""
        value: Mapping[str, Any] = self._typed(key, dict, "a table", {}, False)
        return value

    def table(self, key: str) -> Table:
        """A sub-table, empty where absent."""
        return Table(self.mapping(key), f"{self.where}: {key}")

    def tables(self, key: str) -> tuple[Table, ...]:
        """A list of tables, empty where absent."""
        values = self._typed(key, list, "a list of tables", [], False)
        if not all(isinstance(value, dict) for value in values):
            raise self.error(key, f"is {values!r}, expected a list of tables")
        return tuple(Table(value, f"{self.where}: {key}[{index}]") for index, value in enumerate(values))

    def names(self) -> tuple[str, ...]:
        """The keys that stand in the table."""
        return tuple(self._values)

    def finish(self) -> None:
        """Refuse a key that nobody read."""
        for key in self._values:
            if key not in self._known:
                raise UsageError(f"{self.where}: unknown key {key!r}{nearest(key, self._known)}")
