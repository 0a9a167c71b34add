"""Evidence as a page for people: what was asked, what came back, with the rates drawn."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

_STYLE = """body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:60rem;padding:0 1rem;color:#222}
table{border-collapse:collapse;width:100%}td,th{border-bottom:1px solid #ddd;padding:.3rem .5rem;text-align:left;
vertical-align:top}.pass{color:#15702b}.fail{color:#b00020;font-weight:bold}code{font-size:13px}
svg text{font:12px system-ui,sans-serif}"""


def evidence_page(evidence: Mapping[str, Any]) -> str:
    """One self-contained HTML page."""
    verdict = "passed" if evidence["passed"] else "failed"
    rows = "".join(_gate_row(gate) for gate in evidence["gates"])
    facts = {
        "settings hash": evidence["settings_hash"],
        "revision": evidence["revision"],
        "started": evidence["started"],
        "processor": f"{evidence['hardware']['cpu']}, {evidence['hardware']['cores']} cores",
        "accelerators": ", ".join(device["name"] for device in evidence["hardware"]["accelerators"]) or "none",
        "versions": ", ".join(f"{name} {version}" for name, version in evidence["versions"].items()),
        "server up after": f"{evidence['boot_seconds']} s",
    }
    table = "".join(f"<tr><th>{escape(k)}</th><td>{escape(str(v))}</td></tr>" for k, v in facts.items())
    title = escape(f"{evidence['profile']} on {evidence['platform']}")
    return (
        f"<!doctype html><html lang='en'><meta charset='utf-8'><title>{title}</title><style>{_STYLE}</style>"
        f"<h1>{title}: <span class='{verdict[:4]}'>{verdict}</span></h1><table>{table}</table>"
        f"<h2>Gates</h2><table><tr><th>gate</th><th></th><th>what came back</th><th>s</th></tr>{rows}</table>"
        f"{_plots(evidence)}<h2>Memory plan</h2>{_plan(evidence['plan'])}"
        f"<h2>Again</h2><p><code>slimserve qualify {escape(evidence['profile'])}</code></p></html>\n"
    )


def _gate_row(gate: Mapping[str, Any]) -> str:
    word = "pass" if gate["passed"] else "fail"
    noise = ", ".join(f"{name} {value:.3g}" for name, value in gate["noise"].items())
    detail = escape(gate["detail"]) + (f"<br><small>noise: {escape(noise)}</small>" if noise else "")
    cells = f"<td>{escape(gate['name'])}</td><td class='{word}'>{word}</td><td>{detail}</td><td>{gate['seconds']}</td>"
    return f"<tr>{cells}</tr>"


def _plots(evidence: Mapping[str, Any]) -> str:
    parts = []
    for gate in evidence["gates"]:
        rates = gate["figures"].get("tokens_per_second")
        if gate["name"] == "bench-exact" and isinstance(rates, Mapping):
            bars = {f"{count} streams": (r["median"], r["lowest"], r["highest"]) for count, r in rates.items()}
            parts.append("<h2>Tokens per second</h2>" + _bars(bars, "tok/s, median with lowest and highest"))
        gains = gate["figures"].get("gain")
        if gate["name"] == "needles" and isinstance(gains, Mapping):
            bars = {f"{length} tokens": (gain, gain, gain) for length, gain in gains.items()}
            parts.append("<h2>What a needle adds to its answer</h2>" + _bars(bars, "nat"))
    return "".join(parts)


def _bars(bars: Mapping[str, tuple[float, float, float]], unit: str) -> str:
    """Horizontal bars with whiskers."""
    most = max([high for _, _, high in bars.values()] + [1e-9])
    height = 28 * len(bars) + 24
    lines = []
    for index, (name, (value, low, high)) in enumerate(bars.items()):
        y, scale = 28 * index + 8, 480 / most
        left, right = 130 + max(low, 0) * scale, 130 + max(high, 0) * scale
        lines.append(
            f"<text x='0' y='{y + 13}'>{escape(name)}</text><rect x='130' y='{y}' width='{max(value, 0) * scale:.1f}' "
            f"height='16' fill='#3b7dd8'/><line x1='{left:.1f}' x2='{right:.1f}' y1='{y + 8}' y2='{y + 8}' "
            f"stroke='#123' stroke-width='2'/><text x='{right + 10:.1f}' y='{y + 13}'>{value:.4g}</text>"
        )
    lines.append(f"<text x='130' y='{height - 6}'>{escape(unit)}</text>")
    return f"<svg width='720' height='{height}' role='img'>{''.join(lines)}</svg>"


def _plan(plan: Mapping[str, Any]) -> str:
    rows = "".join(
        f"<tr><td>{escape(term['name'])}</td><td>{term['bytes'] / 2**20:,.1f} MiB</td>"
        f"<td>{escape(term['source'])}</td></tr>"
        for term in plan["terms"]
    )
    return f"<table><tr><th>term</th><th>bytes</th><th>source</th></tr>{rows}</table>"
