// The models: which there are, in which state, and which are chosen.

import { listModels } from "./api.js";
import { h, say } from "./dom.js";

const EVERY_MS = 15000;
const EVERY_CHANGING_MS = 2000;
const STATES = { unloaded: "not loaded", loading: "loading", unloading: "being unloaded", failed: "failed", gone: "not there" };
const GONE = { state: "gone" };
const $ = (id) => document.getElementById(id);

/** What to say of a model that cannot answer at once; "" if it can. */
export function stateText(name, { state, problem } = {}) {
  if (state === "unloaded" || state === "unloading") return `${name} is not loaded; the first question loads it.`;
  if (state === "loading") return `${name} is being loaded; a question waits for it.`;
  if (state === "failed") return `${name} could not be loaded${problem ? `: ${problem.replace(/\.$/, "")}` : ""}; choose another model, or see the server’s log.`;
  if (state === "gone") return `${name} is not there any more; choose another model.`;
  return "";
}

export class ModelPicker {
  /** `changed` is called when the choice, or what is known of the models, is another. */
  constructor(settings, changed) {
    this.settings = settings;
    this.changed = changed;
    this.models = new Map();
    this.select = $("model");
    this.select.addEventListener("change", () => this.#choose("model", this.select.value));
    $("beside").addEventListener("change", () => this.#choose("beside", $("beside").value));
    $("stop-comparing").addEventListener("click", () => {
      this.#choose("beside", "");
      $("prompt").focus();
    });
    this.#follow();
  }

  /** The chosen model, if it is known. */
  get chosen() {
    return this.models.get(this.settings.all.model);
  }

  #choose(setting, name) {
    this.settings.set(setting, name);
    this.#show();
    this.changed();
  }

  async #follow() {
    for (;;) {
      if (!document.hidden) await this.refresh();
      const isChanging = [...this.models.values()].some(({ state }) => state === "loading" || state === "unloading");
      await new Promise((resolve) => setTimeout(resolve, isChanging ? EVERY_CHANGING_MS : EVERY_MS));
    }
  }

  /** Ask which models there are and offer them. */
  async refresh() {
    try {
      this.models = await listModels();
    } catch {
      return; // the list stays; the fleet's line at the side says what is wrong
    }
    const [first] = this.models.keys();
    if (!this.settings.all.model && first) this.settings.set("model", first);
    this.#show();
    this.changed();
  }

  #show() {
    const { model, beside } = this.settings.all;
    fill(this.select, this.#options(model), model);
    fill($("beside"), [["", "no second model"], ...this.#options(beside)], beside);
    this.select.dataset.state = this.chosen?.state ?? "unknown";
    const known = (name) => this.models.get(name) ?? (name && this.models.size ? GONE : undefined);
    const notes = [stateText(model, known(model)), beside === model ? "" : stateText(beside, known(beside))];
    say($("model-note"), notes.filter(Boolean).join(" "));
    $("comparing").hidden = !beside;
    say($("comparing-with"), beside ? `Each question also goes to ${beside}.` : "");
  }

  #options(chosen) {
    const names = [...this.models.keys()];
    if (chosen && !names.includes(chosen)) names.push(chosen);
    return names.map((name) => {
      const state = STATES[(this.models.get(name) ?? GONE).state];
      return [name, state ? `${name} (${state})` : name];
    });
  }
}

function fill(select, options, value) {
  const shape = JSON.stringify(options);
  if (select.dataset.shape !== shape) {
    select.dataset.shape = shape;
    select.replaceChildren(...options.map(([name, text]) => h("option", { value: name }, text)));
  }
  select.value = value;
}
