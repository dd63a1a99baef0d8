// Elements made in code. Text always becomes text nodes: nothing that a model or a server says is parsed as HTML.

const SVG = "http://www.w3.org/2000/svg";

/** A node with properties and children. Properties that begin with `on` are listeners, all others attributes. */
export function filled(node, props, children) {
  for (const [name, value] of Object.entries(props ?? {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "class") node.setAttribute("class", value);
    else if (name === "value" || name === "checked") node[name] = value;
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat(Infinity).filter((child) => child !== undefined && child !== null && child !== false));
  return node;
}

/** An HTML element. */
export function h(tag, props, ...children) {
  return filled(document.createElement(tag), props, children);
}

/** An SVG element. */
export function s(tag, props, ...children) {
  return filled(document.createElementNS(SVG, tag), props, children);
}

/** An icon of strokes on a 20 x 20 grid. */
export function icon(path) {
  return s("svg", { viewBox: "0 0 20 20", "aria-hidden": "true" }, s("path", { d: path }));
}

export const ICONS = {
  copy: "M7 7V4h9v9h-3M4 7h9v9H4z",
  check: "M4 10.5l4 4 8-9",
  again: "M15.5 10a5.5 5.5 0 1 1-1.6-3.9M15.5 3.5v3h-3",
  edit: "M4 16l.8-3.2 8.4-8.4 2.4 2.4-8.4 8.4z",
  remove: "M5 5l10 10M15 5 5 15",
  onward: "M5 4.5l9 5.5-9 5.5z",
  before: "M12 5l-5 5 5 5",
  after: "M8 5l5 5-5 5",
};

/** Set the text of a node, touching the page only if it changes. */
export function say(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/** A button that copies what `text()` gives and says so for a moment. */
export function copyButton(text, label = "Copy") {
  const button = h("button", { type: "button", class: "quiet", "aria-label": label, title: label }, icon(ICONS.copy));
  button.addEventListener("click", async () => {
    await copy(text());
    button.replaceChildren(icon(ICONS.check));
    button.setAttribute("aria-label", "Copied");
    setTimeout(() => {
      button.replaceChildren(icon(ICONS.copy));
      button.setAttribute("aria-label", label);
    }, 1500);
  });
  return button;
}

async function copy(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  // Pages that come over plain HTTP from another host have no clipboard object.
  const area = h("textarea", { class: "visually-hidden", value: text });
  document.body.append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
}
