// The images that go with the next question: attached, pasted or dropped; shown as thumbnails until they are sent.

import { h, icon, ICONS, say } from "./dom.js";
import { ImageError, imageOf } from "./images.js";

const $ = (id) => document.getElementById(id);

export class Attachments {
  /** `mayTake(count)` gives the reason why a question may not have so many images, or "". */
  constructor(mayTake) {
    this.mayTake = mayTake;
    this.images = [];
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

  /** Read files, one after another, and show their thumbnails. */
  attach(files) {
    return this.#after(async () => {
      say(this.problem, "");
      for (const file of files) {
        const reason = this.mayTake(this.images.length + 1);
        if (reason) return say(this.problem, reason);
        this.images.push(await imageOf(file));
        this.#draw();
        say($("announce"), `Attached ${this.images.at(-1).about.name}.`);
      }
    });
  }

  /** Take back the images of a question. */
  takeBack(abouts, kept) {
    return this.#after(async () => {
      say(this.problem, "");
      this.images = [];
      for (const about of abouts) {
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
        if (!(error instanceof ImageError)) reportError(error);
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

  /** Hand over the images. */
  take() {
    const taken = this.images;
    this.images = [];
    this.#draw();
    return taken;
  }

  #draw() {
    this.list.hidden = !this.images.length;
    this.list.replaceChildren(
      ...this.images.map((image, i) =>
        h(
          "li",
          null,
          thumbnail(image.about),
          h("button", { type: "button", "aria-label": `Remove ${image.about.name}`, title: "Remove", onclick: () => this.#remove(i) }, icon(ICONS.remove)),
        ),
      ),
    );
  }

  #remove(i) {
    const [{ about }] = this.images.splice(i, 1);
    say(this.problem, "");
    this.#draw();
    say($("announce"), `Removed ${about.name}.`);
    const next = this.list.querySelectorAll("button")[Math.min(i, this.images.length - 1)];
    (next ?? $("prompt")).focus();
  }
}

/** What is shown of an image. */
export function thumbnail({ name, width, height, thumbnail: url }) {
  return h("img", { src: url, alt: `Image ${name}`, title: `${name}, ${width} × ${height}` });
}

/** What to say of an image that is not kept. */
export function lost({ name }) {
  return `The image ${name} is no longer in this browser; edit its question and attach it again.`;
}
