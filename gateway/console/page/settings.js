// The settings of questions, and their panel. Which sampling fields there are comes from the gateway.

import { samplingFields } from "./api.js";
import { h } from "./dom.js";
import { inline } from "./markdown.js";
import { loadSettings, NO_SETTINGS, saveSettings } from "./store.js";

// These stand first; all others are under “More”.
const FIRST = ["temperature", "top_p", "max_tokens", "seed"];
// Names for people, where the field's name in words is none.
const LABELS = { max_tokens: "Most tokens", min_tokens: "Least tokens", stop: "Stop texts", ignore_eos: "Ignore the end of the answer" };
const HINTS = { max_tokens: "as many as fit", seed: "random" };
const MAX_SLIDER_SPAN = 4;
const AGAIN_MS = 3000;
const SYSTEM = { name: "system", label: "System prompt", rows: 4, placeholder: "How the model is to behave" };
const STRUCTURED = [
  { name: "schema", label: "JSON schema of the answer", rows: 3, code: true, placeholder: '{"type": "object", …}' },
  { name: "tools", label: "Tools", rows: 3, code: true, placeholder: '[{"type": "function", "function": {"name": …}}]' },
];
const THEMES = [["", "as the system"], ["light", "light"], ["dark", "dark"]];

export class Settings {
  constructor(panel) {
    this.all = loadSettings();
    this.panel = panel;
    this.fields = [];
    this.defaults = {};
    this.beside = h("select", { id: "beside" });
    this.#build();
    this.#fetch();
  }

  /** Let the controls that are not set stand where the model’s own defaults are. */
  useDefaults(defaults) {
    if (JSON.stringify(defaults) === JSON.stringify(this.defaults)) return;
    this.defaults = defaults;
    for (const show of this.shows) show();
  }

  set(name, value) {
    this.all[name] = value;
    saveSettings(this.all);
  }

  /** Set a sampling field; undefined leaves it to the model. */
  #sample(name, value) {
    const { [name]: _, ...others } = this.all.sampling;
    this.set("sampling", value === undefined ? others : { ...others, [name]: value });
    this.#count();
  }

  async #fetch() {
    try {
      this.fields = await samplingFields();
    } catch {
      setTimeout(() => this.#fetch(), AGAIN_MS);
      return;
    }
    const isOpen = this.more?.open;
    this.#build();
    this.more.open = Boolean(isOpen);
  }

  #build() {
    this.shows = [];
    const had = document.activeElement?.id;
    const reset = () => {
      this.all = { ...NO_SETTINGS, sampling: {}, model: this.all.model, beside: this.all.beside };
      saveSettings(this.all);
      this.#build();
      this.panel.querySelector("textarea").focus();
    };
    const byName = new Map(this.fields.map((field) => [field.name, field]));
    const first = FIRST.filter((name) => byName.has(name)).map((name) => this.#control(byName.get(name)));
    const others = this.fields.filter(({ name }) => !FIRST.includes(name)).map((field) => this.#control(field));
    this.counted = h("span", { class: "count" });
    this.more = h("details", { class: "more" }, h("summary", null, "More sampling fields", this.counted), others);
    this.panel.replaceChildren(
      h("h2", null, "Settings"),
      h("p", { class: "lead" }, "Left empty, the model’s own defaults apply."),
      this.#text(SYSTEM),
      ...first,
      others.length ? this.more : "",
      ...STRUCTURED.map((field) => this.#text(field)),
      h("div", { class: "setting inline" }, h("label", { for: "beside" }, "Compare with"), this.beside),
      this.#theme(),
      h("button", { type: "button", class: "button", onclick: reset }, "Back to the defaults"),
    );
    this.#count();
    if (had && this.panel.querySelector(`#${CSS.escape(had)}`)) document.getElementById(had).focus();
  }

  #count() {
    const names = Object.keys(this.all.sampling).filter((name) => !FIRST.includes(name));
    this.counted.textContent = names.length ? ` (${names.length} set)` : "";
  }

  #theme() {
    const select = h("select", { id: "theme" }, THEMES.map(([name, text]) => h("option", { value: name }, text)));
    select.value = theme.get();
    select.addEventListener("change", () => theme.set(select.value));
    return h("div", { class: "setting inline" }, h("label", { for: "theme" }, "Colours"), select);
  }

  // --- sampling fields --------------------------------------------------------------------------------------------------

  #control(field) {
    const { name, kind, meaning } = field;
    const id = `setting-${name}`;
    const about = h("p", { class: "about", id: `${id}-about` }, inline(meaning || field.values));
    const control = { whole: () => this.#number(field, id), number: () => this.#scale(field, id), texts: () => this.#list(field, id), switch: () => this.#switch(field, id) }[kind]();
    const input = control.querySelector("input, textarea");
    input.setAttribute("aria-describedby", [about.id, input.getAttribute("aria-describedby")].filter(Boolean).join(" "));
    control.append(about);
    return control;
  }

  #scale(field, id) {
    return field.greatest - field.least <= MAX_SLIDER_SPAN ? this.#range(field, id) : this.#number(field, id);
  }

  #range({ name, least, greatest }, id) {
    const label = labelOf(name);
    const told = h("output", { for: id });
    const input = h("input", { id, name, type: "range", min: least, max: greatest, step: 0.01 });
    const clear = h("button", { type: "button", class: "link" }, "default");
    clear.setAttribute("aria-label", `${label}: back to the default`);
    const show = () => {
      const own = this.all.sampling[name];
      const isSet = own !== undefined;
      const value = Number(own ?? this.defaults[name] ?? least).toFixed(2);
      input.value = value;
      input.classList.toggle("unset", !isSet);
      input.setAttribute("aria-valuetext", isSet ? value : `${value}, the model’s default`);
      told.value = isSet ? value : `${value} (default)`;
      clear.hidden = !isSet;
    };
    input.addEventListener("input", () => {
      this.#sample(name, Number(input.value));
      show();
    });
    clear.addEventListener("click", () => {
      this.#sample(name, undefined);
      show();
      input.focus();
    });
    show();
    this.shows.push(show);
    return h("div", { class: "setting" }, h("div", { class: "row" }, h("label", { for: id }, label), clear, told), input);
  }

  #number({ name, kind, least, greatest, values }, id) {
    const max = Math.min(greatest, Number.MAX_SAFE_INTEGER);
    const min = Math.max(least, Number.MIN_SAFE_INTEGER);
    const input = h("input", { id, name, type: "number", min, max, step: kind === "whole" ? 1 : "any", value: this.all.sampling[name] ?? "", inputmode: kind === "whole" && min >= 0 ? "numeric" : null });
    const problem = h("p", { class: "problem", id: `${id}-problem`, role: "status" });
    input.setAttribute("aria-describedby", problem.id);
    const show = () => (input.placeholder = this.defaults[name] ?? HINTS[name] ?? "");
    input.addEventListener("input", () => {
      const isValid = input.validity.valid;
      problem.textContent = isValid ? "" : `Values: ${values.replaceAll("`", "")}.`;
      input.setAttribute("aria-invalid", String(!isValid));
      this.#sample(name, isValid && input.value !== "" ? Number(input.value) : undefined);
    });
    show();
    this.shows.push(show);
    return h("div", { class: "setting" }, h("div", { class: "inline" }, h("label", { for: id }, labelOf(name)), input), problem);
  }

  #list({ name }, id) {
    const own = this.all.sampling[name];
    const input = h("textarea", { id, name, rows: 2, class: "code-field", spellcheck: "false", placeholder: "one a line", value: (own ?? []).map(escaped).join("\n") });
    input.addEventListener("input", () => {
      const lines = input.value.split("\n").filter(Boolean).map(unescaped);
      this.#sample(name, lines.length ? lines : undefined);
    });
    return h("div", { class: "setting" }, h("label", { for: id }, `${labelOf(name)}, one a line`), input);
  }

  #switch({ name }, id) {
    const input = h("input", { id, name, type: "checkbox", checked: Boolean(this.all.sampling[name]) });
    input.addEventListener("change", () => this.#sample(name, input.checked || undefined));
    return h("div", { class: "setting" }, h("div", { class: "inline" }, h("label", { for: id }, labelOf(name)), input));
  }

  // --- texts ------------------------------------------------------------------------------------------------------------

  #text({ name, label, rows, placeholder, code }) {
    const id = `setting-${name}`;
    const input = h("textarea", { id, name, rows, placeholder, class: code ? "code-field" : null, value: this.all[name] });
    input.setAttribute("spellcheck", code ? "false" : "true");
    const problem = h("p", { class: "problem", id: `${id}-problem`, role: "status" });
    input.setAttribute("aria-describedby", problem.id);
    const check = () => {
      problem.textContent = code ? problemOf(input.value) : "";
      input.setAttribute("aria-invalid", String(Boolean(problem.textContent)));
    };
    input.addEventListener("input", () => {
      this.set(name, input.value);
      check();
    });
    check();
    return h("div", { class: "setting" }, h("label", { for: id }, label), input, problem);
  }
}

function labelOf(name) {
  const words = name.replaceAll("_", " ");
  return LABELS[name] ?? `${words.charAt(0).toUpperCase()}${words.slice(1)}`;
}

// Line feeds and tabs within a text that has a line of its own.
const escaped = (text) => text.replaceAll("\\", "\\\\").replaceAll("\n", "\\n").replaceAll("\t", "\\t");
const unescaped = (text) => text.replace(/\\([\\nt])/g, (_, letter) => ({ "\\": "\\", n: "\n", t: "\t" })[letter]);

function problemOf(text) {
  try {
    if (text.trim()) JSON.parse(text);
    return "";
  } catch (error) {
    return `Not JSON yet: ${error.message}`;
  }
}
