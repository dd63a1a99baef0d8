// Conversations as data: what is sent for them, what arrives, versions, and search.
//
// A conversation has a list of messages. A question is `content`, and perhaps `images` and `files`; an answer is `content`,
// and perhaps `reasoning`, `calls`, and `beside`, the answer of a second model to the same question; `asked` is the model
// that was asked, `model` the one that answered. Where a question was asked in another way, or an answer asked for again, the
// message there has `versions`: the messages from there on, of each version, and null for the one that is shown.

import { ImageError, lost } from "./images.js";

const TITLE_CHARS = 60;
const SNIPPET_CHARS = 40;

/** A conversation without messages. */
export function newChat() {
  return { id: crypto.randomUUID?.() ?? `${Date.now()}-${Math.random()}`, messages: [] };
}

/** The name of a conversation: its own, or the beginning of its first question. */
export function titleOf(chat) {
  const [first] = chat.messages;
  const text = chat.title || first?.content || (first?.files?.[0] ?? first?.images?.[0])?.name || "";
  return text.length > TITLE_CHARS ? `${text.slice(0, TITLE_CHARS)}…` : text;
}

/** All messages, also those of versions that are not shown. */
export function everyMessage(messages) {
  return messages.flatMap((message) => [message, ...(message.versions ?? []).flatMap((tail) => (tail ? everyMessage(tail) : []))]);
}

// --- what is sent -------------------------------------------------------------------------------------------------------

/**
 * What goes to the gateway for a question. `urls` are those of the images, by id; `isBeside`: for the second model, which
 * knows its own answers. Throws a SyntaxError that names the setting that is not JSON, or an ImageError that names the image
 * that has no URL.
 */
export function requestOf(settings, messages, urls = new Map(), isBeside = false) {
  const body = { model: (isBeside ? settings.beside : settings.model) || undefined, messages: [], ...settings.sampling };
  if (settings.system.trim()) body.messages.push({ role: "system", content: settings.system });
  const own = messages.map((message) => (isBeside && message.beside) || message);
  body.messages.push(...own.filter((_, i) => !isUnanswered(own, i)).flatMap((message) => turns(message, urls)));
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
export function isUnanswered(messages, i) {
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

function contentOf({ content, images, files }, urls) {
  const text = [...(files ?? []).map(fileText), content].filter(Boolean).join("\n\n");
  if (!images?.length) return text;
  const parts = images.map((about) => {
    const url = urls.get(about.id);
    if (!url) throw new ImageError(lost(about));
    return { type: "image_url", image_url: { url } };
  });
  return text ? [...parts, { type: "text", text }] : parts;
}

/** A file as the model reads it: its name, and its text between marks that the text does not have. */
function fileText({ name, text }) {
  const longest = Math.max(2, ...[...text.matchAll(/`+/g)].map(([marks]) => marks.length));
  const fence = "`".repeat(longest + 1);
  return `File ${name}:\n${fence}\n${text.replace(/\n$/, "")}\n${fence}`;
}

// --- what arrives -------------------------------------------------------------------------------------------------------

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

/** What to say of an answer that has been silent for a while. */
export function stallText(message, stalledMs) {
  const seconds = Math.round(stalledMs / 1000);
  if (!message.content && !message.reasoning && !message.calls) return `Waiting for the first token, ${seconds} s so far.`;
  return `Nothing has come for ${seconds} s. The gateway is reconnecting to a worker; the answer goes on from here.`;
}

// What to do about an error whose own message does not say it, by status.
const REMEDIES = {
  0: "see whether the server runs and the network is there, then ask again",
  401: "enter a valid key at the top, then ask again",
  403: "choose another model, or ask for a key that may use it",
};

/** An error as one sentence that says what to do, with the time to come back if there is one. */
export function refusalText({ message, status, retryAfterS }) {
  const said = message.trim().replace(/[;,]?\s*(please )?(try|come) (it )?again[^.;]*\.?$/i, "").replace(/[.;\s]+$/, "");
  const sentence = `${said.charAt(0).toUpperCase()}${said.slice(1)}`;
  if (retryAfterS) return `${sentence}; try again in ${waitText(retryAfterS)}.`;
  const remedy = REMEDIES[status] ?? (status === 429 ? "wait a little, then ask again" : "");
  return remedy ? `${sentence}; ${remedy}.` : `${sentence}.`;
}

function waitText(seconds) {
  if (seconds < 120) return `${seconds} s`;
  return seconds < 7200 ? `${Math.ceil(seconds / 60)} min` : `${Math.ceil(seconds / 3600)} h`;
}

// --- versions -----------------------------------------------------------------------------------------------------------

/** Put messages in place of those from a position on, which become another version. An answer that never came is not kept. */
export function branch(messages, position, tail) {
  const old = messages.splice(position);
  messages.push(...tail);
  if (!old.length) return;
  const [head] = old;
  const versions = head.versions ?? [null];
  delete head.versions;
  const shown = versions.indexOf(null);
  const isEmpty = old.length === 1 && head.role === "assistant" && isUnanswered(old, 0) && !head.beside?.content;
  if (isEmpty) versions.splice(shown, 1);
  else versions[shown] = old;
  versions.push(null);
  if (versions.length > 1) tail[0].versions = versions;
}

/** Show the version before (-1) or after (1) from a position on, if there is one. */
export function turnTo(messages, position, step) {
  const { versions } = messages[position];
  const shown = versions?.indexOf(null) ?? -1;
  const wanted = versions?.[shown + step];
  if (!wanted) return;
  delete messages[position].versions;
  versions[shown] = messages.splice(position);
  versions[shown + step] = null;
  wanted[0].versions = versions;
  messages.push(...wanted);
}

/** Which version of how many a message begins: [2, 3]; undefined if there is one only. */
export function versionOf({ versions }) {
  return versions && [versions.indexOf(null) + 1, versions.length];
}

// --- search -------------------------------------------------------------------------------------------------------------

/** Conversations that have all words, in their name or in a message: [chat, the text around the first word, or ""]. */
export function search(chats, text) {
  const words = text.toLowerCase().split(/\s+/).filter(Boolean);
  if (!words.length) return chats.map((chat) => [chat, ""]);
  return chats.flatMap((chat) => {
    const title = titleOf(chat);
    const texts = everyMessage(chat.messages).flatMap((message) => [message.content, message.beside?.content, ...(message.files ?? []).map(({ name }) => name)]);
    const all = [title, ...texts.filter(Boolean)].join("\n");
    const low = all.toLowerCase();
    if (!words.every((word) => low.includes(word))) return [];
    const isInTitle = words.every((word) => title.toLowerCase().includes(word));
    return [[chat, isInTitle ? "" : around(all.slice(title.length + 1), words)]];
  });
}

function around(text, words) {
  const low = text.toLowerCase();
  const at = Math.max(0, words.map((word) => low.indexOf(word)).find((one) => one >= 0) ?? 0);
  const from = Math.max(0, at - SNIPPET_CHARS / 2);
  const found = text.slice(from, at + 2 * SNIPPET_CHARS).replace(/\s+/g, " ").trim();
  return `${from ? "…" : ""}${found}…`;
}
