// The page: what its buttons and keys do.

import { ask, isRunning, resume, stop } from "./answer.js";
import { fork, turn } from "./chats/branches.js";
import { allChats, current, goToChat, openChats, save } from "./chats/chats.js";
import { $, newId, say } from "./dom.js";
import { hasFiles, showFiles, takeFiles } from "./files.js";
import { openMessages, showMessages, startEdit, toEnd } from "./messages.js";
import { showAbout } from "./rows.js";
import {
  areValid, describe, hasServed, settings, showSettings, showTheme, watch,
} from "./settings.js";

const narrow = matchMedia("(max-width: 48rem)");
const drafts = new WeakMap();  // by chat: what is written in its field
let shown = null, isConnected = false;

// Shows a chat. elsewhere: another tab may be writing to it.
function show(chat, elsewhere = false) {
  if (chat !== shown) {
    if (shown) drafts.set(shown, $("prompt").value);
    $("prompt").value = drafts.get(chat) ?? "";
    shown = chat;
    showFiles(chat);
  }
  if (isConnected && !elsewhere) resume(chat, ended);
  showSettings(chat.settings);
  showMessages(chat);
  showAbout(chat.messages.findLast((message) => message.about)?.about ?? {});
  showState(chat);
}

function showState(chat) {
  if (chat !== current()) return;
  document.title = chat.title ? `${chat.title} · sparsekv-cli` : "sparsekv-cli";
  const runs = isRunning(chat), held = document.activeElement;
  $("send").hidden = runs;
  $("stop").hidden = !runs;
  if (held === $("send") || held === $("stop")) $("prompt").focus();
  $("log").setAttribute("aria-busy", String(runs));
}

// After a failure, or with an unknown model, another server may be there. It is asked what it has.
function ended(chat, error) {
  showState(chat);
  if (error ? error.name !== "AbortError" : !hasServed(chat)) connect();
}

function answer(forked) {
  const chat = current();
  chat.settings = settings(chat.settings);
  $("model-gone").textContent = "";
  ask(chat, ended, forked);
  showMessages(chat);
  showAbout({});
  showState(chat);
  say("The answer is being written.");
}

const canAsk = () => !isRunning(current()) && areValid();
const placeOf = (id) => current().messages.findIndex((message) => message.id === id);

openMessages({
  edit(id, content) {
    const place = placeOf(id), chat = current();
    if (place < 0 || !canAsk()) return;
    const { files } = chat.messages[place];
    addMine(chat, content, files, fork(chat, place));
    answer();
  },
  again(id) {
    const place = placeOf(id), chat = current(), message = chat.messages[place];
    if (place < 0 || !canAsk()) return;
    // An answer without a word is worth no branch.
    if (message.content || message.thinking) return answer(fork(chat, place));
    chat.messages.splice(place);
    answer(message.fork);
  },
  turn(id, steps) {
    const chat = current(), place = placeOf(id);
    if (isRunning(chat) || place < 0 || !turn(chat, chat.messages[place], steps)) return;
    show(chat);
    save(chat);
    const buttons = $("log").children[place].querySelectorAll(".branches button:enabled");
    buttons[steps < 0 ? 0 : buttons.length - 1]?.focus();
  },
});

function addMine(chat, content, files, forked) {
  const message = { id: newId(), role: "user", content };
  if (files?.length) message.files = files;
  if (forked) message.fork = forked;
  chat.messages.push(message);
}

$("form").addEventListener("submit", async (event) => {
  event.preventDefault();
  const chat = current();
  if (!$("method").value && !(await connect())) return;
  if (chat !== current() || !canAsk()) return;
  const content = $("prompt").value.trim();
  const files = takeFiles(chat);
  if (!files || (!content && !files.length)) return;
  $("prompt").value = "";
  addMine(chat, content, files);
  answer();
  toEnd();
});

$("prompt").addEventListener("keydown", (event) => {
  if (event.isComposing) return;
  if (event.key === "Enter" && !event.shiftKey) {
    event.preventDefault();
    $("form").requestSubmit();
  } else if (event.key === "ArrowUp" && !$("prompt").value && !isRunning(current())) {
    const mine = current().messages.findLast(({ role }) => role === "user");
    if (mine) {
      event.preventDefault();
      startEdit(mine);
    }
  }
});

document.addEventListener("keydown", (event) => {
  if (event.isComposing) return;
  if (event.key === "Escape" && !document.querySelector("dialog[open]")) {
    if (isOver()) showChats(false);
    else stop(current());
  } else if (event.altKey && event.code === "KeyN") {
    event.preventDefault();
    begin();
  }
});

// The list of conversations lies over the chat on a small screen.
const isOver = () => document.body.classList.contains("chats");
function showChats(open) {
  if (open === isOver()) return;
  document.body.classList.toggle("chats", open);
  $("open-chats").setAttribute("aria-expanded", String(open));
  (open ? $("close-chats") : $("open-chats")).focus();
}
document.addEventListener("click", (event) => {
  if (!isOver() || event.target.closest("nav, dialog") || !event.target.isConnected) return;
  event.preventDefault();
  event.stopPropagation();
  showChats(false);
}, { capture: true });

function fresh() {
  showChats(false);
  if (!narrow.matches) $("prompt").focus();
}

function begin() {
  fresh();
  goToChat(null);
  $("prompt").focus();
}

$("open-chats").addEventListener("click", () => showChats(true));
$("close-chats").addEventListener("click", () => showChats(false));
$("stop").addEventListener("click", () => stop(current()));
$("new").addEventListener("click", begin);
$("open-settings").addEventListener("click", () => $("settings").showModal());

function fit() {
  $("picture").open = !narrow.matches;
}
narrow.addEventListener("change", fit);

// Returns whether the server could be asked. The first time, the answers that it writes go on here.
async function connect() {
  try {
    await describe();
  } catch (error) {
    $("model-name").textContent = error.message;
    return false;
  }
  showSettings(current().settings);
  if (!isConnected) for (const chat of allChats()) resume(chat, ended);
  isConnected = true;
  showState(current());
  return true;
}

$("key").addEventListener("change", connect);
$("key-field").addEventListener("submit", (event) => event.preventDefault());
document.addEventListener("visibilitychange", () => !document.hidden && isConnected && connect());
addEventListener("pageshow", ({ persisted }) => {
  if (!persisted) return;
  isConnected = false;
  connect();
});
watch(() => {
  current().settings = settings(current().settings);
  save(current());
});

showTheme();
fit();
const draftOf = (chat) => (chat === shown ? $("prompt").value : drafts.get(chat));
const isEmpty = (chat) => !hasFiles(chat) && !draftOf(chat);
await openChats({ show, gone: stop, fresh, isRunning, isEmpty });
await connect();
if (!narrow.matches && !$("key-field").checkVisibility()) $("prompt").focus();
