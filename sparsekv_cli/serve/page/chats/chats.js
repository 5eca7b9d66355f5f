// The conversations: the list of them, the one that is shown, and what is done to them.

import * as store from "./store.js";
import { $, button, confirmed, make, newId, say } from "../dom.js";
import { addressed, goTo, watchAddress } from "./address.js";
import { allMessages } from "./branches.js";
import { exportAll, exportChat, readChats } from "./exchange.js";
import { finder } from "./search.js";

let chats = [], shown = null, told = null;
let listed = "";  // what the list shows
const find = finder(() => list());

export const current = () => shown;
export const allChats = () => chats;

// Begins with the chat of the page's address. page: what the page does then: show(chat, elsewhere),
// gone(chat), fresh(), isRunning(chat), and isEmpty(chat): whether nothing waits to be sent.
export async function openChats(page) {
  told = page;
  const opened = await store.open();
  chats = opened.chats.map(inForm);
  if (opened.error) note(opened.error);
  store.watch(changedElsewhere);
  watchAddress(openAddressed);
  openAddressed(addressed());
}

// Messages of an older page have no ids.
function inForm(chat) {
  for (const message of allMessages(chat)) message.id ??= newId();
  return chat;
}

function openAddressed(id) {
  const chat = id && chats.find((each) => each.id === id);
  if (chat) select(chat);
  else newChat();
  if (id && !chat) say("This browser has no such conversation. Here is a new one.");
  goTo(chat ? id : null, false);
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

let unsent = null;

// A new chat is listed when it has a message. One for which something is written is found again.
export function newChat() {
  const isKept = unsent && !unsent.messages.length && !told.isEmpty(unsent);
  if (!isKept) {
    const before = shown?.settings ?? sorted()[0]?.settings ?? {};
    unsent = { id: newId(), title: "", messages: [], settings: { ...before } };
    // An older page kept a method that nobody had chosen.
    if (!("from-first" in before)) delete unsent.settings.method;
  }
  select(unsent);
}

// Shows a chat that somebody has asked for.
export function goToChat(chat) {
  if (chat) select(chat);
  else newChat();
  goTo(shown.messages.length ? shown.id : null, true);
}

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
  if (chat === shown) goTo(chat.id, false);
  list();
  try {
    await store.put(chat);
  } catch (error) {
    note(error);
  }
}

function titleOf({ content, files }) {
  const words = content.trim().split("\n", 1)[0] || files?.[0]?.name || "Chat";
  const [start] = /^.{0,48}/u.exec(words);
  return start === words ? words : start.trimEnd() + "…";
}

async function remove(chat) {
  if (!(await confirmed(`Delete “${chat.title}”? It cannot be brought back.`))) return;
  drop(chat);
  $("prompt").focus();
  say("The conversation is deleted.");  // now: on a slow disk, later words stand here by then
  await store.remove(chat.id);
}

function drop(chat) {
  chat.gone = true;
  chats = chats.filter((each) => each !== chat);
  told.gone(chat);
  if (chat !== shown) return list();
  newChat();
  goTo(null, false);
}

function changedElsewhere(id, chat) {
  let mine = chats.find((each) => each.id === id);
  if (!chat) {
    if (mine) drop(mine);
    return;
  }
  if (mine && told.isRunning(mine)) {
    store.takeName(mine, chat);
    // Saved when its answer is whole. If both tabs ask, this one goes on in a chat of its own.
    if (mine.messages.at(-1).id === chat.messages.at(-1).id) return list();
    mine.id = newId();
    if (mine === shown) goTo(mine.id, false);
    mine = undefined;
  }
  if (mine) Object.assign(mine, inForm(chat));
  else chats.push(inForm(chat));
  if (mine === shown) told.show(mine, true);
  list();
}

// Nothing is replaced under the hands of somebody who types a name or uses the buttons.
export function list() {
  const found = find(sorted());
  const now = JSON.stringify([shown.id, found.map(([{ id, title }, words]) => [id, title, words])]);
  if (now === listed || $("chat-list").querySelector("input")) return;
  listed = now;
  const held = document.activeElement?.dataset.chat;
  $("chat-list").replaceChildren(...found.map(([chat, words]) => item(chat, words)));
  $("found").textContent = $("search").value.trim() && !found.length ? "Nothing is found." : "";
  if (held) $("chat-list").querySelector(`[data-chat="${CSS.escape(held)}"]`)?.focus();
}

// words: where the text that is searched for stands in the chat.
function item(chat, words) {
  const open = button(chat.title, () => {
    goToChat(chat);
    told.fresh();
  }, { className: "open", title: chat.title });
  open.dataset.chat = chat.id;
  const entry = make("li", {}, open);
  if (words) entry.append(make("p", { className: "found", textContent: words }));
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
      Object.assign(chat, { title: field.value.trim(), named: Date.now() });
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

// --- files of conversations ---

$("export-all").addEventListener("click", () => exportAll(sorted()));
$("import").addEventListener("click", () => $("import-input").click());
$("import-input").addEventListener("change", async () => {
  const [file] = $("import-input").files;
  if (!file) return;
  const read = await readChats(file).catch((error) => tell(`${file.name}: ${error.message}`, true));
  $("import-input").value = "";
  if (!read) return;
  const known = new Set(chats.map(({ id }) => id));
  const added = read.filter(({ id }) => !known.has(id) && known.add(id));
  chats.push(...added);
  list();
  const here = read.length - added.length;
  tell(`${added.length} imported${here ? `, ${here} were here already` : ""}.`);
  await store.putAll(added).catch(note);
});

function tell(words, isError = false) {
  $("import-note").textContent = words;
  $("import-note").classList.toggle("error", isError);
}
