"""Evidence as a page for people: what was asked, what came back twice, with rates, needles and memory drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

_STYLE = """body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:64rem;padding:0 1rem;color:#222}
table{border-collapse:collapse;width:100%}td,th{border-bottom:1px solid #ddd;padding:.3rem .5rem;text-align:left;
vertical-align:top}.pass{color:#15702b}.fail{color:#b00020;font-weight:bold}code{font-size:13px}small{color:#555}
svg text{font:12px system-ui,sans-serif}"""

Bar = tuple[float, float, float]
"""A value with the lowest and the highest of its repeats."""


def evidence_page(evidence: Mapping[str, Any]) -> str:
    """One self-contained HTML page."""
    verdict = "passed" if evidence["passed"] else "failed"
    rows = "".join(_gate_row(gate) for gate in evidence["gates"])
    hardware = evidence["hardware"]
    facts = {
        "settings hash": evidence["settings_hash"],
        "revision": evidence["revision"],
        "started": evidence["started"],
        "processor": f"{hardware['cpu']}, {hardware['cores']} cores, {hardware['memory_bytes'] / 2**30:.1f} GiB",
        "accelerators": ", ".join(device["name"] for device in hardware["accelerators"]) or "none",
        "versions": ", ".join(f"{name} {version}" for name, version in evidence["versions"].items()),
        "server up after": ", ".join(f"{seconds} s" for seconds in evidence["boot_seconds"]),
        "settings": ", ".join(f"{name} {value}" for name, value in evidence["settings"].items()),
        "files": ", ".join(f"{file['name']} (sha256 {file['sha256'][:16]})" for file in evidence["files"]),
    }
    table = "".join(f"<tr><th>{escape(k)}</th><td>{escape(str(v))}</td></tr>" for k, v in facts.items())
    title = escape(f"{evidence['profile']} on {evidence['platform']}")
    made = "" if evidence["files"] else " --weights synthetic"
    return (
        f"<!doctype html><html lang='en'><meta charset='utf-8'><title>{title}</title><style>{_STYLE}</style>"
        f"<h1>{title}: <span class='{verdict[:4]}'>{verdict}</span></h1><table>{table}</table>"
        "<h2>Gates</h2><p>Every gate ran twice, in two boots of the same build. Noise is the difference of a figure "
        "between them, as a share of the larger one; what is called exact was the same to the last bit.</p>"
        f"<table><tr><th>gate</th><th></th><th>what came back</th><th>s</th></tr>{rows}</table>"
        f"{_plots(evidence)}<h2>Memory plan</h2>{_plan(evidence['plan'])}"
        f"<h2>Again</h2><p><code>slimserve qualify {escape(evidence['profile'])}{made}</code></p></html>\n"
    )


def _gate_row(gate: Mapping[str, Any]) -> str:
    word = "pass" if gate["passed"] else "fail"
    notes = [f"exact: {', '.join(gate['exact'])}"] if gate["exact"] else []
    loud = sorted(((value, name) for name, value in gate["noise"].items() if value), reverse=True)
    if loud:
        notes.append("noise: " + ", ".join(f"{name} {value:.1%}" for value, name in loud[:6]))
    detail = escape(gate["detail"]) + (f"<br><small>{escape('; '.join(notes))}</small>" if notes else "")
    seconds = ", ".join(map(str, gate["seconds"]))
    cells = f"<td>{escape(gate['name'])}</td><td class='{word}'>{word}</td><td>{detail}</td><td>{seconds}</td>"
    return f"<tr>{cells}</tr>"


def _plots(evidence: Mapping[str, Any]) -> str:
    found = {gate["name"]: [gate["figures"], *gate["again"]] for gate in evidence["gates"] if gate["figures"]}
    parts = []
    if "bench-exact" in found:
        bars = _each_boot(found["bench-exact"], "tokens_per_second", "{} streams")
        parts.append("<h2>Tokens per second</h2>" + _bars(bars, "tok/s: median with lowest and highest of a boot"))
    if "needles" in found:
        asked = found["needles"][0]["asked"]
        shares = {
            f"{length} tokens": _point(100.0 * count / asked[length])
            for length, count in found["needles"][0]["found"].items()
        }
        shares["none planted"] = _point(100.0 * found["needles"][0]["without_needle"] / max(1, sum(asked.values())))
        parts.append("<h2>Needles found</h2>" + _bars(shares, "% of those planted"))
    if "memory" in found:
        sizes = {"planned": _point(found["memory"][0]["planned_bytes"] / 2**20)}
        for number, figures in enumerate(found["memory"]):
            sizes |= {
                f"at start, boot {number + 1}": _point(figures["start_bytes"] / 2**20),
                f"after all, boot {number + 1}": _point(figures["live_bytes"] / 2**20),
            }
        parts.append("<h2>Memory</h2>" + _bars(sizes, "MiB"))
    return "".join(parts)


def _each_boot(runs: Sequence[Mapping[str, Any]], name: str, label: str) -> dict[str, Bar]:
    """A figure of every boot, the boots of one case side by side."""
    return {
        f"{label.format(case)}, boot {number + 1}": (run[name][case]["median"], run[name][case]["lowest"],
                                                     run[name][case]["highest"])
        for case in runs[0][name] for number, run in enumerate(runs) if case in run.get(name, {})
    }  # fmt: skip


def _point(value: float) -> Bar:
    return (value, value, value)


def _bars(bars: Mapping[str, Bar], unit: str) -> str:
    """Horizontal bars with whiskers."""
    most = max([high for _, _, high in bars.values()] + [1e-9])
    height = 28 * len(bars) + 24
    lines = []
    for index, (name, (value, low, high)) in enumerate(bars.items()):
        y, scale = 28 * index + 8, 480 / most
        left, right = 150 + max(low, 0) * scale, 150 + max(high, 0) * scale
        lines.append(
            f"<text x='0' y='{y + 13}'>{escape(name)}</text><rect x='150' y='{y}' width='{max(value, 0) * scale:.1f}' "
            f"height='16' fill='#3b7dd8'/><line x1='{left:.1f}' x2='{right:.1f}' y1='{y + 8}' y2='{y + 8}' "
            f"stroke='#123' stroke-width='2'/><text x='{right + 10:.1f}' y='{y + 13}'>{value:.4g}</text>"
        )
    lines.append(f"<text x='150' y='{height - 6}'>{escape(unit)}</text>")
    return f"<svg width='740' height='{height}' role='img'>{''.join(lines)}</svg>"


def _plan(plan: Mapping[str, Any]) -> str:
    rows = "".join(
        f"<tr><td>{escape(term['name'])}</td><td>{term['bytes'] / 2**20:,.1f} MiB</td>"
        f"<td>{escape(term['source'])}</td></tr>"
        for term in plan["terms"]
    )
    return f"<table><tr><th>term</th><th>bytes</th><th>source</th></tr>{rows}</table>"
