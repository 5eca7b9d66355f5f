// Blocks of code, with colours and a button that copies them.

import hljs from "../vendor/highlight.js";
import { copyButton, make } from "../dom.js";

const MOST = 30_000;  // characters that are coloured; colours of more would make the page wait
const DEEPEST = 40;

export function codeBlock(text, language) {
  const code = make("code");
  try {
    if (text.length > MOST || !hljs.getLanguage(language)) throw new RangeError("no colours");
    colour(hljs.highlight(text, { language, ignoreIllegals: true })._emitter.rootNode, code, 0);
  } catch {  // scopes may also lie too deep in each other
    code.textContent = text;
  }
  const pre = make("pre", { tabIndex: 0 }, code);
  pre.setAttribute("role", "group");
  pre.setAttribute("aria-label", `Code ${language}`.trim());
  const head = make("div", { className: "code-head" }, make("span", { textContent: language }));
  head.append(copyButton(() => text, "Copy the code"));
  return make("div", { className: "code" }, head, pre);
}

// The library's tree of scopes becomes elements; its HTML is not used.
function colour(node, into, depth) {
  for (const child of node.children) {
    if (typeof child === "string") {
      into.append(child);
    } else if (depth === DEEPEST) {
      colour(child, into, depth);
    } else {
      const scope = (child.scope ?? "").split(".")[0].replace(/[^a-z_]/g, "");
      const span = make("span", { className: "hljs-" + scope });
      colour(child, span, depth + 1);
      into.append(span);
    }
  }
}
