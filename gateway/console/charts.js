// Small charts over time, drawn in SVG: a line with its area, several lines, or stacked bars.

import { h, s, say } from "./dom.js";

const HEIGHT = 100;
const MAX_GAP = 5;

/** The least of 1, 2, 2.5, 5 times a power of ten that is not below the value. */
export function niceMax(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 2.5, 5, 10].find((step) => step * power >= value * 0.999) * power;
}

/** Points of a line in runs. Values may be missing: within a run for a moment only, longer gaps part the runs. */
function runs(values, max) {
  const found = [];
  let last = -Infinity;
  values.forEach((value, x) => {
    if (value === null) return;
    if (x - last > MAX_GAP) found.push([]);
    found.at(-1).push(`${x} ${(HEIGHT - (Math.min(value, max) / max) * HEIGHT).toFixed(2)}`);
    last = x;
  });
  return found;
}

/** The path of a line; a value alone is a dot. */
export function linePath(values, max) {
  return runs(values, max).map((run) => `M${run.join("L")}${run.length === 1 ? "h.01" : ""}`).join("");
}

/** The path of the area under a line. */
function areaPath(values, max) {
  const foot = (point) => `${point.split(" ")[0]} ${HEIGHT}`;
  return runs(values, max).map((run) => `M${foot(run[0])}L${run.join("L")}L${foot(run.at(-1))}Z`).join("");
}

/** Stacked bars: for each series one path. */
function barPaths(series, max) {
  const base = series[0].map(() => 0);
  return series.map((values) =>
    values.reduce((path, value, x) => {
      if (!value) return path;
      const low = HEIGHT - (base[x] / max) * HEIGHT;
      base[x] += value;
      const high = HEIGHT - (Math.min(base[x], max) / max) * HEIGHT;
      return `${path}M${x + 0.1} ${low.toFixed(2)}V${high.toFixed(2)}h.8V${low.toFixed(2)}Z`;
    }, ""),
  );
}

/**
 * A chart with a title, the value now, and what the pointer is at.
 *
 * `series` have a `name` and a CSS `tone`; `kind` is "area", "lines" or "bars"; `format` writes a value.
 */
export class Chart {
  constructor({ title, about, kind, series, format, secondsPerValue, ceiling }) {
    Object.assign(this, { title, kind, series, format, secondsPerValue, ceiling });
    this.values = series.map(() => []);
    this.headline = h("strong", { class: "figure" }, "–");
    this.note = h("span", { class: "note" });
    this.top = h("span", { class: "top" });
    this.when = h("span", { class: "when" });
    this.cursor = s("path", { class: "cursor" });
    this.areas = series.map((one) => s("path", { class: `area ${one.tone}` }));
    this.lines = series.map((one) => s("path", { class: `${kind === "bars" ? "bars" : "line"} ${one.tone}` }));
    this.svg = s(
      "svg",
      { preserveAspectRatio: "none", role: "img", "aria-label": title },
      kind === "area" && this.areas,
      this.lines,
      this.cursor,
    );
    this.plot = h("div", { class: "plot" }, this.svg, this.top);
    this.keys = series.map((one) => h("li", { class: one.tone }, one.name));
    const legend = series.length > 1 && h("ul", { class: "legend" }, this.keys);
    this.element = h(
      "section",
      { class: "chart", title: about },
      h("h3", null, title),
      h("p", { class: "headline" }, this.headline, this.note),
      this.plot,
      h("footer", null, this.when, legend || h("span", null, "now")),
    );
    this.plot.addEventListener("pointermove", (event) => this.#point(event));
    this.plot.addEventListener("pointerleave", () => this.#point(null));
  }

  /** Show values, oldest first, one list for each series; and the value now with a note. */
  update(values, headline, note = "") {
    this.values = values;
    this.now = [headline, note];
    const count = values[0].length;
    const sums = values[0].map((_, x) => this.#height(values.map((one) => one[x])));
    const max = this.ceiling ?? niceMax(Math.max(0, ...sums));
    const right = this.kind === "bars" ? count : Math.max(1, count - 1);
    this.svg.setAttribute("viewBox", `0 0 ${right} ${HEIGHT}`);
    const paths = this.kind === "bars" ? barPaths(values, max) : values.map((one) => linePath(one, max));
    paths.forEach((path, i) => this.lines[i].setAttribute("d", path));
    if (this.kind === "area") values.forEach((one, i) => this.areas[i].setAttribute("d", areaPath(one, max)));
    this.keys.forEach((key, i) => (key.hidden = i > 0 && !values[i].some(Boolean)));
    say(this.top, this.format(max));
    say(this.when, ago(count * this.secondsPerValue));
    this.svg.setAttribute("aria-label", `${this.title}: now ${headline} ${note}; largest ${this.format(Math.max(0, ...sums))}`);
    if (this.pointed === undefined) this.#tell(headline, note);
  }

  #height(values) {
    const present = values.map((value) => value ?? 0);
    return this.kind === "bars" ? present.reduce((a, b) => a + b, 0) : Math.max(...present);
  }

  #tell(headline, note) {
    say(this.headline, headline);
    say(this.note, note);
  }

  #point(event) {
    const count = this.values[0].length;
    if (!event || !count) {
      this.pointed = undefined;
      this.cursor.setAttribute("d", "");
      if (this.now) this.#tell(...this.now);
      return;
    }
    const box = this.plot.getBoundingClientRect();
    const x = Math.min(count - 1, Math.max(0, Math.floor(((event.clientX - box.left) / box.width) * count)));
    this.pointed = x;
    this.cursor.setAttribute("d", `M${this.kind === "bars" ? x + 0.5 : x} 0V${HEIGHT}`);
    const told = this.series.map((one, i) => {
      const value = this.values[i][x];
      const text = value === null || value === undefined ? "–" : this.format(value);
      return this.series.length > 1 ? `${one.name} ${text}` : text;
    });
    this.#tell(told.join(", "), ago((count - 1 - x) * this.secondsPerValue));
  }
}

/** A line without axes, for a row of figures. */
export function sparkline() {
  const area = s("path", { class: "area tone-a" });
  const line = s("path", { class: "line tone-a" });
  const svg = s("svg", { class: "spark", preserveAspectRatio: "none", "aria-hidden": "true" }, area, line);
  return {
    element: svg,
    update(values) {
      const max = niceMax(Math.max(0, ...values.map((value) => value ?? 0)));
      svg.setAttribute("viewBox", `0 0 ${Math.max(1, values.length - 1)} ${HEIGHT}`);
      line.setAttribute("d", linePath(values, max));
      area.setAttribute("d", areaPath(values, max));
    },
  };
}

/** "40 s ago", "5 min ago". */
export function ago(seconds) {
  if (seconds < 1) return "now";
  return seconds < 90 ? `${Math.round(seconds)} s ago` : `${Math.round(seconds / 60)} min ago`;
}
