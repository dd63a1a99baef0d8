// The chat: conversations, questions, and answers while they arrive.

import { ApiError, listModels, streamChat } from "./api.js";
import { Attachments, lost, thumbnail } from "./attachments.js";
import { copyButton, h, icon, ICONS, say } from "./dom.js";
import { ImageError, KeptImages } from "./images.js";
import { render } from "./markdown.js";
import { CHATS, loadChats, saveChats } from "./store.js";

const TITLE_CHARS = 60;
const MODELS_EVERY_MS = 15000;
// A stream that is silent for longer has most likely lost its worker, or waits for one.
const STALLED_MS = 4000;
const $ = (id) => document.getElementById(id);

/**
 * What goes to the gateway for a question. `urls` are those of the images, by id. Throws a SyntaxError that names the
 * setting that is not JSON, or an ImageError that names the image that has no URL.
 */
export function requestOf(settings, messages, urls = new Map()) {
  const body = { model: settings.model || undefined, messages: [] };
  if (settings.system.trim()) body.messages.push({ role: "system", content: settings.system });
  body.messages.push(...messages.filter((_, i) => !isUnanswered(messages, i)).flatMap((message) => turns(message, urls)));
  for (const name of ["temperature", "top_p", "max_tokens", "seed"]) {
    if (settings[name] !== "") body[name] = Number(settings[name]);
  }
  const schema = parsed(settings.schema, "JSON schema");
  if (schema) body.response_format = { type: "json_schema", json_schema: { name: "answer", strict: true, schema } };
  body.tools = parsed(settings.tools, "Tools");
  return body;
}

function parsed(text, name) {
  if (!text.trim()) return undefined;
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new SyntaxError(`${name}: ${error.message}`);
  }
}

/** Whether a message is a question that got no answer at all, or the empty answer to it: neither is part of the talk. */
function isUnanswered(messages, i) {
  const answer = messages[i].role === "user" ? messages[i + 1] : messages[i];
  return answer?.role === "assistant" && !answer.content && !answer.calls?.length;
}

/** The turns of the protocol that a kept message stands for: an answer with calls is followed by their results. */
function turns(message, urls) {
  if (message.role === "user") return [{ role: "user", content: contentOf(message, urls) }];
  const calls = message.calls ?? [];
  const turn = { role: "assistant", content: message.content };
  if (calls.length) {
    turn.tool_calls = calls.map(({ id, name, args }) => ({ id, type: "function", function: { name, arguments: args } }));
  }
  return [turn, ...calls.map(({ id, result }) => ({ role: "tool", tool_call_id: id, content: result ?? "" }))];
}

function contentOf({ content, images }, urls) {
  if (!images?.length) return content;
  const parts = images.map((about) => {
    const url = urls.get(about.id);
    if (!url) throw new ImageError(lost(about));
    return { type: "image_url", image_url: { url } };
  });
  return content ? [...parts, { type: "text", text: content }] : parts;
}

/** Enter a chunk into the message. Returns whether it showed anything. */
export function takeChunk(message, chunk) {
  if (chunk.usage) message.usage = chunk.usage;
  const choice = chunk.choices[0];
  if (!choice) return false;
  const { content, reasoning_content: reasoning, tool_calls: calls } = choice.delta;
  if (content) message.content += content;
  if (reasoning) message.reasoning = (message.reasoning ?? "") + reasoning;
  for (const delta of calls ?? []) {
    message.calls ??= [];
    const call = (message.calls[delta.index] ??= { id: "", name: "", args: "" });
    call.id ||= delta.id ?? "";
    call.name ||= delta.function?.name ?? "";
    call.args += delta.function?.arguments ?? "";
  }
  if (choice.finish_reason) message.finish = choice.finish_reason;
  return Boolean(content || reasoning || calls?.length);
}

/** The figures of an answer, as short texts. */
export function figuresOf(message) {
  const figures = [];
  const { usage, ttftMs, decodeMs } = message;
  if (ttftMs !== undefined) figures.push([ttftMs < 1000 ? `${Math.round(ttftMs)} ms` : `${(ttftMs / 1000).toFixed(1)} s`, "to the first token"]);
  if (usage) {
    const count = usage.completion_tokens;
    if (count > 1 && decodeMs > 0) figures.push([((count - 1) / (decodeMs / 1000)).toFixed(count > 20 ? 0 : 1), "tokens/s"]);
    figures.push([String(count), count === 1 ? "token" : "tokens"]);
    const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
    const details = usage.completion_tokens_details ?? {};
    const accepted = details.accepted_prediction_tokens ?? 0;
    const drafted = accepted + (details.rejected_prediction_tokens ?? 0);
    if (drafted) figures.push([`${accepted} of ${drafted}`, "draft tokens accepted"]);
    figures.push([`${cached} of ${usage.prompt_tokens}`, "prompt tokens cached"]);
    const ofImages = usage.prompt_tokens_details?.image_tokens ?? 0;
    if (ofImages) figures.push([String(ofImages), "of the prompt for images"]);
    const { disk = 0, peers = 0 } = usage.prompt_tokens_details?.cached_tokens_by_tier ?? {};
    if (disk) figures.push([String(disk), "of these from the disk"]);
    if (peers) figures.push([String(peers), "of these from other workers"]);
  }
  return figures;
}

const ENDINGS = {
  length: "It ended at the limit of tokens.",
  stopped: "You stopped it.",
  content_filter: "It was cut by a filter.",
};

export class Chat {
  constructor(settings) {
    this.settings = settings;
    this.chats = loadChats();
    this.running = new Map();
    this.models = new Map();
    this.kept = new KeptImages();
    this.kept.clean(loadChats);
    this.attachments = new Attachments((count) => this.#whyNoImages(count));
    this.pinned = true;
    this.scroller = $("scroll");
    this.list = $("messages");
    this.prompt = $("prompt");
    this.#wire();
    this.open(this.chats[0] ?? newChat());
    this.#followModels();
  }

  #wire() {
    $("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      if (this.running.has(this.chat.id)) this.stop();
      else this.ask(this.prompt.value);
    });
    this.prompt.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        if (!this.running.has(this.chat.id)) this.ask(this.prompt.value);
      }
    });
    this.prompt.addEventListener("input", () => this.#fit());
    $("new-chat").addEventListener("click", () => this.startNew());
    this.scroller.addEventListener("scroll", () => {
      const { scrollTop, scrollHeight, clientHeight } = this.scroller;
      this.pinned = scrollHeight - scrollTop - clientHeight < 48;
      $("to-end").hidden = this.pinned;
    });
    $("to-end").addEventListener("click", () => this.#toEnd(true));
    addEventListener("pagehide", () => this.running.forEach((aborting) => aborting.abort()));
    addEventListener("storage", (event) => event.key === CHATS && this.#takeOver());
    $("model").addEventListener("change", (event) => {
      this.settings.set("model", event.target.value);
      this.#offerImages();
    });
  }

  // --- conversations ------------------------------------------------------------------------------------------------

  startNew() {
    this.open(newChat());
    const focus = () => this.prompt.focus();
    if (location.hash === "#fleet") addEventListener("hashchange", focus, { once: true }); // it is hidden until then
    location.hash = "#chat";
    focus();
  }

  open(chat) {
    this.chat = chat;
    this.views = [];
    this.attachments.forgetProblem();
    this.list.replaceChildren();
    if (!chat.messages.length) this.list.append(this.#welcome());
    for (const message of chat.messages) this.#show(message);
    this.#changed();
    this.#toEnd(true);
  }

  /** Another tab has kept conversations: have them here too, but for those that are open or being answered here. */
  #takeOver() {
    const own = this.chats.filter((one) => one === this.chat || this.running.has(one.id));
    const others = loadChats().filter((one) => !own.some(({ id }) => id === one.id));
    this.chats = [...own, ...others];
    this.#listChats();
  }

  #remove(chat) {
    this.running.get(chat.id)?.abort();
    this.chats = this.chats.filter((one) => one !== chat);
    saveChats(this.chats);
    this.kept.clean(loadChats);
    if (chat === this.chat) this.open(this.chats[0] ?? newChat());
    else this.#listChats();
  }

  #keep(chat) {
    this.chats = [chat, ...this.chats.filter((one) => one !== chat)];
    saveChats(this.chats);
  }

  #listChats() {
    $("chats").replaceChildren(
      ...this.chats.map((chat) =>
        h(
          "li",
          { class: this.running.has(chat.id) ? "busy" : null },
          h("a", { href: "#chat", "aria-current": chat === this.chat ? "true" : null, onclick: () => this.open(chat) }, titleOf(chat)),
          h("button", { type: "button", class: "quiet", "aria-label": `Delete “${titleOf(chat)}”`, title: "Delete", onclick: () => this.#remove(chat) }, icon(ICONS.remove)),
        ),
      ),
    );
  }

  #welcome() {
    const suggestions = ["What is the capital of France?", "Explain how a water mill works.", "Write a short poem about rain."];
    return h(
      "div",
      { class: "welcome" },
      h("h1", null, "What shall we talk about?"),
      h("p", null, "Conversations stay in this browser."),
      h("ul", null, suggestions.map((text) => h("li", null, h("button", { type: "button", class: "button", onclick: () => this.ask(text) }, text)))),
    );
  }

  // --- asking -------------------------------------------------------------------------------------------------------

  async ask(text) {
    await this.attachments.reading;
    const isEmpty = !text.trim() && !this.attachments.images.length;
    if (isEmpty || this.running.has(this.chat.id) || this.attachments.refuse()) return;
    if (!this.chat.messages.length) this.list.replaceChildren();
    const message = { role: "user", content: text.trim() };
    const images = this.attachments.take();
    if (images.length) message.images = images.map(({ about }) => about);
    this.chat.messages.push(message);
    this.#keep(this.chat); // before its images: other tabs remove those that no conversation has
    for (const { about, blob } of images) this.kept.add(about.id, blob);
    this.#show(message);
    this.prompt.value = "";
    this.#fit();
    this.#answer({ role: "assistant", content: "" });
  }

  /** Have an answer written into a new message, or on behind what there is of the last one. */
  async #answer(message, { onward = false } = {}) {
    const chat = this.chat;
    const asked = [...chat.messages];
    const more = onward ? { add_generation_prompt: false, continue_final_message: true } : {};
    if (!onward) {
      chat.messages.push(message);
      this.#show(message);
    }
    this.#keep(chat);
    this.#toEnd(true);
    await this.#stream(chat, message, asked, more);
    this.#redraw(chat, message, true);
    this.#keep(chat);
    this.#changed();
    if (chat === this.chat) say($("announce"), message.error ?? `Answer: ${message.content.slice(0, 400)}`);
  }

  async #stream(chat, message, asked, more) {
    const aborting = new AbortController();
    this.running.set(chat.id, aborting);
    for (const name of ["error", "finish", "usage"]) delete message[name];
    this.#changed();
    this.#redraw(chat, message);
    const begun = performance.now();
    let first;
    let last = begun;
    const watching = setInterval(() => {
      this.stalledMs = performance.now() - last;
      if (this.stalledMs >= STALLED_MS) this.#redraw(chat, message);
    }, 1000);
    try {
      const body = { ...requestOf(this.settings.all, asked, await this.kept.urlsOf(asked)), ...more };
      for await (const chunk of streamChat(body, aborting.signal)) {
        message.model = chunk.model;
        if (!takeChunk(message, chunk)) continue;
        const now = performance.now();
        first ??= now;
        last = now;
        this.stalledMs = 0;
        message.ttftMs = first - begun;
        message.decodeMs = now - first;
        this.#redraw(chat, message);
      }
    } catch (error) {
      if (error.name === "AbortError") message.finish = "stopped";
      else if (error instanceof ApiError) message.error = refusalText(error);
      else if (error instanceof SyntaxError || error instanceof ImageError) message.error = error.message;
      else throw error;
    } finally {
      clearInterval(watching);
      this.stalledMs = 0;
      this.running.delete(chat.id);
    }
  }

  stop() {
    this.running.get(this.chat.id)?.abort();
  }

  /** Ask again for the answer that is last. */
  #again(message) {
    if (this.running.has(this.chat.id)) return;
    this.#cut(message);
    this.#answer({ role: "assistant", content: "" });
  }

  /** Take a question back into the field, with all that followed it removed. */
  #edit(message) {
    if (this.running.has(this.chat.id)) return;
    this.#cut(message);
    this.prompt.value = message.content;
    this.attachments.takeBack(message.images ?? [], this.kept);
    this.#fit();
    this.prompt.focus();
    saveChats(this.chats);
    if (!this.chat.messages.length) this.open(this.chat);
  }

  #cut(message) {
    const position = this.chat.messages.indexOf(message);
    this.chat.messages.splice(position);
    for (const view of this.views.splice(position)) view.element.remove();
  }

  // --- showing ------------------------------------------------------------------------------------------------------

  #show(message) {
    const view = message.role === "user" ? this.#question(message) : this.#answerView(message);
    this.views.push(view);
    this.list.append(view.element);
    view.draw(true);
  }

  #question(message) {
    const actions = h(
      "div",
      { class: "actions" },
      h("button", { type: "button", class: "quiet", "aria-label": "Edit and ask again", title: "Edit and ask again", onclick: () => this.#edit(message) }, icon(ICONS.edit)),
      copyButton(() => message.content),
    );
    const images = message.images?.length && h("div", { class: "sent-images" }, message.images.map(thumbnail));
    const bubble = message.content && h("div", { class: "bubble" }, message.content);
    const element = h("article", { class: "message question", "aria-label": "You" }, images || null, bubble || null, actions);
    return { message, element, draw: () => {} };
  }

  #answerView(message) {
    const thought = h("div", { class: "prose thought" });
    const reasoning = h("details", { class: "reasoning", hidden: true }, h("summary", null, "Reasoning"), thought);
    const text = h("div", { class: "prose" });
    const calls = h("div", { class: "calls" });
    const stall = h("p", { class: "stall", role: "status", hidden: true });
    const ending = h("p", { class: "ending", hidden: true });
    const figures = h("dl", { class: "figures" });
    const again = h("button", { type: "button", class: "quiet only-last", "aria-label": "Answer again", title: "Answer again", onclick: () => this.#again(message) }, icon(ICONS.again));
    const onward = h("button", { type: "button", class: "quiet only-last", "aria-label": "Continue this answer", title: "Continue", onclick: () => this.#answer(message, { onward: true }) }, icon(ICONS.onward));
    const meta = h("div", { class: "meta" }, figures, h("div", { class: "actions" }, copyButton(() => message.content), again, onward));
    const element = h("article", { class: "message answer", "aria-label": "Answer" }, reasoning, text, calls, stall, ending, meta);
    const draw = () => {
      const busy = this.running.has(this.chat.id) && this.chat.messages.at(-1) === message;
      element.classList.toggle("busy", busy);
      element.classList.toggle("waiting", busy && !message.content && !message.reasoning && !message.calls);
      reasoning.hidden = !message.reasoning;
      if (message.reasoning) render(thought, message.reasoning);
      render(text, message.content);
      this.#drawCalls(calls, message, busy);
      stall.hidden = !busy || !(this.stalledMs >= STALLED_MS);
      say(stall, stall.hidden ? "" : stallText(message, this.stalledMs));
      ending.hidden = busy || !(message.error || ENDINGS[message.finish]);
      ending.classList.toggle("error", Boolean(message.error));
      say(ending, message.error ?? ENDINGS[message.finish] ?? "");
      meta.hidden = busy;
      onward.hidden = !["length", "stopped"].includes(message.finish) || !message.content || Boolean(message.calls || message.reasoning);
      figures.replaceChildren(...figuresOf(message).map(([value, name]) => h("div", null, h("dd", null, value), h("dt", null, name))));
    };
    return { message, element, draw };
  }

  #drawCalls(container, message, busy) {
    (message.calls ?? []).forEach((call, i) => {
      const old = container.children[i];
      const args = pretty(call.args);
      if (old?.args === args && old.final === !busy) return;
      const result = h("textarea", { rows: "2", "aria-label": `Result of ${call.name}`, placeholder: "Result, to be sent back", value: call.result ?? "" });
      result.addEventListener("input", () => (call.result = result.value));
      const fresh = h(
        "section",
        { class: "call" },
        h("h4", null, h("span", null, "calls"), h("code", null, call.name)),
        h("pre", { tabindex: "0" }, args),
        !busy && result,
        !busy && i === message.calls.length - 1 && h("button", { type: "button", class: "button only-last", onclick: () => this.#sendResults(message) }, "Send back"),
      );
      Object.assign(fresh, { args, final: !busy });
      if (old) old.replaceWith(fresh);
      else container.append(fresh);
    });
  }

  #sendResults(message) {
    if (this.running.has(this.chat.id) || this.chat.messages.at(-1) !== message) return;
    this.#answer({ role: "assistant", content: "" });
  }

  /** Draw an answer at the next frame: tokens may come faster than frames. */
  #redraw(chat, message, now = false) {
    if (chat !== this.chat) return;
    const draw = () => {
      this.frame = undefined;
      this.views.find((one) => one.message === message)?.draw();
      this.#toEnd(false);
    };
    if (now) {
      cancelAnimationFrame(this.frame);
      this.frame = undefined;
      for (const view of this.views.slice(-3)) view.draw();
      this.#toEnd(false);
    } else {
      this.frame ??= requestAnimationFrame(draw);
    }
  }

  #changed() {
    const busy = this.running.has(this.chat.id);
    $("composer").classList.toggle("busy", busy);
    $("send").setAttribute("aria-label", busy ? "Stop" : "Send");
    this.#listChats();
  }

  #toEnd(force) {
    if (force) this.pinned = true;
    if (this.pinned) this.scroller.scrollTop = this.scroller.scrollHeight;
  }

  #fit() {
    this.prompt.style.height = "auto";
    this.prompt.style.height = `${Math.min(this.prompt.scrollHeight, 220)}px`;
  }

  // --- models -------------------------------------------------------------------------------------------------------

  async #followModels() {
    for (;;) {
      if (!document.hidden) await this.refreshModels();
      await new Promise((resolve) => setTimeout(resolve, MODELS_EVERY_MS));
    }
  }

  /** Ask which models there are and offer them. */
  async refreshModels() {
    try {
      this.models = await listModels();
    } catch {
      return; // the list stays; the fleet's line at the side says what is wrong
    }
    const names = [...this.models.keys()];
    const select = $("model");
    const wanted = this.settings.all.model;
    if (wanted && !names.includes(wanted)) names.push(wanted);
    const shown = [...select.options].map((option) => option.value);
    if (shown.join("\n") !== names.join("\n")) select.replaceChildren(...names.map((name) => h("option", { value: name }, name)));
    if (!wanted && names.length) this.settings.set("model", names[0]);
    select.value = this.settings.all.model;
    this.#offerImages();
  }

  #offerImages() {
    $("attach").hidden = !this.models.get(this.settings.all.model)?.images;
  }

  /** Why the next question may not have so many images, in a sentence; "" if it may. */
  #whyNoImages(count) {
    const name = this.settings.all.model;
    const model = this.models.get(name);
    if (!model?.isKnown) return `Whether ${name || "the model"} reads images is not known yet: it is not loaded.`;
    if (!model.images) {
      const [other] = [...this.models].find(([, { images }]) => images) ?? [];
      return other ? `${name} reads text only; ${other} reads images.` : `${name} reads text only.`;
    }
    const answered = this.chat.messages.filter((_, i, all) => !isUnanswered(all, i));
    const sent = answered.reduce((sum, { images }) => sum + (images?.length ?? 0), 0);
    if (sent + count > model.images.max_images) return `${name} reads at most ${model.images.max_images} images in a conversation.`;
    return "";
  }

  /** Let the settings show the defaults of the chosen model. */
  takeDefaults(models) {
    const chosen = models.find(({ id }) => id === this.settings.all.model) ?? models[0];
    if (chosen) this.settings.useDefaults(chosen.sampling);
  }
}

/** What to say of an answer that has been silent for a while. */
export function stallText(message, stalledMs) {
  const seconds = Math.round(stalledMs / 1000);
  if (!message.content && !message.reasoning && !message.calls) return `Waiting for the first token, ${seconds} s so far.`;
  return `Nothing has come for ${seconds} s. The gateway is reconnecting to a worker; the answer goes on from here.`;
}

function newChat() {
  return { id: crypto.randomUUID?.() ?? `${Date.now()}-${Math.random()}`, messages: [] };
}

function titleOf(chat) {
  const first = chat.messages[0];
  const text = first?.content || first?.images?.[0].name || "";
  return text.length > TITLE_CHARS ? `${text.slice(0, TITLE_CHARS)}…` : text;
}

function pretty(args) {
  try {
    return JSON.stringify(JSON.parse(args), null, 2);
  } catch {
    return args;
  }
}

/** An error as one sentence, with the time to come back if there is one. */
export function refusalText(error) {
  const said = error.message.trim().replace(/[;,]?\s*(please )?(try|come) (it )?again[^.;]*\.?$/i, "").replace(/[.;\s]+$/, "");
  const sentence = `${said.charAt(0).toUpperCase()}${said.slice(1)}`;
  return error.retryAfterS ? `${sentence}; try again in ${error.retryAfterS} s.` : `${sentence}.`;
}
