// The search over conversations: names, messages of all branches, and attached files.

import { $ } from "../dom.js";
import { allMessages } from "./branches.js";

const AROUND = 30;  // characters that are shown around a find
const PAUSE_MS = 150;
const texts = new WeakMap();  // by chat: when it changed, and its text

// Returns the function that finds, from conversations to pairs: one, and the words around the find.
// changed: called a moment after somebody types.
export function finder(changed) {
  let timer = null;
  $("search").addEventListener("input", () => {
    clearTimeout(timer);
    timer = setTimeout(changed, PAUSE_MS);
  });
  return (chats) => {
    const wanted = $("search").value.trim().toLowerCase();
    if (!wanted) return chats.map((chat) => [chat, ""]);
    return chats.map((chat) => [chat, place(chat, wanted)]).filter(([, words]) => words !== null);
  };
}

// The words around the find; empty: it is in the name; null: there is none.
function place(chat, wanted) {
  if (chat.title.toLowerCase().includes(wanted)) return "";
  const text = textOf(chat), at = text.toLowerCase().indexOf(wanted);
  if (at < 0) return null;
  const from = Math.max(0, at - AROUND), to = at + wanted.length + AROUND;
  const words = text.slice(from, to).replace(/\s+/g, " ");
  return `${from ? "…" : ""}${words}${to < text.length ? "…" : ""}`;
}

function textOf(chat) {
  const known = texts.get(chat);
  if (known && known.changed === chat.changed) return known.text;
  const parts = allMessages(chat).flatMap(({ content, files }) => (
    [content, ...(files ?? []).map(({ name, text }) => `${name}\n${text}`)]));
  const text = parts.join("\n");
  texts.set(chat, { changed: chat.changed, text });
  return text;
}
