"""Make docs/images/dashboard.png: the Grafana dashboard over a real system under load, as a real Prometheus has it.

    python -m tests.dashboard_picture

There may be no Grafana where the tests run, so this draws the panels itself, plainer than Grafana would. All that is
drawn is read from `deploy/grafana/headrace.json`: places, titles, expressions, legends, units, stacking, the table.
"""

from __future__ import annotations

import html
import json
import math
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.browser import browser
from tests.e2e.serving import serving
from tests.ports import free_port
from tests.prometheus import Prometheus, prometheus
from tests.screenshots import load

ROOT = Path(__file__).parents[1]
DASHBOARD = ROOT / "deploy/grafana/headrace.json"
PICTURE = ROOT / "docs/images/dashboard.png"
PAGE = ROOT / ".make/dashboard.html"
MAX_BYTES = 200_000
LOAD_S = 100
STEP_S = 2
RATE_INTERVAL = "15s"
WIDTH, UNIT = 1240, 22  # of the page, and of a grid row, in pixels
SCALE = 0.9
COLOURS = ("#3274d9", "#e0752d", "#37872d", "#a352cc", "#c4162a", "#e0b400", "#00838f", "#8d6e63")
STYLE = """
body { margin: 0; background: #f4f5f5; font: 11px system-ui, sans-serif; color: #24292e; position: relative }
section { position: absolute; background: white; border: 1px solid #dcdfe2; border-radius: 3px; box-sizing: border-box;
  padding: 5px 8px; overflow: hidden }
section.row { background: none; border: none; font-weight: 600; padding: 6px 2px }
h2 { font-size: 11.5px; font-weight: 600; margin: 0 0 2px }
.number { font-size: 22px; text-align: center; padding-top: 4px }
.legend { font-size: 10px; line-height: 13px; white-space: nowrap; overflow: hidden }
.legend i { display: inline-block; width: 10px; height: 3px; margin: 0 4px 3px 8px }
table { width: 100%; border-collapse: collapse }
td, th { text-align: left; padding: 3px 6px; border-bottom: 1px solid #eee }
svg { shape-rendering: crispEdges }
text { font-size: 9.5px; fill: #6e7681 }
"""


class Line(NamedTuple):
    """A series: its name in the legend, and its values by time; NaN for missing ones."""

    name: str
    values: dict[float, float]


def expression_of(target: dict[str, Any]) -> str:
    """The expression as Grafana sends it with all workers selected."""
    return str(target["expr"]).replace("$__rate_interval", RATE_INTERVAL).replace("$worker", ".+")


def legend_of(target: dict[str, Any], labels: dict[str, str]) -> str:
    """The legend's format with the labels filled in."""
    text = str(target["legendFormat"])
    for name, value in labels.items():
        text = text.replace("{{" + name + "}}", value)
    return text


def lines_of(panel: dict[str, Any], server: Prometheus, begin_s: float, end_s: float) -> list[Line]:
    """The series of a panel over the time."""
    found = []
    for target in panel["targets"]:
        for result in server.range(expression_of(target), begin_s, end_s, STEP_S):
            values = {float(at): float(value) for at, value in result["values"]}
            found.append(Line(legend_of(target, result["metric"]), values))
    return found


def written(value: float, unit: str) -> str:
    """A value in a unit of Grafana's."""
    if not math.isfinite(value):
        return "–"
    if unit == "percentunit":
        return f"{100 * value:.3g} %"
    if unit == "s":
        if abs(value) >= 1:
            return f"{value:.3g} s"
        return f"{1e3 * value:.3g} ms" if abs(value) >= 1e-3 or value == 0 else f"{1e6 * value:.3g} µs"
    if unit == "bytes":
        power = min(4, max(0, int(math.log(value, 1024)))) if value >= 1 else 0
        return f"{value / 1024**power:.3g} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"
    suffix = {"reqps": " req/s", "ops": " ops/s"}.get(unit, "")
    return f"{value:.3g}{suffix}" if abs(value) < 1000 else f"{value / 1000:.3g} K{suffix}"


def stacked(lines: Sequence[Line], times: Sequence[float]) -> list[Line]:
    """Each line on top of those before it."""
    total = dict.fromkeys(times, 0.0)
    found = []
    for line in lines:
        for at in times:
            value = line.values.get(at, 0.0)
            total[at] += value if math.isfinite(value) else 0.0
        found.append(Line(line.name, dict(total)))
    return found


def graph(panel: dict[str, Any], lines: list[Line], width: int, height: int) -> str:
    """A time series panel as SVG, with its legend."""
    defaults = panel["fieldConfig"]["defaults"]
    unit = defaults["unit"]
    times = sorted({at for line in lines for at in line.values})
    drawn = stacked(lines, times) if "stacking" in defaults["custom"] else lines
    values = [value for line in drawn for value in line.values.values() if math.isfinite(value)]
    top = defaults.get("max") or max(values, default=1.0) * 1.1 or 1.0
    left, bottom = 58, height - 16
    begin_s, end_s = (times[0], times[-1]) if times else (0.0, 1.0)

    def x(at: float) -> float:
        return left + (at - begin_s) / max(end_s - begin_s, 1.0) * (width - left - 4)

    def y(value: float) -> float:
        return bottom - value / top * (bottom - 6)

    marks = []
    for part in (0.0, 0.5, 1.0):
        at = y(part * top)
        marks.append(f'<line x1="{left}" x2="{width}" y1="{at:.1f}" y2="{at:.1f}" stroke="#e8eaed"/>')
        marks.append(f'<text x="{left - 4}" y="{at + 3:.1f}" text-anchor="end">{written(part * top, unit)}</text>')
    for at in times[len(times) // 8 :: max(1, len(times) // 4)]:
        clock = time.strftime("%H:%M:%S", time.gmtime(at))
        marks.append(f'<text x="{x(at):.1f}" y="{height - 3}" text-anchor="middle">{clock}</text>')
    for number, line in reversed(list(enumerate(drawn))):
        points = [(x(at), y(value)) for at, value in sorted(line.values.items()) if math.isfinite(value)]
        if not points:
            continue
        path = "M" + " L".join(f"{a:.1f},{b:.1f}" for a, b in points)
        colour = COLOURS[number % len(COLOURS)]
        if drawn is not lines:
            area = f"{path} L{points[-1][0]:.1f},{bottom} L{points[0][0]:.1f},{bottom} Z"
            marks.append(f'<path d="{area}" fill="{colour}" fill-opacity="0.35"/>')
        marks.append(f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="1.3"/>')
    if not lines:
        marks.append(f'<text x="{width / 2}" y="{height / 2}" text-anchor="middle">No data</text>')
    names = "".join(
        f'<i style="background:{COLOURS[i % len(COLOURS)]}"></i>{html.escape(line.name)}'
        for i, line in enumerate(lines)
    )
    return f'<svg width="{width}" height="{height}">{"".join(marks)}</svg><div class="legend">{names}</div>'


def number(panel: dict[str, Any], lines: list[Line]) -> str:
    """A stat panel: the last value, in the colour of its threshold."""
    defaults = panel["fieldConfig"]["defaults"]
    values = [value for _, value in sorted(lines[0].values.items()) if math.isfinite(value)] if lines else []
    value = values[-1] if values else math.nan
    colour = "green"
    for step in defaults["thresholds"]["steps"]:
        if step["value"] is None or value >= step["value"]:
            colour = step["color"]
    shade = {"green": "#37872d", "orange": "#e0752d", "red": "#c4162a"}[colour]
    return f'<div class="number" style="color:{shade}">{written(value, defaults["unit"])}</div>'


def table(panel: dict[str, Any], server: Prometheus) -> str:
    """A table panel: the targets joined by a field, columns as the panel organizes them."""
    join, organize = (transformation["options"] for transformation in panel["transformations"])
    rows: dict[str, dict[str, str]] = {}
    for target in panel["targets"]:
        for result in server.ask(expression_of(target)):
            row = rows.setdefault(result["metric"][join["byField"]], {})
            row |= result["metric"] | {f"Value #{target['refId']}": result["value"][1]}
    units = {
        override["matcher"]["options"]: {entry["id"]: entry["value"] for entry in override["properties"]}
        for override in panel["fieldConfig"]["overrides"]
    }
    columns = [name for name in organize["indexByName"] if not organize["excludeByName"].get(name)]
    heads = [organize["renameByName"].get(name, name) for name in columns]

    def cell(head: str, value: str) -> str:
        override = units.get(head, {})
        for mapping in override.get("mappings", ()):
            if value in mapping["options"]:
                shown = mapping["options"][value]
                return f'<span style="color:{shown["color"]}">{shown["text"]}</span>'
        return written(float(value), override["unit"]) if "unit" in override else html.escape(value)

    body = "".join(
        "<tr>" + "".join(f"<td>{cell(h, row.get(c, ''))}</td>" for c, h in zip(columns, heads, strict=True)) + "</tr>"
        for _, row in sorted(rows.items())
    )
    return "<table><tr>" + "".join(f"<th>{head}</th>" for head in heads) + f"</tr>{body}</table>"


def page(server: Prometheus, begin_s: float, end_s: float) -> tuple[str, int]:
    """The dashboard as a page, and its height in pixels."""
    dashboard = json.loads(DASHBOARD.read_text())
    found, height = [], 0
    for panel in dashboard["panels"]:
        place = panel["gridPos"]
        x, y, w, h = (
            place[name] * size for name, size in (("x", WIDTH / 24), ("y", UNIT), ("w", WIDTH / 24), ("h", UNIT))
        )
        height = max(height, int(y + h))
        style = f"left:{x + 2:.0f}px; top:{y + 2:.0f}px; width:{w - 4:.0f}px; height:{h - 4:.0f}px"
        title = html.escape(panel["title"])
        if panel["type"] == "row":
            found.append(f'<section class="row" style="{style}">{title}</section>')
            continue
        if panel["type"] == "table":
            content = table(panel, server)
        else:
            lines = lines_of(panel, server, begin_s, end_s)
            is_graph = panel["type"] == "timeseries"
            content = graph(panel, lines, int(w) - 24, int(h) - 56) if is_graph else number(panel, lines)
        found.append(f'<section style="{style}"><h2>{title}</h2>{content}</section>')
    return f"<!doctype html><meta charset=utf-8><style>{STYLE}</style><body>{''.join(found)}</body>", height + 4


def main() -> None:
    """Write the picture."""
    metrics_port = free_port()
    flags = ("--workers", "2", "--threads", "1", "--kv-cache-gb", "0.04", "--metrics-port", str(metrics_port))
    with tempfile.TemporaryDirectory() as folder, serving(*flags) as system:
        behind = [f"127.0.0.1:{metrics_port + number}" for number in range(3)]
        targets = {"gateway": [f"127.0.0.1:{system.port}"], "router": behind[:1], "worker": behind[1:]}
        with prometheus(Path(folder), {f"headrace-{role}": found for role, found in targets.items()}) as server:
            begin_s = math.ceil(time.time())
            with load(system, num_clients=5):
                time.sleep(LOAD_S)
            content, height = page(server, begin_s + 10, time.time())
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(content)
    with browser() as tab:
        tab.look(width=WIDTH, height=height, scale=SCALE)
        tab.open(PAGE.as_uri())
        tab.screenshot(PICTURE)
    assert PICTURE.stat().st_size < MAX_BYTES, f"{PICTURE} has {PICTURE.stat().st_size} bytes"
    print(f"{PICTURE.relative_to(ROOT)}: {PICTURE.stat().st_size} bytes")


if __name__ == "__main__":
    main()
