// The settings of questions, and their panel.

import { h } from "./dom.js";
import { loadSettings, NO_SETTINGS, saveSettings } from "./store.js";

const FIELDS = [
  { name: "system", label: "System prompt", kind: "text", rows: 4, placeholder: "How the model is to behave" },
  { name: "temperature", label: "Temperature", kind: "range", min: 0, max: 2, step: 0.05 },
  { name: "top_p", label: "Top p", kind: "range", min: 0.05, max: 1, step: 0.05 },
  { name: "max_tokens", label: "Most tokens", kind: "number", min: 1, placeholder: "as many as fit" },
  { name: "seed", label: "Seed", kind: "number", placeholder: "random" },
  { name: "schema", label: "JSON schema of the answer", kind: "text", rows: 3, code: true, placeholder: '{"type": "object", …}' },
  { name: "tools", label: "Tools", kind: "text", rows: 3, code: true, placeholder: '[{"type": "function", "function": {"name": …}}]' },
];

export class Settings {
  constructor(panel) {
    this.all = loadSettings();
    this.panel = panel;
    this.defaults = { temperature: 1, top_p: 1 };
    this.#build();
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

  #build() {
    this.shows = [];
    const reset = () => {
      this.all = { ...NO_SETTINGS, model: this.all.model };
      saveSettings(this.all);
      this.#build();
      this.panel.querySelector("textarea").focus();
    };
    this.panel.replaceChildren(
      h("h2", null, "Settings"),
      h("p", { class: "lead" }, "Left empty, the model’s own defaults apply."),
      ...FIELDS.map((field) => (field.kind === "range" ? this.#range(field) : field.kind === "number" ? this.#number(field) : this.#text(field))),
      h("button", { type: "button", class: "button", onclick: reset }, "Back to the defaults"),
    );
  }

  #range({ name, label, min, max, step }) {
    const id = `setting-${name}`;
    const told = h("output", { for: id });
    const input = h("input", { id, name, type: "range", min, max, step });
    const clear = h("button", { type: "button", class: "link" }, "default");
    clear.setAttribute("aria-label", `${label}: back to the default`);
    const show = () => {
      const isSet = this.all[name] !== "";
      const value = Number(isSet ? this.all[name] : this.defaults[name]).toFixed(2);
      input.value = value;
      input.classList.toggle("unset", !isSet);
      input.setAttribute("aria-valuetext", isSet ? value : `${value}, the model’s default`);
      told.value = isSet ? value : `${value} (default)`;
      clear.hidden = !isSet;
    };
    input.addEventListener("input", () => {
      this.set(name, input.value);
      show();
    });
    clear.addEventListener("click", () => {
      this.set(name, "");
      show();
      input.focus();
    });
    show();
    this.shows.push(show);
    return h("div", { class: "setting" }, h("div", { class: "row" }, h("label", { for: id }, label), clear, told), input);
  }

  #number({ name, label, min, placeholder }) {
    const id = `setting-${name}`;
    const input = h("input", { id, name, type: "number", min, step: 1, placeholder, value: this.all[name], inputmode: "numeric" });
    input.addEventListener("input", () => {
      if (input.validity.valid) this.set(name, input.value);
    });
    return h("div", { class: "setting inline" }, h("label", { for: id }, label), input);
  }

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

function problemOf(text) {
  try {
    if (text.trim()) JSON.parse(text);
    return "";
  } catch (error) {
    return `Not JSON yet: ${error.message}`;
  }
}
