// Markdown as elements. No HTML is ever parsed: what looks like a tag stays text, and links go to web addresses only.
//
// A text is cut into blocks; a block is its source and a function that makes its element. While an answer grows, blocks
// whose source is the same keep their elements, so only the last one is made anew and a selection stays.
//
// What colours code and sets formulas is loaded when a text first has some. Until then, and if it cannot be loaded, they
// show their source.

import { copyButton, h } from "./dom.js";

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([^`\s]*)[^`]*$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*)$/;
const RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])(\s+|$)(.*)$/;
const TABLE_LINE = /^[\s|:-]*-[\s|:-]*$/;
const DISPLAY = /^ {0,3}(\$\$|\\\[)/;
const MAX_DEPTH = 12;
const MAX_FORMULA_LINES = 200;
const MODULES = { highlight: () => import("./highlight.js"), math: () => import("./math.js") };
const loaded = new Map();

/** Call `act` with a module: at once if it is there, so that nothing flickers while an answer grows. */
function having(name, act) {
  const module = loaded.get(name);
  if (module) return act(module);
  MODULES[name]().then(
    (found) => {
      loaded.set(name, found);
      act(found);
    },
    () => {},
  );
}

/** Make the children of `container` show the text. */
export function render(container, text) {
  const made = blocks(text);
  const old = [...container.children];
  made.forEach((block, position) => {
    const node = old[position];
    if (node?.markdownSource === block.source) return;
    const fresh = block.make();
    fresh.markdownSource = block.source;
    if (node) node.replaceWith(fresh);
    else container.append(fresh);
  });
  for (const node of old.slice(made.length)) node.remove();
}

/** The blocks of a text. */
export function blocks(text, depth = 0) {
  const lines = text.replace(/\r\n?/g, "\n").split("\n");
  const found = [];
  let at = 0;
  while (at < lines.length) {
    if (!lines[at].trim()) {
      at += 1;
      continue;
    }
    const [end, make] = blockAt(lines, at, depth);
    found.push({ source: lines.slice(at, end).join("\n"), make });
    at = end;
  }
  return found;
}

function nodes(text, depth) {
  if (depth > MAX_DEPTH) return [h("p", null, text)];
  return blocks(text, depth).map((block) => block.make());
}

/** The end of the block that begins at a line, and what makes its element. */
function blockAt(lines, at, depth) {
  const line = lines[at];
  const fence = FENCE.exec(line);
  if (fence) return fenced(lines, at, fence);
  const heading = HEADING.exec(line);
  if (heading) {
    const title = heading[2].trim().replace(/\s#+$/, "");
    return [at + 1, () => h(`h${Math.min(6, heading[1].length + 1)}`, null, inline(title))];
  }
  if (RULE.test(line)) return [at + 1, () => h("hr")];
  if (/^ {0,3}>/.test(line)) return quote(lines, at, depth);
  if (ITEM.test(line)) return list(lines, at, depth);
  const formula = DISPLAY.test(line) && displayed(lines, at);
  if (formula) return formula;
  if (line.includes("|") && TABLE_LINE.test(lines[at + 1] ?? "")) return table(lines, at);
  let end = at + 1;
  while (end < lines.length && lines[end].trim() && !begins(lines[end])) end += 1;
  return [end, () => h("p", null, broken(lines.slice(at, end)))];
}

function begins(line) {
  return FENCE.test(line) || HEADING.test(line) || RULE.test(line) || /^ {0,3}>/.test(line) || ITEM.test(line) || DISPLAY.test(line);
}

function fenced(lines, at, fence) {
  const [, marks, language] = fence;
  let end = at + 1;
  const closing = (line) => line.trim().startsWith(marks) && !line.trim().replaceAll(marks[0], "");
  while (end < lines.length && !closing(lines[end])) end += 1;
  const code = lines.slice(at + 1, end).join("\n");
  const make = () => {
    const shown = h("code", null, code);
    if (language && code) having("highlight", ({ highlight }) => highlight(shown, code, language));
    return h(
      "figure",
      { class: "code" },
      h("figcaption", null, h("span", null, language || "text"), copyButton(() => code, "Copy the code")),
      h("pre", { tabindex: "0" }, shown),
    );
  };
  return [Math.min(end + 1, lines.length), make];
}

/** The block of a formula that begins at a line; undefined if it has no end. */
function displayed(lines, at) {
  const opening = DISPLAY.exec(lines[at])[1];
  const closing = opening === "$$" ? "$$" : "\\]";
  const isLast = (line, from) => line.trimEnd().length >= from + 2 && line.trimEnd().endsWith(closing);
  let end = at;
  while (!isLast(lines[end], end === at ? lines[at].indexOf(opening) + 2 : 0)) {
    end += 1;
    if (end >= lines.length || end > at + MAX_FORMULA_LINES || !lines[end].trim()) return undefined;
  }
  const source = lines.slice(at, end + 1).join("\n").trim();
  return [end + 1, () => formula(source, source.slice(2, -2), true)];
}

function formula(source, tex, isDisplay) {
  const node = h(isDisplay ? "div" : "span", { class: isDisplay ? "formula display" : "formula", tabindex: isDisplay ? "0" : null }, source);
  having("math", ({ typeset }) => typeset(node, tex, isDisplay));
  return node;
}

function quote(lines, at, depth) {
  let end = at;
  while (end < lines.length && /^ {0,3}>/.test(lines[end])) end += 1;
  const inner = lines.slice(at, end).map((line) => line.replace(/^ {0,3}> ?/, "")).join("\n");
  return [end, () => h("blockquote", null, nodes(inner, depth + 1))];
}

function list(lines, at, depth) {
  const first = ITEM.exec(lines[at]);
  const margin = first[1].length;
  const ordered = /\d/.test(first[2]);
  const items = [];
  let end = at;
  while (end < lines.length) {
    const line = lines[end];
    const item = ITEM.exec(line);
    const indent = line.length - line.trimStart().length;
    if (item && item[1].length <= margin + 1 && /\d/.test(item[2]) === ordered && item[1].length >= margin && !RULE.test(line)) {
      items.push([item[4]]);
    } else if (!line.trim()) {
      const next = lines[end + 1] ?? "";
      const goesOn = next.trim() && (next.length - next.trimStart().length > margin || ITEM.test(next));
      if (!goesOn) break;
      items.at(-1).push("");
    } else if (indent > margin) {
      items.at(-1).push(line.slice(Math.min(indent, margin + first[2].length + 1)));
    } else {
      break;
    }
    end += 1;
  }
  const make = () =>
    h(
      ordered ? "ol" : "ul",
      ordered && parseInt(first[2], 10) !== 1 ? { start: String(parseInt(first[2], 10)) } : null,
      items.map((item) => h("li", null, itemContent(item, depth))),
    );
  return [Math.max(end, at + 1), make];
}

/** A tight item is text and perhaps a list; a loose one has paragraphs. */
function itemContent(item, depth) {
  const made = nodes(item.join("\n"), depth + 1);
  if (made[0]?.tagName === "P" && !item.includes("")) return [...made[0].childNodes, ...made.slice(1)];
  return made;
}

function table(lines, at) {
  const cells = (line) =>
    line.trim().replace(/^\|/, "").replace(/(?<!\\)\|$/, "").split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));
  let end = at + 2;
  while (end < lines.length && lines[end].includes("|")) end += 1;
  const sides = cells(lines[at + 1]).map((cell) => (/^:-+:$/.test(cell) ? "center" : /-:$/.test(cell) ? "right" : ""));
  const row = (line, tag) => h("tr", null, cells(line).map((cell, i) => h(tag, { class: sides[i] }, inline(cell))));
  const make = () =>
    h(
      "div",
      { class: "table", tabindex: "0" },
      h("table", null, h("thead", null, row(lines[at], "th")), h("tbody", null, lines.slice(at + 2, end).map((line) => row(line, "td")))),
    );
  return [end, make];
}

/** Lines of a paragraph: in a chat a line break is meant. */
function broken(lines) {
  return lines.flatMap((line, i) => (i ? [h("br"), inline(line.trimStart())] : [inline(line.trimStart())]));
}

// What may be between two marks is bounded, so that marks without an end cost little.
const INLINE = new RegExp(
  [
    /\\\(([^]{1,2000}?)\\\)/, // 1 formula
    /\\\[([^]{1,2000}?)\\\]/, // 2 formula
    /\$\$([^$]{1,2000})\$\$/, // 3 formula
    /(?<![\w$])\$(?=[^\s$])([^$`\n]{0,1000}?[^\s$`\\])\$(?![\w$])/, // 4 formula; amounts of money are none
    /\\([!-/:-@[-`{-~])/, // 5 escaped
    /(`+)([^]{0,4000}?[^`])\6(?!`)/, // 6, 7 code
    /!?\[((?:[^[\]\\]|\\.|\[[^[\]]*\])*)\]\(\s*<?([^\s()<>]*(?:\([^\s()<>]*\)[^\s()<>]*)*)>?(?:\s+"[^"]*")?\s*\)/, // 8, 9 link
    /\*\*(?=\S)([^]{0,2000}?\S)\*\*(?!\*)/, // 10 strong
    /(?<![\w_])__(?=\S)([^]{0,2000}?\S)__(?![\w_])/, // 11 strong
    /\*(?=[^\s*])([^*]{0,2000}[^\s*])\*(?!\*)/, // 12 emphasis
    /(?<![\w_])_(?=[^\s_])([^_]{0,2000}[^\s_])_(?![\w_])/, // 13 emphasis
    /~~(?=\S)([^]{0,2000}?\S)~~/, // 14 struck out
    /(https?:\/\/[^\s<>"'`]*[^\s<>"'`.,;:!?)\]}*_])/, // 15 bare address
  ]
    .map((part) => part.source)
    .join("|"),
  "g",
);

/** The inline elements of a text. */
export function inline(text, depth = 0) {
  if (depth > MAX_DEPTH) return [text];
  const out = [];
  let last = 0;
  for (const match of text.matchAll(INLINE)) {
    if (match.index > last) out.push(text.slice(last, match.index));
    out.push(piece(match, depth));
    last = match.index + match[0].length;
  }
  if (last < text.length) out.push(text.slice(last));
  return out;
}

function piece(match, depth) {
  const [all, paren, bracket, dollars, dollar, escaped, , code, label, target, strong, strong2, em, em2, struck, bare] = match;
  const inner = (text) => inline(text, depth + 1);
  const tex = paren ?? bracket ?? dollars ?? dollar;
  if (tex !== undefined) return formula(all, tex, bracket !== undefined || dollars !== undefined);
  if (escaped !== undefined) return escaped;
  if (code !== undefined) return h("code", null, /^ .*[^ ].* $/.test(code) ? code.slice(1, -1) : code);
  if (label !== undefined) return link(target, inner(label || target)) ?? all;
  if (strong !== undefined || strong2 !== undefined) return h("strong", null, inner(strong ?? strong2));
  if (em !== undefined || em2 !== undefined) return h("em", null, inner(em ?? em2));
  if (struck !== undefined) return h("del", null, inner(struck));
  return link(bare, [bare]) ?? all;
}

function link(target, children) {
  if (!/^(https?:\/\/|mailto:)/i.test(target)) return undefined;
  return h("a", { href: target, target: "_blank", rel: "noopener noreferrer nofollow" }, children);
}
