// Formulas as MathML, which browsers set and screen readers read: no fonts, no styles, no HTML. Loaded when an answer first
// has a formula. KaTeX reads the TeX; of what it makes, the elements and attributes below become nodes, and nothing else.

import "./katex.min.js";
import { filled } from "./dom.js";

const MATHML = "http://www.w3.org/1998/Math/MathML";
const TAGS = new Set(
  (
    "math semantics annotation mrow mi mn mo ms mtext mspace msqrt mroot mfrac msub msup msubsup munder mover munderover " +
    "mmultiscripts mprescripts none mtable mtr mtd mlabeledtr mpadded mphantom mstyle menclose merror"
  ).split(" "),
);
const ATTRIBUTES = new Set(
  (
    "accent accentunder depth display displaystyle encoding fence height largeop linethickness lspace mathbackground mathcolor " +
    "mathsize maxsize minsize movablelimits notation rspace scriptlevel separator stretchy symmetric voffset width"
  ).split(" "),
);
// Browsers know mathvariant="normal" only. All others are letters of their own in Unicode: the code points of A, a and 0.
const VARIANTS = {
  bold: [0x1d400, 0x1d41a, 0x1d7ce],
  italic: [0x1d434, 0x1d44e],
  "bold-italic": [0x1d468, 0x1d482],
  script: [0x1d49c, 0x1d4b6],
  "bold-script": [0x1d4d0, 0x1d4ea],
  fraktur: [0x1d504, 0x1d51e],
  "double-struck": [0x1d538, 0x1d552, 0x1d7d8],
  "bold-fraktur": [0x1d56c, 0x1d586],
  "sans-serif": [0x1d5a0, 0x1d5ba, 0x1d7e2],
  "bold-sans-serif": [0x1d5d4, 0x1d5ee, 0x1d7ec],
  "sans-serif-italic": [0x1d608, 0x1d622],
  "sans-serif-bold-italic": [0x1d63c, 0x1d656],
  monospace: [0x1d670, 0x1d68a, 0x1d7f6],
};
// Letters that Unicode had before.
const OLDER = {
  italic: "hℎ",
  script: "BℬEℰFℱHℋIℐLℒMℳRℛeℯgℊoℴ",
  fraktur: "CℭHℌIℑRℜZℨ",
  "double-struck": "CℂHℍNℕPℙQℚRℝZℤ",
};
const OPTIONS = { output: "mathml", throwOnError: true, strict: "ignore", trust: false, maxSize: 20, maxExpand: 500 };

/** Set the formula in an element. What is no formula keeps its source, with the reason as its title. */
export function typeset(node, tex, isDisplay) {
  let made;
  try {
    const [root] = globalThis.katex.__renderToDomTree(tex, { ...OPTIONS, displayMode: isDisplay }).children;
    made = elementOf(root);
  } catch (error) {
    node.classList.add("wrong");
    node.title = error.message;
    return;
  }
  node.replaceChildren(made);
}

function elementOf(node, variant) {
  if (node.text !== undefined) return lettered(node.text, variant);
  if (!node.children) return spaceOf(node);
  if (!node.type) return node.children.map((child) => elementOf(child, variant)); // several nodes without one around them
  if (!TAGS.has(node.type)) throw new Error(`There is no ${node.type} in formulas.`);
  const { mathvariant, columnalign, ...others } = node.attributes;
  const element = document.createElementNS(MATHML, node.type);
  const known = Object.entries(others).filter(([name]) => ATTRIBUTES.has(name));
  if (mathvariant === "normal") known.push(["mathvariant", mathvariant]);
  const inner = node.type === "annotation" ? undefined : (mathvariant ?? variant);
  const made = filled(element, Object.fromEntries(known), node.children.map((child) => elementOf(child, inner)));
  if (columnalign) align(made, columnalign.split(" "));
  return made;
}

function spaceOf({ width, character }) {
  if (character) return character;
  return filled(document.createElementNS(MATHML, "mspace"), { width: `${width}em` }, []);
}

function align(table, sides) {
  for (const row of table.children) [...row.children].forEach((cell, i) => (cell.style.textAlign = sides[i] ?? ""));
}

/** A text in the letters of a variant. */
export function lettered(text, variant) {
  const begins = VARIANTS[variant];
  if (!begins) return text;
  return [...text].map((letter) => letterOf(letter, begins, OLDER[variant] ?? "")).join("");
}

function letterOf(letter, begins, older) {
  const known = older.indexOf(letter);
  if (known >= 0 && known % 2 === 0) return older[known + 1];
  const kind = [/[A-Z]/, /[a-z]/, /[0-9]/].findIndex((range) => range.test(letter));
  if (begins[kind] === undefined) return letter;
  return String.fromCodePoint(begins[kind] + letter.codePointAt(0) - "Aa0".codePointAt(kind));
}
