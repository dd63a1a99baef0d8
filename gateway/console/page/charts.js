// Charts over time with axes, drawn in SVG: a line with its area, several lines, or stacked bars.

import { h, s, say } from "./dom.js";

const HEIGHT = 100;
const MAX_GAP = 5;
const MAX_AGO_S = 600;
/** Where axes have marks. */
const SHARES = [1, 0.5, 0];

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
 * A chart with axes, a title, the value now, and what the pointer or the arrow keys are at.
 *
 * `series` have a `name` and a CSS `tone`; that of tone-a is told large, the others behind it. `kind` is "area", "lines"
 * or "bars"; `format` writes a value.
 */
export class Chart {
  constructor({ title, about, kind, series, format, ceiling }) {
    Object.assign(this, { title, kind, series, format, ceiling });
    this.values = series.map(() => []);
    this.secondsPerValue = 1;
    this.headline = h("p", { class: "headline" }, "–");
    this.note = h("p", { class: "note" });
    this.scale = SHARES.map(() => h("span"));
    this.times = SHARES.map(() => h("span"));
    this.cursor = s("path", { class: "cursor" });
    this.grid = s("path", { class: "grid" });
    this.areas = series.map((one) => s("path", { class: `area ${one.tone}` }));
    this.lines = series.map((one) => s("path", { class: `${kind === "bars" ? "bars" : "line"} ${one.tone}` }));
    this.svg = s("svg", { preserveAspectRatio: "none", "aria-hidden": "true" }, this.grid, kind === "area" && this.areas, this.lines, this.cursor);
    this.plot = h("div", { class: "plot", role: "slider", tabindex: "0", "aria-label": `${title}, over time`, "aria-valuemin": "0", "aria-valuemax": "0", "aria-valuenow": "0" }, this.svg);
    this.element = h(
      "section",
      { class: "chart", title: about },
      h("h3", null, title),
      this.headline,
      this.note,
      h("div", { class: "scale", "aria-hidden": "true" }, this.scale),
      this.plot,
      h("footer", { "aria-hidden": "true" }, this.times),
    );
    this.plot.addEventListener("pointermove", (event) => this.#pointAt(event.clientX));
    this.plot.addEventListener("pointerleave", () => this.#point(null));
    this.plot.addEventListener("blur", () => this.#point(null));
    this.plot.addEventListener("keydown", (event) => this.#step(event));
  }

  /** Show values, oldest first, one list for each series; and what is to be told of now, with notes [tone, text]. */
  update(values, headline, notes, secondsPerValue) {
    Object.assign(this, { values, secondsPerValue, now: [headline, notes] });
    const count = values[0].length;
    const sums = values[0].map((_, x) => this.#height(values.map((one) => one[x])));
    const max = this.ceiling ?? niceMax(Math.max(0, ...sums));
    const right = this.kind === "bars" ? count : Math.max(1, count - 1);
    this.svg.setAttribute("viewBox", `0 0 ${right} ${HEIGHT}`);
    this.grid.setAttribute("d", `M0 ${HEIGHT / 2}H${right}M${right / 2} 0V${HEIGHT}`);
    const paths = this.kind === "bars" ? barPaths(values, max) : values.map((one) => linePath(one, max));
    paths.forEach((path, i) => this.lines[i].setAttribute("d", path));
    if (this.kind === "area") values.forEach((one, i) => this.areas[i].setAttribute("d", areaPath(one, max)));
    SHARES.forEach((share, i) => {
      say(this.scale[i], this.format(max * share));
      say(this.times[i], share ? mark(count * secondsPerValue * share, count * secondsPerValue) : "now");
    });
    this.plot.setAttribute("aria-valuemax", String(Math.max(0, count - 1)));
    if (this.at !== undefined && this.at < count) return this.#point(this.at);
    this.#tell(headline, notes);
    this.#say(`${headline} ${notes.map(([, text]) => text).join(", ")}; largest ${this.format(Math.max(0, ...sums))}`, count - 1);
  }

  #height(values) {
    const present = values.map((value) => value ?? 0);
    return this.kind === "bars" ? present.reduce((a, b) => a + b, 0) : Math.max(...present);
  }

  #tell(headline, notes) {
    say(this.headline, headline);
    const shape = JSON.stringify(notes);
    if (this.told === shape) return;
    this.told = shape;
    this.note.replaceChildren(...notes.map(([tone, text]) => h("span", { class: tone }, text)));
  }

  #say(text, x) {
    this.plot.setAttribute("aria-valuenow", String(Math.max(0, x)));
    this.plot.setAttribute("aria-valuetext", text);
  }

  #pointAt(clientX) {
    const count = this.values[0].length;
    const box = this.svg.getBoundingClientRect();
    if (count) this.#point(Math.min(count - 1, Math.max(0, Math.floor(((clientX - box.left) / box.width) * count))));
  }

  #step(event) {
    const last = this.values[0].length - 1;
    const at = this.at ?? last;
    const to = { ArrowLeft: at - 1, ArrowRight: at + 1, PageUp: at - 10, PageDown: at + 10, Home: 0, End: last }[event.key];
    if (event.key === "Escape" && this.at !== undefined) {
      event.stopPropagation();
      this.#point(null);
    } else if (to !== undefined && last >= 0) {
      event.preventDefault();
      this.#point(Math.min(last, Math.max(0, to)));
    }
  }

  /** Tell the values at a position; null: those of now. */
  #point(x) {
    if (x === null) {
      this.at = undefined;
      this.cursor.setAttribute("d", "");
      if (this.now) this.#tell(...this.now);
      return;
    }
    this.at = x;
    this.cursor.setAttribute("d", `M${this.kind === "bars" ? x + 0.5 : x} 0V${HEIGHT}`);
    const told = this.series.map((one, i) => ({ ...one, value: this.values[i][x] }));
    const text = ({ value }) => (value === null ? "–" : this.format(value));
    const others = told.filter(({ tone, value }) => tone !== "tone-a" && value);
    const headline = text(told.find(({ tone }) => tone === "tone-a"));
    const count = this.values[0].length;
    const notes = [
      ...others.map((one) => [one.tone, this.kind === "bars" ? `${text(one)} ${one.name}` : `${one.name} ${text(one)}`]),
      [null, moment((count - 1 - x) * this.secondsPerValue, count * this.secondsPerValue)],
    ];
    this.#tell(headline, notes);
    this.#say(`${headline} ${notes.map(([, one]) => one).join(", ")}`, x);
  }
}

/** The mark of a moment on an axis. */
function mark(seconds, axisS) {
  const when = moment(seconds, axisS);
  return when.endsWith(" ago") ? `−${when.slice(0, -4)}` : when;
}

/** When something was, on an axis that is so long: how long ago, or the time of day. */
function moment(seconds, axisS) {
  if (axisS <= MAX_AGO_S) return ago(seconds);
  return new Date(Date.now() - seconds * 1000).toLocaleTimeString("en-GB", { hour: "2-digit", minute: "2-digit" });
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

/** "40 s ago", "5 min ago", "2.5 min ago". */
export function ago(seconds) {
  if (seconds < 1) return "now";
  return seconds < 90 ? `${Math.round(seconds)} s ago` : `${Number((seconds / 60).toFixed(seconds < 600 ? 1 : 0))} min ago`;
}
