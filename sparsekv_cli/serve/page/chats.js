// The conversations: the list of them, the one that is shown, and what is done to them.

import * as store from "./store.js";
import { $, button, confirmed, make, say } from "./dom.js";
import { withFiles } from "./files.js";

let chats = [], shown = null, told = null;
let listed = "";  // what the list shows

export const current = () => shown;

// Begins with a new chat. page: what the page does then: show(chat, elsewhere), gone(chat),
// fresh() and isRunning(chat).
export async function openChats(page) {
  told = page;
  const opened = await store.open();
  chats = opened.chats;
  if (opened.error) note(opened.error);
  store.watch(changedElsewhere);
  newChat();
}

function note(error) {
  const why = error.message || error.name;  // a full disk has no message
  $("chats-note").textContent =
    `Conversations are lost when this page is closed. The browser keeps none: ${why}`;
  $("chats-note").className = "error";
}

function sorted() {
  chats.sort((one, other) => other.changed - one.changed);
  return chats;
}

// A new chat is listed when it has a message.
export function newChat() {
  const settings = shown?.settings ?? sorted()[0]?.settings ?? {};
  select({ id: newId(), title: "", messages: [], settings });
}

export const newId = () => crypto.randomUUID?.() ?? `${Date.now()}-${Math.random()}`;

function select(chat) {
  shown = chat;
  told.show(chat);
  list();
}

export async function save(chat) {
  if (chat.gone || !chat.messages.length) return;
  chat.changed = Date.now();
  if (!chats.includes(chat)) chats.push(chat);
  if (!chat.title) chat.title = titleOf(chat.messages[0]);
  list();
  try {
    await store.put(chat);
  } catch (error) {
    note(error);
  }
}

function titleOf({ content, files }) {
  const words = content.trim().split("\n")[0] || files?.[0]?.name || "Chat";
  const [start] = /^.{0,48}/u.exec(words);
  return start === words ? words : start.trimEnd() + "…";
}

async function remove(chat) {
  if (!(await confirmed(`Delete “${chat.title}”? It cannot be brought back.`))) return;
  drop(chat);
  await store.remove(chat.id);
  say("The conversation is deleted.");
  $("prompt").focus();
}

function drop(chat) {
  chat.gone = true;
  chats = chats.filter((each) => each !== chat);
  told.gone(chat);
  if (chat === shown) newChat();
  else list();
}

function changedElsewhere(id, chat) {
  let mine = chats.find((each) => each.id === id);
  if (!chat) {
    if (mine) drop(mine);
    return;
  }
  if (mine && told.isRunning(mine)) {
    // Saved when its answer is whole. If both tabs ask, this one goes on in a chat of its own.
    if (mine.messages.at(-1).id === chat.messages.at(-1).id) return;
    mine.id = newId();
    mine = undefined;
  }
  if (mine) Object.assign(mine, chat);
  else chats.push(chat);
  if (mine === shown) told.show(mine, true);
  list();
}

// Nothing is replaced under the hands of somebody who types a name or uses the buttons.
function list() {
  const now = JSON.stringify([shown.id, sorted().map(({ id, title }) => [id, title])]);
  if (now === listed || $("chat-list").querySelector("input")) return;
  listed = now;
  const held = document.activeElement?.dataset.chat;
  $("chat-list").replaceChildren(...chats.map(item));
  if (held) $("chat-list").querySelector(`[data-chat="${CSS.escape(held)}"]`)?.focus();
}

function item(chat) {
  const open = button(chat.title, () => {
    select(chat);
    told.fresh();
  }, { className: "open", title: chat.title });
  open.dataset.chat = chat.id;
  const entry = make("li", {}, open);
  if (chat !== shown) return entry;
  open.setAttribute("aria-current", "true");
  const actions = make("div", { className: "actions" },
    button("Rename", () => rename(chat, entry)), button("Export", () => exportChat(chat)),
    button("Delete", () => remove(chat)));
  actions.setAttribute("role", "group");
  actions.setAttribute("aria-label", `Conversation ${chat.title}`);
  entry.append(actions);
  return entry;
}

function rename(chat, entry) {
  const field = make("input", { value: chat.title, maxLength: 100 });
  field.setAttribute("aria-label", "Name of the conversation");
  let done = false;
  const end = (keeps) => {
    if (done) return;
    done = true;
    if (keeps && field.value.trim()) {
      chat.title = field.value.trim();
      save(chat);
    }
    field.remove();
    listed = "";
    list();
    $("chat-list").querySelector("[aria-current]")?.focus();
  };
  field.addEventListener("keydown", (event) => {
    if (event.isComposing || !["Enter", "Escape"].includes(event.key)) return;
    event.stopPropagation();
    end(event.key === "Enter");
  });
  field.addEventListener("blur", () => end(true));
  entry.replaceChildren(field);
  field.select();
}

// Saves a conversation as a Markdown file.
function exportChat(chat) {
  const parts = chat.messages.map((message) => {
    if (message.role === "user") return `## You\n\n${withFiles(message)}\n`;
    const by = [message.about?.model, message.about?.method].filter(Boolean).join(", ");
    return `## Answer${by && ` (${by})`}\n\n${message.content}\n`;
  });
  const words = chat.settings.system?.trim(), system = words ? [`## System\n\n${words}\n`] : [];
  const text = [`# ${chat.title}\n`, ...system, ...parts].join("\n");
  const href = URL.createObjectURL(new Blob([text], { type: "text/markdown" }));
  const name = chat.title.replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-+|-+$/g, "") || "chat";
  make("a", { href, download: `${name}.md` }).click();
  setTimeout(() => URL.revokeObjectURL(href), 1000);
}
