// Markdown to elements. The library's tokens become elements of a fixed list; its HTML is not used.

import MarkdownIt from "../vendor/markdown-it.js";
import { make } from "../dom.js";
import { codeBlock } from "./code.js";
import { maths } from "./maths.js";

const TAGS = new Set(
  "p ul ol li blockquote table thead tbody tr th td strong em s a h3 h4 h5 h6".split(" "));
const SCHEMES = new Set(["http:", "https:", "mailto:"]);
const ELSEWHERE = { target: "_blank", rel: "noopener noreferrer" };
const DEEPEST = 40;  // elements in each other
const MOST_FORMULAS = 1000;  // that are drawn at once
let nFormulas = 0;
const ENDS = { "$$": "$$", "\\[": "\\]", "\\(": "\\)", "$": "$" };  // of maths

const parser = new MarkdownIt({ html: false, linkify: true, breaks: true });
parser.linkify.set({ fuzzyLink: false, fuzzyEmail: false });
parser.inline.ruler.before("escape", "maths", inlineMaths);
const alt = ["paragraph", "blockquote", "list"];  // that it may interrupt
parser.block.ruler.before("fence", "maths", blockMaths, { alt });

function inlineMaths(state, silent) {
  const text = state.src, at = state.pos;
  const start = ["$$", "\\[", "\\(", "$"].find((each) => text.startsWith(each, at));
  if (!start) return false;
  const { cache } = state;  // ends that are not there are looked for once
  const end = cache[start] === -1 ? -1 : text.indexOf(ENDS[start], at + start.length);
  cache[start] = end;
  if (end <= at + start.length || end > state.posMax) return false;
  const inner = text.slice(at + start.length, end);
  // "$5 and $6" are prices.
  if (start === "$" && (/^\s|\s$|\n/.test(inner) || /\d/.test(text[end + 1] ?? ""))) return false;
  state.pos = end + ENDS[start].length;
  if (!silent) state.push("maths", "", 0).content = text.slice(at, state.pos);
  return true;
}

function blockMaths(state, first, last, silent) {
  const line = (i) => state.src.slice(state.bMarks[i] + state.tShift[i], state.eMarks[i]).trimEnd();
  const start = line(first).slice(0, 2), end = ENDS[start];
  if (!end || start === "\\(" || state.sCount[first] - state.blkIndent >= 4) return false;
  const key = `open ${end} ${state.blkIndent}`;  // up to which line one without an end was followed
  if (first < (state.env[key] ?? 0)) return false;
  let i = first;
  while (!line(i).endsWith(end) || (i === first && line(i).length < 4)) {
    if (++i >= last || state.sCount[i] < state.blkIndent) {
      state.env[key] = i;
      return false;
    }
  }
  if (silent) return true;
  const token = state.push("maths_block", "", 0);
  token.content = state.getLines(first, i + 1, state.blkIndent, false).trim();
  token.map = [first, i + 1];
  state.line = i + 1;
  return true;
}

// Writes a text into an element. Blocks that have not changed since the last call stay.
export function markdown(text, into) {
  const env = {}, lines = text.split("\n");
  const blocks = grouped(parser.parse(text, env));
  const links = JSON.stringify(env.references ?? "");  // which any block may use
  const keys = blocks.map(([token], i) => {
    const end = blocks[i + 1]?.[0].map[0] ?? lines.length;
    return links + token.type + lines.slice(token.map[0], end).join("\n");
  });
  const known = into.blocks ?? [];
  let same = 0;
  while (same < keys.length && keys[same] === known[same]) same++;
  nFormulas = 0;
  while (into.childNodes.length > same) into.lastChild.remove();
  for (const tokens of blocks.slice(same)) build(tokens, into);
  into.blocks = keys;
}

// The tokens of each block.
function grouped(tokens) {
  const blocks = [];
  for (const token of tokens) {
    if (token.level === 0 && token.nesting !== -1) blocks.push([]);
    blocks.at(-1).push(token);
  }
  return blocks;
}

function build(tokens, into) {
  const open = [into];
  for (const token of tokens) {
    const at = open.at(-1);
    if (token.nesting === -1) open.pop();
    else if (token.nesting === 0) leaf(token, at);
    else open.push(token.hidden || open.length > DEEPEST ? at : element(token, at));
  }
}

function element(token, into) {
  const depth = /^h([1-6])$/.exec(token.tag);
  let tag = depth ? "h" + Math.min(6, Number(depth[1]) + 2) : token.tag;
  const href = tag === "a" ? address(token.attrGet("href")) : null;
  if (!TAGS.has(tag) || (tag === "a" && !href)) tag = "span";
  const made = make(tag);
  if (href) Object.assign(made, { href, title: href, ...ELSEWHERE });
  if (tag === "ol") made.start = Number(token.attrGet("start") ?? 1);
  const side = /text-align:(\w+)/.exec(token.attrGet("style") ?? "");
  if (side) made.className = side[1];
  into.append(tag === "table" ? make("div", { className: "table", tabIndex: 0 }, made) : made);
  return made;
}

function leaf(token, into) {
  const { type, content: textContent } = token;
  switch (type) {
    case "inline": return build(token.children, into);
    case "fence": return into.append(codeBlock(textContent, token.info.trim().split(/\s+/)[0]));
    case "code_block": return into.append(codeBlock(textContent, ""));
    case "code_inline": return into.append(make("code", { textContent }));
    case "maths": return into.append(formula(textContent, false));
    case "maths_block": return into.append(formula(textContent, true));
    case "softbreak": case "hardbreak": return into.append(make("br"));
    case "hr": return into.append(make("hr"));
    case "image": return into.append(picture(token));
    default: return into.append(textContent);
  }
}

// source: with its marks. One that cannot be drawn stays as it is.
function formula(source, isBlock) {
  const n = source[0] === "$" && source[1] !== "$" ? 1 : 2;
  const isFew = ++nFormulas <= MOST_FORMULAS;
  const drawn = isFew ? maths(source.slice(n, -n), isBlock || source.startsWith("$$")) : null;
  if (!isBlock) return drawn ?? make("code", { className: "maths", textContent: source });
  if (drawn) return make("div", { className: "formula", tabIndex: 0 }, drawn);
  return make("pre", { className: "maths", textContent: source, tabIndex: 0 });
}

// Pictures are not loaded: their addresses would tell somebody else of this chat.
function picture(token) {
  const href = address(token.attrGet("src")), textContent = `[picture: ${token.content}]`;
  if (!href) return make("span", { textContent });
  return make("a", { href, textContent, title: href, ...ELSEWHERE });
}

// An address that a link may have, or null.
function address(text) {
  try {
    const url = new URL(text);
    return SCHEMES.has(url.protocol) ? url.href : null;
  } catch {
    return null;
  }
}
