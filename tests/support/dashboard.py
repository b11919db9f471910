"""What the panels of docker/grafana ask Prometheus for."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

DASHBOARD = Path(__file__).resolve().parents[2] / "docker" / "grafana" / "dashboards" / "keepstep.json"


def panels() -> list[dict[str, Any]]:
    """Those that show something; a row only has a title."""
    return [panel for panel in json.loads(DASHBOARD.read_text())["panels"] if panel["type"] != "row"]


def expressions() -> list[tuple[str, str]]:
    """The title of a panel and what it asks, for each question."""
    return [(panel["title"], target["expr"]) for panel in panels() for target in panel["targets"]]


def metrics_of(expression: str) -> set[str]:
    """The names of keepstep's that are in it."""
    return set(re.findall(r"\bkeepstep_\w+", expression))
