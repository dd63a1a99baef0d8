// The chat: conversations, questions, and answers while they arrive.

import { ApiError, streamChat } from "./api.js";
import { Attachments, chip, thumbnail } from "./attachments.js";
import { ChatList } from "./chatlist.js";
import { copyButton, h, icon, ICONS, say } from "./dom.js";
import { ImageError, KeptImages } from "./images.js";
import { render } from "./markdown.js";
import { ModelPicker } from "./models.js";
import { CHATS, loadChats, saveChats } from "./store.js";
import { branch, everyMessage, figuresOf, isUnanswered, newChat, refusalText, requestOf, stallText, takeChunk, turnTo, versionOf } from "./talk.js";

// A stream that is silent for longer has most likely lost its worker, or waits for one.
const STALLED_MS = 4000;
const ENDINGS = {
  length: "It ended at the limit of tokens.",
  stopped: "You stopped it.",
  content_filter: "It was cut by a filter.",
};
const SUGGESTIONS = ["What is the capital of France?", "Explain how a water mill works.", "Write a short poem about rain."];
const $ = (id) => document.getElementById(id);
const keptMessages = () => loadChats().flatMap((chat) => everyMessage(chat.messages));

/** The model of an answer: as it was asked for, and which one answered, if that is another one. */
function nameOf({ asked = "", model = "" }) {
  return asked && model && asked !== model ? `${asked} (${model})` : asked || model;
}

export class Chat {
  constructor(settings) {
    this.settings = settings;
    this.chats = loadChats();
    /** What is being answered, by conversation: how to stop it, and the answers that are not complete. */
    this.running = new Map();
    this.stalls = new Map();
    this.kept = new KeptImages();
    this.kept.clean(keptMessages);
    this.attachments = new Attachments((count) => this.#whyNoImages(count));
    this.list = new ChatList({
      open: (chat) => this.open(chat),
      remove: (chat) => this.#remove(chat),
      rename: (chat, title) => this.#rename(chat, title),
      urlsOf: (chats) => this.kept.urlsOf(chats.flatMap((chat) => everyMessage(chat.messages))),
      add: (chats, images) => this.#add(chats, images),
    });
    this.pinned = true;
    this.scroller = $("scroll");
    this.messages = $("messages");
    this.prompt = $("prompt");
    this.#wire();
    this.open(this.chats[0] ?? newChat());
    this.picker = new ModelPicker(settings, () => {});
  }

  #wire() {
    $("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      if (this.#isRunning) this.stop();
      else this.ask(this.prompt.value);
    });
    this.prompt.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        if (!this.#isRunning) this.ask(this.prompt.value);
      }
    });
    this.prompt.addEventListener("input", () => this.#fit());
    $("new-chat").addEventListener("click", () => this.startNew());
    $("stop-editing").addEventListener("click", () => {
      this.#endEditing();
      this.prompt.focus();
    });
    this.scroller.addEventListener("scroll", () => {
      const { scrollTop, scrollHeight, clientHeight } = this.scroller;
      this.pinned = scrollHeight - scrollTop - clientHeight < 48;
      $("to-end").hidden = this.pinned;
    });
    $("to-end").addEventListener("click", () => this.#toEnd(true));
    addEventListener("pagehide", () => this.running.forEach(({ aborting }) => aborting.abort()));
    addEventListener("storage", (event) => event.key === CHATS && this.#takeOver());
  }

  get #isRunning() {
    return this.running.has(this.chat.id);
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
    if (this.editing) this.#endEditing();
    this.chat = chat;
    this.views = [];
    this.attachments.forgetProblem();
    this.#drawFrom(0);
    this.#changed();
    this.#toEnd(true);
  }

  /** Another tab has kept conversations: have them here too, but for those that are open or being answered here. */
  #takeOver() {
    const own = this.chats.filter((one) => one === this.chat || this.running.has(one.id));
    const others = loadChats().filter((one) => !own.some(({ id }) => id === one.id));
    this.chats = [...own, ...others];
    this.#changed();
  }

  #remove(chat) {
    this.running.get(chat.id)?.aborting.abort();
    this.chats = this.chats.filter((one) => one !== chat);
    saveChats(this.chats);
    this.kept.clean(keptMessages);
    if (chat === this.chat) this.open(this.chats[0] ?? newChat());
    else this.#changed();
  }

  #rename(chat, title) {
    if (title) chat.title = title;
    else delete chat.title;
    saveChats(this.chats);
    this.#changed();
  }

  async #add(chats, images) {
    this.chats = [...this.chats, ...chats];
    saveChats(this.chats); // before the images: other tabs remove those that no conversation has
    for (const [id, url] of images) await this.kept.addUrl(id, url);
    this.#changed();
  }

  #keep(chat) {
    this.chats = [chat, ...this.chats.filter((one) => one !== chat)];
    saveChats(this.chats);
  }

  #welcome() {
    return h(
      "div",
      { class: "welcome" },
      h("h2", null, "What shall we talk about?"),
      h("p", null, "Conversations stay in this browser."),
      h("ul", null, SUGGESTIONS.map((text) => h("li", null, h("button", { type: "button", class: "button", onclick: () => this.ask(text) }, text)))),
    );
  }

  // --- asking -------------------------------------------------------------------------------------------------------

  async ask(text) {
    await this.attachments.reading;
    const isEmpty = !text.trim() && this.attachments.isEmpty;
    if (isEmpty || this.#isRunning || this.attachments.refuse()) return;
    const { chat } = this;
    const { images, texts } = this.attachments.take();
    const message = { role: "user", content: text.trim() };
    if (images.length) message.images = images.map(({ about }) => about);
    if (texts.length) message.files = texts;
    const answer = this.#newAnswer();
    const at = this.#askedAt;
    branch(chat.messages, at, [message, answer]);
    this.#keep(chat); // before its images: other tabs remove those that no conversation has
    for (const { about, blob } of images) this.kept.add(about.id, blob);
    this.#endEditing();
    this.#drawFrom(at);
    this.#respond(answer);
  }

  /** The position of the next question: that of the one that is edited, or behind all. */
  get #askedAt() {
    return this.editing ? this.chat.messages.indexOf(this.editing) : this.chat.messages.length;
  }

  #newAnswer() {
    const fresh = () => ({ role: "assistant", content: "" });
    return this.settings.all.beside ? { ...fresh(), beside: fresh() } : fresh();
  }

  /** Have an answer written, by both models if there are two; or written on, behind what there is of `onward`. */
  async #respond(message, onward) {
    const { chat } = this;
    const position = chat.messages.indexOf(message);
    const asked = chat.messages.slice(0, onward ? position + 1 : position);
    const sides = onward ? [onward] : [message, message.beside].filter(Boolean);
    const run = { aborting: new AbortController(), busy: new Set(sides) };
    this.running.set(chat.id, run);
    this.#keep(chat);
    this.#changed();
    this.#toEnd(true);
    try {
      await Promise.all(
        sides.map(async (side) => {
          await this.#stream(chat, side, { asked, isBeside: side !== message, isOnward: Boolean(onward), run });
          run.busy.delete(side);
          this.#redraw(chat, true);
        }),
      );
    } finally {
      this.running.delete(chat.id);
    }
    this.#redraw(chat, true);
    this.#keep(chat);
    this.#changed();
    if (chat === this.chat) say($("announce"), sides.map((side) => side.error ?? `Answer: ${side.content.slice(0, 400)}`).join(" "));
  }

  async #stream(chat, side, { asked, isBeside, isOnward, run }) {
    for (const name of ["error", "finish", "usage"]) delete side[name];
    this.#redraw(chat);
    const begun = performance.now();
    let first;
    let last = begun;
    const watching = setInterval(() => {
      this.stalls.set(side, performance.now() - last);
      if (this.stalls.get(side) >= STALLED_MS) this.#redraw(chat);
    }, 1000);
    try {
      const body = requestOf(this.settings.all, asked, await this.kept.urlsOf(asked), isBeside);
      if (isOnward) Object.assign(body, { add_generation_prompt: false, continue_final_message: true });
      if (isOnward && isBeside) body.model = side.asked;
      side.asked = body.model;
      for await (const chunk of streamChat(body, run.aborting.signal)) {
        side.model = chunk.model;
        if (!takeChunk(side, chunk)) continue;
        const now = performance.now();
        first ??= now;
        last = now;
        this.stalls.delete(side);
        side.ttftMs = first - begun;
        side.decodeMs = now - first;
        this.#redraw(chat);
      }
    } catch (error) {
      if (error.name === "AbortError") side.finish = "stopped";
      else if (error instanceof ApiError) side.error = refusalText(error);
      else if (error instanceof SyntaxError || error instanceof ImageError) side.error = error.message;
      else throw error;
    } finally {
      clearInterval(watching);
      this.stalls.delete(side);
    }
  }

  stop() {
    this.running.get(this.chat.id)?.aborting.abort();
  }

  /** What Escape does: stop the answer, or leave the editing of a question. */
  escape() {
    if (this.#isRunning) this.stop();
    else if (this.editing) this.#endEditing();
  }

  /** Ask again for an answer; the one that there is stays as another version. */
  #again(message) {
    if (this.#isRunning) return;
    const position = this.chat.messages.indexOf(message);
    const answer = this.#newAnswer();
    branch(this.chat.messages, position, [answer]);
    this.#drawFrom(position);
    this.#respond(answer);
  }

  /** Take a question into the field. What is sent then becomes another version of it. */
  #edit(message) {
    if (this.#isRunning) return;
    this.editing = message;
    $("editing").hidden = false;
    for (const view of this.views.slice(this.#askedAt)) view.element.classList.add("replaced");
    this.prompt.value = message.content;
    this.attachments.takeBack(message, this.kept);
    this.#fit();
    this.prompt.focus();
  }

  #endEditing() {
    if (this.editing) this.attachments.takeBack({}, this.kept);
    this.editing = undefined;
    $("editing").hidden = true;
    for (const view of this.views) view.element.classList.remove("replaced");
    this.prompt.value = "";
    this.#fit();
  }

  #turn(message, step) {
    if (this.#isRunning) return;
    if (this.editing) this.#endEditing();
    const position = this.chat.messages.indexOf(message);
    turnTo(this.chat.messages, position, step);
    saveChats(this.chats);
    this.#drawFrom(position);
    const [at, count] = versionOf(this.chat.messages[position]);
    say($("announce"), `Version ${at} of ${count}.`);
    const buttons = [...this.views[position].element.querySelectorAll(".versions button")];
    (buttons[step < 0 ? 0 : 1].disabled ? buttons[step < 0 ? 1 : 0] : buttons[step < 0 ? 0 : 1]).focus();
  }

  /** Go on with one of two answers; the other one is forgotten. */
  #choose(message, side) {
    if (this.#isRunning) return;
    const position = this.chat.messages.indexOf(message);
    const { beside: _, ...chosen } = { ...side, versions: message.versions };
    this.chat.messages[position] = chosen;
    saveChats(this.chats);
    this.#drawFrom(position);
    this.prompt.focus();
  }

  #sendResults(message) {
    if (this.#isRunning || this.chat.messages.at(-1) !== message) return;
    const answer = this.#newAnswer();
    this.chat.messages.push(answer);
    this.#drawFrom(this.chat.messages.length - 1);
    this.#respond(answer);
  }

  // --- showing ------------------------------------------------------------------------------------------------------

  /** Show the messages from a position on anew. */
  #drawFrom(position) {
    for (const view of this.views.splice(position)) view.element.remove();
    if (!position) this.messages.replaceChildren();
    if (!this.chat.messages.length) this.messages.append(this.#welcome());
    for (const message of this.chat.messages.slice(position)) {
      const view = message.role === "user" ? this.#question(message) : this.#answerView(message);
      this.views.push(view);
      this.messages.append(view.element);
      view.draw();
    }
  }

  #question(message) {
    const actions = h(
      "div",
      { class: "actions" },
      this.#versions(message),
      h("button", { type: "button", class: "quiet", "aria-label": "Edit and ask again", title: "Edit and ask again", onclick: () => this.#edit(message) }, icon(ICONS.edit)),
      copyButton(() => message.content),
    );
    const images = message.images?.length && h("div", { class: "sent-images" }, message.images.map(thumbnail));
    const files = message.files?.length && h("div", { class: "sent-files" }, message.files.map((file) => h("details", null, h("summary", null, chip(file)), h("pre", { tabindex: "0" }, file.text))));
    const bubble = message.content && h("div", { class: "bubble" }, message.content);
    const element = h("article", { class: "message question", "aria-label": "You" }, images || null, files || null, bubble || null, actions);
    return { message, element, draw: () => {} };
  }

  /** The buttons that turn to other versions of a message, if there are any. */
  #versions(message) {
    const shown = versionOf(message);
    if (!shown) return null;
    const [at, count] = shown;
    const button = (label, path, step, isOff) => h("button", { type: "button", class: "quiet", "aria-label": label, title: label, disabled: isOff, onclick: () => this.#turn(message, step) }, icon(path));
    return h(
      "div",
      { class: "versions", role: "group", "aria-label": "Versions" },
      button("Version before", ICONS.before, -1, at === 1),
      h("span", null, `${at} / ${count}`),
      button("Version after", ICONS.after, 1, at === count),
    );
  }

  #answerView(message) {
    const sides = [message, message.beside].filter(Boolean);
    const columns = sides.map((side) => this.#column(message, side));
    const isCompared = sides.length > 1;
    const shown = isCompared ? columns.map(({ parts, name }) => h("section", { class: "column" }, name, parts)) : columns[0].parts;
    const element = h("article", { class: isCompared ? "message answer compared" : "message answer", "aria-label": "Answer" }, shown);
    const draw = () => {
      for (const column of columns) column.draw(column.parts[0].parentElement);
      element.classList.toggle("busy", sides.some((side) => this.#isBusy(side)));
    };
    return { message, element, draw };
  }

  #isBusy(side) {
    return Boolean(this.running.get(this.chat.id)?.busy.has(side));
  }

  /** The parts of an answer of one model, and what draws them. */
  #column(message, side) {
    const thought = h("div", { class: "prose thought" });
    const reasoning = h("details", { class: "reasoning", hidden: true }, h("summary", null, "Reasoning"), thought);
    const text = h("div", { class: "prose" });
    const calls = h("div", { class: "calls" });
    const stall = h("p", { class: "stall", role: "status", hidden: true });
    const ending = h("p", { class: "ending", hidden: true });
    const figures = h("ul", { class: "figures", "aria-label": "Figures" });
    const name = h("h2", { class: "of" });
    const button = (label, path, act, isOnlyLast = true) => h("button", { type: "button", class: isOnlyLast ? "quiet only-last" : "quiet", "aria-label": label, title: label, onclick: act }, icon(path));
    const again = side === message && button("Answer again", ICONS.again, () => this.#again(message));
    const onward = button("Continue this answer", ICONS.onward, () => !this.#isRunning && this.#respond(message, side));
    const choose = message.beside && button("Go on with this answer only", ICONS.check, () => this.#choose(message, side), false);
    const actions = h("div", { class: "actions" }, side === message && this.#versions(message), copyButton(() => side.content), choose, again, onward);
    const meta = h("div", { class: "meta" }, figures, actions);
    const draw = (holder) => {
      const busy = this.#isBusy(side);
      const stalledMs = this.stalls.get(side) ?? 0;
      holder.classList.toggle("busy", busy);
      holder.classList.toggle("waiting", busy && !side.content && !side.reasoning && !side.calls);
      say(name, nameOf(side));
      reasoning.hidden = !side.reasoning;
      if (side.reasoning) render(thought, side.reasoning);
      render(text, side.content);
      this.#drawCalls(calls, side, busy, message);
      stall.hidden = !busy || stalledMs < STALLED_MS;
      say(stall, stall.hidden ? "" : stallText(side, stalledMs));
      ending.hidden = busy || !(side.error || ENDINGS[side.finish]);
      ending.classList.toggle("error", Boolean(side.error));
      say(ending, side.error ?? ENDINGS[side.finish] ?? "");
      meta.hidden = busy;
      const isBroken = ["length", "stopped"].includes(side.finish) || Boolean(side.error);
      onward.hidden = !isBroken || !side.content || Boolean(side.calls || side.reasoning);
      figures.replaceChildren(...figuresOf(side).map(([value, label]) => h("li", null, h("b", null, value), ` ${label}`)));
    };
    return { name, parts: [reasoning, text, calls, stall, ending, meta], draw };
  }

  #drawCalls(container, side, busy, message) {
    (side.calls ?? []).forEach((call, i) => {
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
        !busy && i === side.calls.length - 1 && h("button", { type: "button", class: "button only-last", onclick: () => this.#sendResults(message) }, "Send back"),
      );
      Object.assign(fresh, { args, final: !busy });
      if (old) old.replaceWith(fresh);
      else container.append(fresh);
    });
  }

  /** Draw the last answer at the next frame: tokens may come faster than frames. */
  #redraw(chat, now = false) {
    if (chat !== this.chat) return;
    const draw = () => {
      this.frame = undefined;
      this.views.at(-1)?.draw();
      this.#toEnd(false);
    };
    if (now) {
      cancelAnimationFrame(this.frame);
      draw();
    } else {
      this.frame ??= requestAnimationFrame(draw);
    }
  }

  #changed() {
    const busy = this.#isRunning;
    $("composer").classList.toggle("busy", busy);
    $("send").setAttribute("aria-label", busy ? "Stop" : "Send");
    this.list.show(this.chats, this.chat, (chat) => this.running.has(chat.id));
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

  /** Why the next question may not have so many images, in a sentence; "" if it may. */
  #whyNoImages(count) {
    const name = this.settings.all.model;
    const model = this.picker.chosen;
    if (!model?.isKnown) return `Whether ${name || "the model"} reads images is not known yet: it is not loaded.`;
    if (!model.images) {
      const [other] = [...this.picker.models].find(([, { images }]) => images) ?? [];
      return other ? `${name} reads text only; ${other} reads images.` : `${name} reads text only.`;
    }
    const before = this.chat.messages.slice(0, this.#askedAt);
    const answered = before.filter((_, i, all) => !isUnanswered(all, i));
    const sent = answered.reduce((sum, { images }) => sum + (images?.length ?? 0), 0);
    if (sent + count > model.images.max_images) return `${name} reads at most ${model.images.max_images} images in a conversation.`;
    return "";
  }

  /** Let the settings show the defaults of the chosen model. */
  takeDefaults(models) {
    const name = this.picker.chosen?.root ?? this.settings.all.model;
    const chosen = models.find(({ id }) => id === name) ?? models[0];
    if (chosen) this.settings.useDefaults(chosen.sampling);
  }
}

function pretty(args) {
  try {
    return JSON.stringify(JSON.parse(args), null, 2);
  } catch {
    return args;
  }
}
