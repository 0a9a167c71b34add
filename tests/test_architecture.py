"""The floors of the house: imports run downward only, and run-time code never imports test oracles."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent / "src" / "slimserve"
FLOORS = (
    "cli",
    "measure",
    "serve",
    "profiles",
    "plan",
    "engine",
    "cache",
    "models",
    "layers",
    "weights",
    "fetch",
    "ops",
    "quant",
    "hardware",
    "errors",
)
# These ask an architecture for its tables (loader builds a model from them), so they stand above models/.
ABOVE_ITS_FLOOR = {f"weights/{name}.py": "cache" for name in ("loader", "convert", "synthetic", "synthetic_write")}
ORACLES = {"transformers", "llama_cpp", "gguf", "openai", "pytest", "hypothesis", "httpx"}


def modules() -> list[Path]:
    return sorted(ROOT.rglob("*.py"))


def imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found.add(node.module)
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level > 0:
            package = path.relative_to(ROOT.parent).with_suffix("").parts[: -node.level]
            found.add(".".join((*package, node.module or "")))
    return found


def floor(parts: tuple[str, ...]) -> int | None:
    return FLOORS.index(parts[0]) if parts and parts[0] in FLOORS else None


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_run_downward(path: Path) -> None:
    relative = path.relative_to(ROOT)
    own_name = ABOVE_ITS_FLOOR.get(relative.as_posix(), relative.with_suffix("").parts[0])
    own = floor((own_name,))
    for name in imports(path):
        parts = tuple(name.split("."))
        assert parts[0] not in ORACLES, f"{relative} imports the test oracle {parts[0]}"
        if parts[0] != "slimserve" or own is None:
            continue
        target_path = "/".join(parts[1:]) + ".py"
        target_name = ABOVE_ITS_FLOOR.get(target_path, parts[1] if len(parts) > 1 else "")
        target = floor((target_name,)) if target_name else None
        assert target is None or target >= own, f"{relative} (floor {own_name}) imports {name} above it"


def test_every_room_exists() -> None:
    for name in FLOORS[:-2]:
        assert (ROOT / name / "__init__.py").exists(), f"room {name} is missing"
