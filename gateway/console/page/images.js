// Images of questions: made small enough to send, and kept in the browser's IndexedDB, which has room for them.

/** Longest side of what is sent: the most that a model of a fixed longest side reads (SmolVLM). */
export const MAX_SIDE = 2048;
/** Files of known formats up to this size are sent as they are. */
export const MAX_UNCHANGED_BYTES = 1 << 20;
const THUMBNAIL_SIDE = 240;
const READ = ["image/png", "image/jpeg", "image/webp", "image/gif"];
const STORE = "images";

/** A file that is not an image that this browser reads, or an image that is not kept. The message is for people. */
export class ImageError extends Error {}

/**
 * The image in a file: `about`, which a message keeps, and `blob`, which is sent. Large images are scaled down, upright
 * as their EXIF data say. Throws an ImageError.
 */
export async function imageOf(file) {
  const name = file.name || "image";
  let bitmap;
  try {
    bitmap = await createImageBitmap(file);
  } catch {
    throw new ImageError(`“${name}” is not an image that this browser can read.`);
  }
  try {
    const isLarge = Math.max(bitmap.width, bitmap.height) > MAX_SIDE || file.size > MAX_UNCHANGED_BYTES;
    const scaled = isLarge || !READ.includes(file.type);
    const drawn = scaled ? draw(bitmap, MAX_SIDE) : bitmap;
    const blob = scaled ? await encoded(drawn, file.type) : file.slice(0, file.size, file.type);
    const thumbnail = draw(bitmap, THUMBNAIL_SIDE, "#fff").toDataURL("image/jpeg", 0.8);
    return { about: { id: newId(), name, width: drawn.width, height: drawn.height, thumbnail }, blob };
  } finally {
    bitmap.close();
  }
}

/** The image on a canvas, with sides up to `maxSide`, on `ground` where it is transparent. */
function draw(image, maxSide, ground) {
  const scale = Math.min(1, maxSide / Math.max(image.width, image.height));
  const canvas = document.createElement("canvas");
  canvas.width = Math.max(1, Math.round(image.width * scale));
  canvas.height = Math.max(1, Math.round(image.height * scale));
  const context = canvas.getContext("2d");
  if (ground) {
    context.fillStyle = ground;
    context.fillRect(0, 0, canvas.width, canvas.height);
  }
  context.imageSmoothingQuality = "high";
  context.drawImage(image, 0, 0, canvas.width, canvas.height);
  return canvas;
}

/** A photo as JPEG. Others as PNG, which keeps letters sharp, unless that is large. */
async function encoded(canvas, type) {
  if (type !== "image/jpeg") {
    const png = await blobOf(canvas, "image/png");
    if (png.size <= MAX_UNCHANGED_BYTES) return png;
  }
  return blobOf(draw(canvas, MAX_SIDE, "#fff"), "image/jpeg");
}

function blobOf(canvas, type) {
  return new Promise((resolve, reject) => {
    canvas.toBlob((blob) => (blob ? resolve(blob) : reject(new ImageError("The image is too large for this browser."))), type, 0.92);
  });
}

function urlOf(blob) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(new ImageError("The browser could not read an image again."));
    reader.readAsDataURL(blob);
  });
}

/** The content of a data URL; the page's policy lets nothing be fetched but from its own server. */
function blobFrom(url) {
  const [, type, text] = /^data:([^;]*);base64,(.*)$/.exec(url);
  return new Blob([Uint8Array.from(atob(text), (one) => one.charCodeAt(0))], { type });
}

function newId() {
  return [...crypto.getRandomValues(new Uint32Array(4))].map((part) => part.toString(36)).join("-");
}

/** What to say of an image that is not kept. */
export function lost({ name }) {
  return `The image ${name} is no longer in this browser; edit its question and attach it again.`;
}

/** What was attached in this browser. Where it cannot be kept, it lasts as long as the page. */
export class KeptImages {
  constructor() {
    this.blobs = new Map();
  }

  async add(id, blob) {
    this.blobs.set(id, blob);
    await this.#transact("readwrite", (store) => store.put(blob, id));
  }

  /** The image, or undefined if it is not kept. */
  async get(id) {
    if (!this.blobs.has(id)) {
      const blob = await this.#transact("readonly", (store) => store.get(id));
      if (blob) this.blobs.set(id, blob);
    }
    return this.blobs.get(id);
  }

  /** The data URLs of the images of messages, by id; without those that are not kept. */
  async urlsOf(messages) {
    const urls = new Map();
    for (const { id } of messages.flatMap((message) => message.images ?? [])) {
      const blob = await this.get(id);
      if (blob) urls.set(id, await urlOf(blob));
    }
    return urls;
  }

  /** Keep an image that comes as a data URL. */
  async addUrl(id, url) {
    await this.add(id, blobFrom(url));
  }

  /** Remove the images that no conversation has. `messages` gives those of the kept conversations, of all tabs. */
  async clean(messages) {
    const kept = (await this.#transact("readonly", (store) => store.getAllKeys())) ?? [];
    const wanted = new Set(messages().flatMap(({ images }) => images ?? []).map(({ id }) => id));
    const unwanted = kept.filter((id) => !wanted.has(id));
    if (unwanted.length) await this.#transact("readwrite", (store) => unwanted.forEach((id) => store.delete(id)));
  }

  /** The result of what `act` asks of the store; undefined if there is no store or no room. */
  async #transact(mode, act) {
    try {
      this.opening ??= opened();
      const database = await this.opening;
      return await new Promise((resolve, reject) => {
        const transaction = database.transaction(STORE, mode);
        const asked = act(transaction.objectStore(STORE));
        transaction.oncomplete = () => resolve(asked?.result);
        transaction.onabort = () => reject(transaction.error);
      });
    } catch {
      return undefined;
    }
  }
}

function opened() {
  return new Promise((resolve, reject) => {
    const opening = indexedDB.open("headrace", 1);
    opening.onupgradeneeded = () => opening.result.createObjectStore(STORE);
    opening.onsuccess = () => resolve(opening.result);
    opening.onerror = () => reject(opening.error);
  });
}
