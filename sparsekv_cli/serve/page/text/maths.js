// LaTeX to MathML: what answers write. A command that is not known stays as its source. A formula
// with an error in it, or a huge one, is left to the caller.

import {
  ACCENTS, ARROWS, BIG, DELIMITERS, FENCES, FUNCTIONS, LETTERS, SIGNS, SPACES, STYLES, UNSEEN,
} from "./symbols.js";

const NS = "http://www.w3.org/1998/Math/MathML";
const MOST = 4000, DEEPEST = 60;  // tokens, and groups in each other
const TOKEN = /\\[a-zA-Z]+\*?|\\[^]|\d+(?:[.,]\d+)*|\s+|[^]/gu;
const WORDS = new Set("text textrm textit textbf texttt textsf mbox operatorname".split(" "));
const UNDER = new Set(["underline", "underbrace"]);

// Returns the element of a formula, or null. isBlock: it stands on lines of its own.
export function maths(source, isBlock) {
  try {
    const parser = new Parser(source);
    const row = parser.row(() => false);
    const math = element("math", { display: isBlock ? "block" : "inline" });
    const note = element("annotation", { encoding: "application/x-tex" }, source);
    math.append(element("semantics", {}, group(row), note));
    return math;
  } catch (error) {
    if (error instanceof SyntaxError) return null;
    throw error;
  }
}

function element(tag, attributes, ...children) {
  const made = document.createElementNS(NS, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

const group = (nodes) => (nodes.length === 1 ? nodes[0] : element("mrow", {}, ...nodes));
const sign = (text, attributes = {}) => element("mo", attributes, text);
const fence = (text) => sign(text, { stretchy: "true", fence: "true" });

class Parser {
  constructor(source) {
    this.tokens = source.match(TOKEN) ?? [];
    this.at = 0;
    this.depth = 0;
    if (this.tokens.length > MOST) throw new SyntaxError("too long");
  }

  get next() {
    return this.tokens[this.at];
  }

  skip() {
    while (/^\s/.test(this.next ?? "")) this.at += 1;
  }

  take(wanted) {
    this.skip();
    const isThere = this.at < this.tokens.length && (!wanted || this.next === wanted);
    if (!isThere) throw new SyntaxError(wanted);
    return this.tokens[this.at++];
  }

  // The nodes up to a token that ends them, which stays.
  row(ends) {
    const nodes = [];
    for (this.skip(); this.at < this.tokens.length && !ends(this.next); this.skip())
      nodes.push(this.scripted());
    return nodes;
  }

  // A node with what stands above and below it.
  scripted() {
    let base = "^_'".includes(this.next) ? element("mrow", {}) : this.node();
    const above = [], below = [];
    for (this.skip(); ["^", "_", "'", "\\limits", "\\nolimits"].includes(this.next); this.skip()) {
      const mark = this.take();
      if (mark === "'") above.push(sign("′"));
      else if (mark === "\\limits") base.dataset.limits = "";
      else if (mark !== "\\nolimits") (mark === "^" ? above : below).push(this.argument());
    }
    const isLimit = "limits" in base.dataset;
    delete base.dataset.limits;
    const [over, under] = [above, below].map((nodes) => (nodes.length ? group(nodes) : null));
    if (!over && !under) return base;
    const names = isLimit ? ["munderover", "mover", "munder"] : ["msubsup", "msup", "msub"];
    const tag = over && under ? names[0] : over ? names[1] : names[2];
    base = element(tag, {}, base, ...[under, over].filter(Boolean));
    return base;
  }

  // What a command applies to: a group, one token, or one digit.
  argument() {
    this.skip();
    const [digit, ...others] = this.next ?? "";
    if (!others.length || !/\d/.test(digit)) return this.node();
    this.tokens[this.at] = others.join("");
    return element("mn", {}, digit);
  }

  braced(open = "{", close = "}") {
    this.take(open);
    const nodes = this.row((token) => token === close);
    this.take(close);
    return nodes;
  }

  // The source of a group, without its braces.
  raw() {
    this.take("{");
    const start = this.at;
    for (let depth = 1; depth; this.at++) {
      if (this.at >= this.tokens.length) throw new SyntaxError("}");
      if (this.next === "{") depth += 1;
      else if (this.next === "}") depth -= 1;
    }
    return this.tokens.slice(start, this.at - 1).join("");
  }

  node() {
    if (++this.depth > DEEPEST) throw new SyntaxError("too deep");
    const made = this.made();
    this.depth -= 1;
    return made;
  }

  made() {
    const token = this.take();
    if (token === "{") {
      this.at -= 1;
      return group(this.braced());
    }
    if (token === "}" || token === "&" || token === "\\\\") throw new SyntaxError(token);
    if (token === "~") return element("mspace", { width: "0.33em" });
    if (/^\d/.test(token)) return element("mn", {}, token);
    if (/^\p{L}/u.test(token)) return element("mi", {}, token);
    if (token[0] === "\\") return this.command(token.slice(1), token);
    return sign(token === "-" ? "−" : token, DELIMITERS.has(token) ? { stretchy: "false" } : {});
  }

  command(name, token) {
    if (Object.hasOwn(LETTERS, name)) return element("mi", {}, LETTERS[name]);
    if (Object.hasOwn(SIGNS, name)) return sign(SIGNS[name]);
    if (Object.hasOwn(BIG, name)) return this.big(BIG[name]);
    if (Object.hasOwn(FUNCTIONS, name)) return this.named(name, FUNCTIONS[name]);
    if (Object.hasOwn(SPACES, name)) return element("mspace", { width: SPACES[name] });
    if (Object.hasOwn(FENCES, name)) return sign(FENCES[name], { stretchy: "false" });
    if (Object.hasOwn(ACCENTS, name)) return this.accent(name);
    if (Object.hasOwn(STYLES, name)) return this.styled(STYLES[name]);
    if (Object.hasOwn(ARROWS, name)) return this.arrow(ARROWS[name]);
    if (UNSEEN.has(name)) return element("mrow", {});
    if (WORDS.has(name)) return element(name === "operatorname" ? "mi" : "mtext", {}, this.raw());
    if (/^[bB]igg?[lrm]?$/.test(name))
      return this.delimiter({ minsize: name[0] === "B" ? "1.6em" : "1.2em" });
    switch (name) {
      case "frac": case "dfrac": case "tfrac": case "cfrac": return this.fraction({});
      case "binom":
        return element("mrow", {}, fence("("), this.fraction({ linethickness: "0" }), fence(")"));
      case "sqrt": return this.root();
      case "left": return this.fenced();
      case "begin": return this.environment();
      case "overset": case "stackrel": return this.stacked("mover");
      case "underset": return this.stacked("munder");
      case "not": return sign(`${this.argument().textContent}\u0338`);
      case "pmod": return element("mrow", {}, sign("("), element("mi", {}, "mod"),
        element("mspace", { width: "0.33em" }), ...this.braced(), sign(")"));
      case "boxed": return element("mrow", { class: "boxed" }, ...this.braced());
      case "phantom": return element("mphantom", {}, ...this.braced());
      case "tag": return element("mtext", {}, `\u2003(${this.raw()})`);
      case "substack": return this.lines();
      default: return this.unknown(token);
    }
  }

  // The source of a command that is not known, with its groups.
  unknown(token) {
    let text = token;
    while (this.next === "{") text += `{${this.raw()}}`;
    if (token === "\\end" || token === "\\right") throw new SyntaxError(token);
    return element("mtext", {}, text);
  }

  big(text) {
    const made = sign(text, /[∫∬∭∮]/.test(text) ? {} : { movablelimits: "true" });
    if (!/[∫∬∭∮]/.test(text)) made.dataset.limits = "";
    return made;
  }

  named(name, takesLimits) {
    if (!takesLimits) return element("mi", {}, name);
    const made = sign(takesLimits, { movablelimits: "true", form: "prefix" });
    made.dataset.limits = "";
    return made;
  }

  accent(name) {
    const made = element(UNDER.has(name) ? "munder" : "mover", { accent: "true" }, this.argument(),
      sign(ACCENTS[name], { stretchy: String(/^(over|under|wide)/.test(name)) }));
    if (/brace$/.test(name)) made.dataset.limits = "";
    return made;
  }

  // Letters of another style are characters of their own.
  styled(style) {
    const made = this.argument();
    for (const leaf of made.matches("mi, mn") ? [made] : made.querySelectorAll("mi, mn")) {
      leaf.textContent = [...leaf.textContent].map((letter) => style(letter)).join("");
      if (leaf.localName === "mi") leaf.setAttribute("mathvariant", "normal");
    }
    return made;
  }

  arrow(text) {
    this.skip();
    const under = this.next === "[" ? group(this.braced("[", "]")) : null;
    const parts = [sign(text, { stretchy: "true" }), ...(under ? [under] : []), this.argument()];
    return element(under ? "munderover" : "mover", {}, ...parts);
  }

  fraction(attributes) {
    return element("mfrac", attributes, this.argument(), this.argument());
  }

  root() {
    this.skip();
    const index = this.next === "[" ? group(this.braced("[", "]")) : null;
    const inner = this.argument();
    return index ? element("mroot", {}, inner, index) : element("msqrt", {}, inner);
  }

  stacked(tag) {
    const other = this.argument();
    return element(tag, {}, this.argument(), other);
  }

  delimiter(attributes) {
    const token = this.take();
    const text = token[0] === "\\" ? FENCES[token.slice(1)] : token;
    const isKnown = token[0] === "\\" ? text !== undefined : DELIMITERS.has(token);
    if (!isKnown) throw new SyntaxError(token);
    return sign(text === "." ? "" : text, { stretchy: "true", fence: "true", ...attributes });
  }

  fenced() {
    const nodes = [this.delimiter({})];
    const ends = (token) => token === "\\right" || token === "\\middle";
    nodes.push(...this.row(ends));
    while (this.take() === "\\middle") nodes.push(this.delimiter({}), ...this.row(ends));
    return element("mrow", {}, ...nodes, this.delimiter({}));
  }

  // Lines and columns up to a token that ends them.
  table(end, attributes) {
    const rows = [[]];
    for (;;) {
      const nodes = this.row((token) => ["&", "\\\\", "\\cr", end].includes(token));
      rows.at(-1).push(element("mtd", {}, ...nodes));
      const token = this.take();
      if (token === end) break;
      if (token === "&") continue;
      if (this.next === "[") this.braced("[", "]");  // the space between lines
      rows.push([]);
    }
    if (!rows.at(-1)[0]?.firstChild && rows.at(-1).length < 2) rows.pop();
    return element("mtable", attributes, ...rows.map((cells) => element("mtr", {}, ...cells)));
  }

  lines() {
    this.take("{");
    return this.table("}", {});
  }

  environment() {
    const name = this.raw(), plain = name.replace(/\*$/, "");
    const known = ENVIRONMENTS[plain];
    if (!known || !Object.hasOwn(ENVIRONMENTS, plain)) throw new SyntaxError(name);
    if (plain === "array") this.raw();
    const [open, close, kind] = known;
    const table = this.table("\\end", kind ? { class: kind } : {});
    if (this.raw() !== name) throw new SyntaxError(name);
    const fences = (text) => (text ? [fence(text)] : []);
    return element("mrow", {}, ...fences(open), table, ...fences(close));
  }
}

const ENVIRONMENTS = {
  matrix: ["", ""], smallmatrix: ["", ""], pmatrix: ["(", ")"], bmatrix: ["[", "]"],
  Bmatrix: ["{", "}"], vmatrix: ["|", "|"], Vmatrix: ["‖", "‖"], array: ["", ""],
  cases: ["{", "", "left"], aligned: ["", "", "aligned"], align: ["", "", "aligned"],
  alignat: ["", "", "aligned"], split: ["", "", "aligned"], eqnarray: ["", "", "aligned"],
  gather: ["", ""], gathered: ["", ""], equation: ["", ""],
};
