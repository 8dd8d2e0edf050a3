"""The HTML page of `launcher plan --html`. Does not import torch."""

from __future__ import annotations

from typing import Any

from launcher import __version__
from launcher.console import bytes_as_text
from launcher.metrics import page
from launcher.planner.formatting import NAMES, as_text


def component_amounts(
    plan: dict[str, Any], moment: dict[str, Any], *, outside: bool
) -> dict[str, int]:
    """Names and bytes of a moment's components. outside: also context and margin."""
    more = {"context": plan["context"], "margin": plan["margin"]} if outside else {}
    amounts = moment["components"] | more
    return {NAMES[name]: amount for name, amount in amounts.items() if amount}


def plan_page(plan: dict[str, Any]) -> dict[str, Any]:
    """The page of a plan, for `write`. plan: as `as_json` returns it."""
    moments, phases = plan["timeline"], plan["phases"]
    peaks = [(name, component_amounts(plan, one, outside=True)) for name, one in phases.items()]
    curve = {
        "run": 0,
        "name": "",
        "dash": 0,
        "step": list(range(len(moments))),
        "y": [one["total"] for one in moments],
        "labels": [f"{one['phase']} {one['where']}" for one in moments],
    }
    text = "\n".join(as_text(plan))
    return {
        "title": f"Plan of {plan['recipe']}",
        "footer": f"launcher {__version__}",
        "runs": [{"name": "", "events": []}],
        "charts": [{"title": "Tensors during a step", "unit": "bytes", "series": [curve]}],
        "sections": [
            page.bars("Memory at the peak of each phase", peaks, bytes_as_text),
            {"kind": "charts", "title": ""},
            {"kind": "text", "title": "The whole plan", "open": True, "text": text},
        ],
    }
