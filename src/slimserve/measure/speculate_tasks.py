"""Texts for measuring drafting: one that repeats its prompt, and some that do not."""

from __future__ import annotations

EDITED_FILE = '''"""A small stock of parts: what there is, what is missing, what it is worth."""

from __future__ import annotations

import csv
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Part:
    """One kind of part."""

    name: str
    count: int
    price: float
    shelf: str = ""

    def value(self) -> float:
        """Worth of all pieces together."""
        return self.count * self.price


@dataclass
class Stock:
    """All parts by name."""

    parts: dict[str, Part] = field(default_factory=dict)

    def add(self, part: Part) -> None:
        """Add pieces of a part, new or known."""
        known = self.parts.get(part.name)
        if known is None:
            self.parts[part.name] = part
        else:
            known.count += part.count
            known.price = part.price

    def take(self, name: str, count: int) -> None:
        """Take pieces out; KeyError and ValueError where they are not there."""
        part = self.parts[name]
        if part.count < count:
            raise ValueError(f"only {part.count} pieces of {name} are left")
        part.count -= count

    def low(self, limit: int = 10) -> list[Part]:
        """Parts of which few are left, fewest first."""
        found = [part for part in self.parts.values() if part.count < limit]
        return sorted(found, key=lambda part: (part.count, part.name))

    def value(self) -> float:
        """Worth of everything."""
        return sum(part.value() for part in self.parts.values())

    def save(self, path: Path) -> None:
        """Write a table with one row per part."""
        with path.open("w", newline="") as file:
            writer = csv.writer(file)
            for part in self.parts.values():
                writer.writerow([part.name, part.count, part.price, part.shelf])
'''
"""Sixty lines that are rewritten with one change."""

TASKS: dict[str, str] = {
    "edit": (
        "Here is a Python file:\n\n```python\n" + EDITED_FILE + "```\n\nChange the default of `limit` in `Stock.low` "
        "from 10 to 25 and return the whole file, without any explanation."
    ),
    "text": (
        "Explain in about three hundred words how a refrigerator works, for a reader who has never thought about it. "
        "Do not use lists."
    ),
    "code": "Write a Python class for a binary search tree with insert, delete, find and in-order iteration.",
}
"""Prompts by name: rewriting a file, prose, new code."""
