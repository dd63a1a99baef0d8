// What goes with the next question: images and text files, attached, pasted or dropped; shown until they are sent.

import { h, icon, ICONS, say } from "./dom.js";
import { ImageError, imageOf, lost } from "./images.js";

const MAX_FILE_CHARS = 200_000;
const $ = (id) => document.getElementById(id);

/** A file that is not taken. The message is for people. */
class FileError extends Error {}

/** The text in a file: {name, text}. Throws a FileError. */
export async function textOf(file) {
  const name = file.name || "file";
  if (file.size > 4 * MAX_FILE_CHARS) throw tooLong(name);
  let text;
  try {
    text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
  } catch {
    throw new FileError(`“${name}” is neither an image that this browser can read nor text in UTF-8.`);
  }
  if (text.includes("\0") || text.startsWith("%PDF-")) throw new FileError(`“${name}” is neither an image that this browser can read nor text; attach its text.`);
  if (text.length > MAX_FILE_CHARS) throw tooLong(name);
  return { name, text };
}

function tooLong(name) {
  return new FileError(`“${name}” has more than ${MAX_FILE_CHARS / 1000},000 characters; attach the part that matters.`);
}

const isOfFile = (error) => error instanceof ImageError || error instanceof FileError;

const isImage = ({ type }) => type.startsWith("image/") && type !== "image/svg+xml";

export class Attachments {
  /** `mayTake(count)` gives the reason why a question may not have so many images, or "". */
  constructor(mayTake) {
    this.mayTake = mayTake;
    this.images = [];
    this.texts = [];
    /** Settled when all that was attached has been read. */
    this.reading = Promise.resolve();
    this.list = $("attached");
    this.problem = $("attach-problem");
    this.#wire();
  }

  #wire() {
    $("attach").addEventListener("click", () => $("files").click());
    $("files").addEventListener("change", () => {
      this.attach([...$("files").files]);
      $("files").value = "";
      $("prompt").focus();
    });
    document.addEventListener("paste", (event) => {
      const files = [...(event.clipboardData?.files ?? [])];
      const isElsewhere = event.target.closest?.("input, textarea:not(#prompt)");
      // What has both, as cells of a table, is meant as its text.
      if (!files.length || isElsewhere || $("chat").hidden || event.clipboardData.types.includes("text/plain")) return;
      event.preventDefault();
      this.attach(files);
      $("prompt").focus();
    });
    document.addEventListener("dragover", (event) => {
      if (!event.dataTransfer?.types.includes("Files")) return;
      event.preventDefault();
      const isHere = !$("chat").hidden;
      event.dataTransfer.dropEffect = isHere ? "copy" : "none";
      $("composer").classList.toggle("dropping", isHere);
    });
    document.addEventListener("dragleave", (event) => event.relatedTarget || $("composer").classList.remove("dropping"));
    document.addEventListener("drop", (event) => {
      const files = [...(event.dataTransfer?.files ?? [])];
      if (!files.length) return;
      event.preventDefault(); // the browser would open the file
      $("composer").classList.remove("dropping");
      if (!$("chat").hidden) this.attach(files);
    });
  }

  get isEmpty() {
    return !this.images.length && !this.texts.length;
  }

  /** Read files, one after another, and show them. Those that cannot be taken are named; the others are. */
  attach(files) {
    return this.#after(async () => {
      say(this.problem, "");
      const problems = new Set();
      for (const file of files) {
        try {
          await this.#read(file);
        } catch (error) {
          if (!isOfFile(error)) throw error;
          problems.add(error.message);
          continue;
        }
        this.#draw();
        say($("announce"), `Attached ${file.name || "a file"}.`);
      }
      say(this.problem, [...problems].join(" "));
    });
  }

  async #read(file) {
    if (isImage(file)) {
      const reason = this.mayTake(this.images.length + 1);
      if (reason) throw new ImageError(reason);
      this.images.push(await imageOf(file));
    } else {
      this.texts.push(await textOf(file));
    }
  }

  /** Take back what went with a question. */
  takeBack({ images = [], files = [] }, kept) {
    return this.#after(async () => {
      say(this.problem, "");
      this.images = [];
      this.texts = [...files];
      for (const about of images) {
        const blob = await kept.get(about.id);
        if (blob) this.images.push({ about, blob });
        else say(this.problem, lost(about));
      }
      this.#draw();
    });
  }

  #after(act) {
    $("composer").classList.add("reading");
    this.reading = this.reading
      .then(act)
      .catch((error) => {
        say(this.problem, error.message);
        if (!isOfFile(error)) reportError(error);
      })
      .finally(() => $("composer").classList.remove("reading"));
    return this.reading;
  }

  /** Say no more what was wrong with files. */
  forgetProblem() {
    say(this.problem, "");
  }

  /** Why the question cannot be sent with these images, shown too; "" if it can. */
  refuse() {
    const reason = this.images.length ? this.mayTake(this.images.length) : "";
    say(this.problem, reason);
    return reason;
  }

  /** Hand over the images and the texts. */
  take() {
    const taken = { images: this.images, texts: this.texts };
    this.images = [];
    this.texts = [];
    this.#draw();
    return taken;
  }

  #draw() {
    this.list.hidden = this.isEmpty;
    const item = (shown, name, from, i) =>
      h(
        "li",
        null,
        shown,
        h("button", { type: "button", "aria-label": `Remove ${name}`, title: "Remove", onclick: () => this.#remove(from, i, name) }, icon(ICONS.remove)),
      );
    this.list.replaceChildren(
      ...this.images.map((image, i) => item(thumbnail(image.about), image.about.name, this.images, i)),
      ...this.texts.map((file, i) => item(chip(file), file.name, this.texts, i)),
    );
  }

  #remove(from, i, name) {
    const at = from === this.texts ? this.images.length + i : i;
    from.splice(i, 1);
    say(this.problem, "");
    this.#draw();
    say($("announce"), `Removed ${name}.`);
    const buttons = this.list.querySelectorAll("button");
    (buttons[Math.min(at, buttons.length - 1)] ?? $("prompt")).focus();
  }
}

/** What is shown of an image. */
export function thumbnail({ name, width, height, thumbnail: url }) {
  return h("img", { src: url, alt: `Image ${name}`, title: `${name}, ${width} × ${height}` });
}

/** What is shown of a text file. */
export function chip({ name, text }) {
  const lines = text.split("\n").length;
  return h("span", { class: "chip" }, h("b", null, name), h("span", null, lines === 1 ? "1 line" : `${lines} lines`));
}
