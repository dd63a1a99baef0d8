// Colours for code: comments, texts, numbers, keywords, and the names of tags and keys. Loaded when an answer first has code
// in a language that is known here. Each part of the code becomes a text node in a span; nothing is parsed as HTML.

import { h } from "./dom.js";

const MAX_CHARS = 100_000;
const C_COMMENT = String.raw`\/\/[^\n]*|\/\*[^]*?(?:\*\/|$)`;
const HASH = String.raw`(?<![\w$&])#[^\n]*`;
const QUOTED = String.raw`"(?:[^"\\\n]|\\[^])*"?|'(?:[^'\\\n]|\\[^])*'?`;
const BACKTICKS = String.raw`${"`"}(?:[^${"`"}\\]|\\[^])*${"`"}?`;
const DOUBLE = String.raw`"(?:[^"\\\n]|\\[^])*"?`;
const NUMBER = String.raw`(?<![\w.])(?:0[xX][\da-fA-F_]+|0[bB][01_]+|\d[\d_]*(?:\.[\d_]+)?(?:[eE][+-]?\d+)?)[a-zA-Z%]{0,3}(?!\w)`;
const WORD = String.raw`[A-Za-z_$@][\w$]*`;
const C_WORDS =
  "if else for while do switch case default break continue return goto struct enum union typedef const static extern void int long " +
  "short char float double unsigned signed bool true false sizeof inline volatile";
const OO_WORDS =
  "class public private protected new this super try catch throw finally null import package interface extends implements abstract " +
  "override virtual namespace using operator template typename auto final var";

/** How a language writes its comments and texts, its keywords, and whether their case matters. */
const LANGUAGES = {
  c: { comment: C_COMMENT, text: QUOTED, words: `${C_WORDS} ${OO_WORDS} nullptr constexpr delete friend string boolean foreach in out ref async await get set record when where is as instanceof throws synchronized` },
  js: {
    comment: C_COMMENT,
    text: `${QUOTED}|${BACKTICKS}`,
    words: `${OO_WORDS} if else for while do switch case default break continue return const let function async await yield typeof instanceof in of delete void true false undefined export from static type enum readonly keyof declare as get set`,
  },
  go: { comment: C_COMMENT, text: `${QUOTED}|${BACKTICKS}`, words: "break case chan const continue default defer else fallthrough for func go goto if import interface map package range return select struct switch type var nil true false string int error" },
  rust: { comment: C_COMMENT, text: DOUBLE, words: "as async await break const continue crate dyn else enum extern false fn for if impl in let loop match mod move mut pub ref return self Self static struct super trait true type unsafe use where while" },
  kotlin: { comment: C_COMMENT, text: QUOTED, words: `${C_WORDS} ${OO_WORDS} fun val when is in object data sealed companion suspend func let guard nil self init protocol def match with given trait lazy` },
  python: {
    comment: HASH,
    text: String.raw`(?:\b[rbfuRBFU]{1,2})?(?:"""[^]*?(?:"""|$)|'''[^]*?(?:'''|$)|${QUOTED})`,
    words: "and as assert async await break case class continue def del elif else except False finally for from global if import in is lambda match None nonlocal not or pass raise return True try while with yield self",
  },
  ruby: { comment: HASH, text: QUOTED, words: "begin break case class def do else elsif end ensure false for if in module next nil not or and redo rescue retry return self super then true unless until when while yield local function repeat my sub use print TRUE FALSE NULL" },
  shell: { comment: HASH, text: `${DOUBLE}|'[^']*'?`, words: "if then else elif fi for in do done while until case esac function return local export set unset exit cd echo source FROM RUN COPY ADD CMD ENTRYPOINT ENV ARG WORKDIR EXPOSE USER VOLUME LABEL" },
  sql: {
    comment: String.raw`--[^\n]*|\/\*[^]*?(?:\*\/|$)`,
    text: `'(?:[^']|'')*'?|"[^"\\n]*"?`,
    words: "select from where insert into values update set delete create table view index drop alter add primary key foreign references join left right inner outer full cross on group by order having limit offset union all distinct as and or not null is in like between exists case when then else end with asc desc begin commit rollback count sum avg min max default unique integer int text varchar boolean date timestamp",
    ignoresCase: true,
  },
  yaml: { comment: HASH, text: QUOTED, key: String.raw`(?<=^|\n)[ \t]*(?:- )*[\w."'/-]+(?=\s*[:=](?:\s|$))|(?<=^|\n)\[[^\]\n]*\]`, words: "true false null yes no on off" },
  json: { comment: C_COMMENT, key: String.raw`"(?:[^"\\\n]|\\[^])*"(?=\s*:)`, text: DOUBLE, words: "true false null" },
  css: { comment: C_COMMENT, text: QUOTED, key: String.raw`(?<=[{;]\s*)[\w-]+(?=\s*:)|[.#@][\w-]+`, words: "important from to" },
  html: { comment: String.raw`<!--[^]*?(?:-->|$)`, text: String.raw`(?<==)(?:"[^"]*"?|'[^']*'?)`, key: String.raw`<\/?[\w:-]+|\/?>|(?<=\s)[\w:-]+(?==)`, words: "" },
  diff: { comment: String.raw`(?<=^|\n)(?:@@|diff |index |--- |\+\+\+ )[^\n]*`, added: String.raw`(?<=^|\n)\+[^\n]*`, removed: String.raw`(?<=^|\n)-[^\n]*`, words: "" },
};
const ALIASES = {
  c: "h cpp c++ cc cxx hpp cs csharp c# java objc proto protobuf",
  js: "javascript mjs cjs jsx ts tsx typescript",
  go: "golang",
  rust: "rs",
  kotlin: "kt swift scala dart groovy",
  python: "py python3 py3 starlark",
  ruby: "rb lua perl pl r julia jl elixir ex",
  shell: "sh bash zsh fish console shellsession dockerfile docker makefile make",
  sql: "mysql postgresql postgres sqlite",
  yaml: "yml toml ini conf properties env",
  json: "json5 jsonc jsonl",
  css: "scss less",
  html: "xml svg xhtml vue",
  diff: "patch",
};
const NAMES = new Map(Object.entries(ALIASES).flatMap(([name, aliases]) => [name, ...aliases.split(" ")].map((alias) => [alias, name])));
const compiled = new Map();

/** The parts of a code: [kind, text]. The kind is "comment", "text", "key", "number", "keyword", "added", "removed" or "". */
export function parts(code, language) {
  const rules = rulesOf(language);
  if (!rules || code.length > MAX_CHARS) return [["", code]];
  const { pattern, words, ignoresCase } = rules;
  const found = [];
  const put = (kind, text) => {
    if (!text) return;
    if (found.at(-1)?.[0] === kind) found.at(-1)[1] += text;
    else found.push([kind, text]);
  };
  let last = 0;
  for (const match of code.matchAll(pattern)) {
    put("", code.slice(last, match.index));
    let [kind] = Object.entries(match.groups).find(([, text]) => text !== undefined);
    if (kind === "word") kind = words.has(ignoresCase ? match[0].toLowerCase() : match[0]) ? "keyword" : "";
    put(kind, match[0]);
    last = match.index + match[0].length;
  }
  put("", code.slice(last));
  return found;
}

function rulesOf(language) {
  const name = NAMES.get(language.toLowerCase());
  if (name && !compiled.has(name)) {
    const { words, ignoresCase, ...patterns } = LANGUAGES[name];
    const groups = Object.entries({ ...patterns, number: NUMBER, word: WORD }).map(([kind, source]) => `(?<${kind}>${source})`);
    compiled.set(name, { pattern: new RegExp(groups.join("|"), "g"), words: new Set(words.split(" ")), ignoresCase });
  }
  return compiled.get(name);
}

/** Show a code in its colours. */
export function highlight(element, code, language) {
  const made = parts(code, language);
  if (made.some(([kind]) => kind)) element.replaceChildren(...made.map(([kind, text]) => (kind ? h("span", { class: `code-${kind}` }, text) : text)));
}
