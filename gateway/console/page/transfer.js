// Files with conversations, to be kept elsewhere or to move to another browser.

const FORMAT = "headrace-chats";
const MAX_TITLE_CHARS = 200;

/** A file with conversations, as text. `urls` are those of their images, by id. */
export function exported(chats, urls) {
  return JSON.stringify({ format: FORMAT, version: 1, chats, images: Object.fromEntries(urls) }, null, 1);
}

/**
 * The conversations in such a file, and their images as data URLs by id. Only what conversations consist of is taken.
 * Throws a SyntaxError, whose message is for people.
 */
export function imported(text) {
  let file;
  try {
    file = JSON.parse(text);
  } catch {
    throw new SyntaxError("This is no file of conversations: it is not JSON.");
  }
  if (file?.format !== FORMAT || !Array.isArray(file.chats)) throw new SyntaxError("This is no file of conversations; take one that “Export” has made.");
  if (file.version !== 1) throw new SyntaxError("This file was made by a newer console; update this server first.");
  const chats = file.chats.map(chatIn);
  const images = Object.entries(file.images ?? {}).filter(([, url]) => isImageUrl(url));
  return { chats, images: new Map(images) };
}

const isImageUrl = (url) => typeof url === "string" && /^data:image\/(png|jpeg|webp|gif);base64,[\w+/=]*$/.test(url);
const texts = (from, ...names) => Object.fromEntries(names.filter((name) => typeof from[name] === "string").map((name) => [name, from[name]]));
const counts = (from, ...names) => Object.fromEntries(names.filter((name) => Number.isFinite(from[name])).map((name) => [name, from[name]]));
const listOf = (value, taken) => (Array.isArray(value) ? value.filter((one) => one && typeof one === "object").map(taken) : []);

function chatIn(chat) {
  const messages = listOf(chat?.messages, messageIn);
  if (typeof chat?.id !== "string" || !messages.length) throw new SyntaxError("A conversation in this file is damaged: it has no id or no messages.");
  return { id: chat.id, ...(chat.title ? { title: String(chat.title).slice(0, MAX_TITLE_CHARS) } : {}), messages };
}

function messageIn(from) {
  if (!["user", "assistant"].includes(from.role)) throw new SyntaxError("A message in this file is damaged: it has no known role.");
  const message = { content: "", ...texts(from, "role", "content", "reasoning", "asked", "model", "finish", "error"), ...counts(from, "ttftMs", "decodeMs") };
  const images = listOf(from.images, (one) => ({ name: "image", id: "", ...texts(one, "id", "name", "thumbnail"), width: 0, height: 0, ...counts(one, "width", "height") })).filter(({ thumbnail }) => isImageUrl(thumbnail));
  if (images.length) message.images = images;
  const files = listOf(from.files, (one) => ({ name: "", text: "", ...texts(one, "name", "text") }));
  if (files.length) message.files = files;
  const calls = listOf(from.calls, (one) => ({ id: "", name: "", args: "", ...texts(one, "id", "name", "args", "result") }));
  if (calls.length) message.calls = calls;
  if (from.usage && typeof from.usage === "object") {
    const details = from.usage.prompt_tokens_details ?? {};
    message.usage = { prompt_tokens: 0, completion_tokens: 0, ...counts(from.usage, "prompt_tokens", "completion_tokens"), prompt_tokens_details: counts(details, "cached_tokens", "image_tokens") };
  }
  if (from.beside && typeof from.beside === "object") message.beside = messageIn({ ...from.beside, beside: undefined });
  if (Array.isArray(from.versions) && from.versions.filter((tail) => tail === null).length === 1) {
    const versions = from.versions.map((tail) => (tail === null ? null : listOf(tail, messageIn)));
    if (versions.every((tail) => tail === null || tail.length)) message.versions = versions;
  }
  return message;
}
