// What the browser keeps: conversations and settings, bounded, in localStorage.

/** Name of the conversations in localStorage. */
export const CHATS = "headrace.chats";
const SETTINGS = "headrace.settings";
/** As many conversations are kept, the latest ones. */
export const MAX_CHATS = 200;

/** Settings of a request. `sampling` has the fields that are set; all others are as the model's makers recommend. */
export const NO_SETTINGS = {
  model: "",
  beside: "",
  system: "",
  sampling: {},
  schema: "",
  tools: "",
};

function read(key, otherwise) {
  try {
    return JSON.parse(localStorage.getItem(key)) ?? otherwise;
  } catch {
    return otherwise;
  }
}

/** The conversations, the latest first. */
export function loadChats() {
  const chats = read(CHATS, []);
  return Array.isArray(chats) ? chats.filter((chat) => chat?.id && Array.isArray(chat.messages)) : [];
}

/** Keep the conversations: as many of the latest as there is room for. */
export function saveChats(chats) {
  for (let count = Math.min(chats.length, MAX_CHATS); count >= 0; count = Math.min(count - 1, Math.floor(count * 0.9))) {
    try {
      localStorage.setItem(CHATS, JSON.stringify(chats.slice(0, count).filter((chat) => chat.messages.length)));
      return;
    } catch {
      // Full: the oldest tenth gives way.
    }
  }
}

/** The settings. */
export function loadSettings() {
  return { ...NO_SETTINGS, sampling: {}, ...read(SETTINGS, {}) };
}

/** Keep the settings. */
export function saveSettings(settings) {
  try {
    localStorage.setItem(SETTINGS, JSON.stringify(settings));
  } catch {
    // They last as long as the page then.
  }
}
