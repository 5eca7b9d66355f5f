// The page: what its buttons and keys do.

import { ask, isRunning, stop } from "./answer.js";
import { current, newChat, openChats, save } from "./chats.js";
import { $, say } from "./dom.js";
import { takeFiles } from "./files.js";
import { openMessages, showMessages, startEdit, toEnd } from "./messages.js";
import { showAbout } from "./rows.js";
import { areValid, describe, settings, showSettings, showTheme, watch } from "./settings.js";

const narrow = matchMedia("(max-width: 48rem)");

// Shows a chat. elsewhere: another tab may be writing to it.
function show(chat, elsewhere = false) {
  for (const message of chat.messages) {
    if (message.state !== "writing" || isRunning(chat) || elsewhere) continue;
    message.state = "stopped";  // the page was closed
    message.note = "This answer was interrupted.";
  }
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

// A model that is not found is gone: what the server has now is shown.
function ended(chat, status) {
  showState(chat);
  if (status === 404) connect();
}

function answer() {
  const chat = current();
  chat.settings = settings(chat.settings);
  $("model-gone").textContent = "";
  ask(chat, ended);
  showMessages(chat);
  showAbout({});
  showState(chat);
  say("The answer is being written.");
}

const canAsk = () => !isRunning(current()) && areValid();

// Removes a message and those after it.
function cut(message) {
  const { messages } = current();
  messages.length = messages.indexOf(message);
}

openMessages({
  edit(message, content) {
    if (!canAsk()) return;
    cut(message);
    current().messages.push({ ...message, content });
    answer();
  },
  again(message) {
    if (!canAsk()) return;
    cut(message);
    answer();
  },
});

$("form").addEventListener("submit", async (event) => {
  event.preventDefault();
  if (!$("method").value && !(await connect())) return;
  if (!canAsk()) return;
  const content = $("prompt").value.trim(), chat = current();
  const files = takeFiles();
  if (!files || (!content && !files.length)) return;
  $("prompt").value = "";
  chat.messages.push({ role: "user", content, ...(files.length && { files }) });
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
    fresh();
    newChat();
    $("prompt").focus();
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

$("open-chats").addEventListener("click", () => showChats(true));
$("close-chats").addEventListener("click", () => showChats(false));
$("stop").addEventListener("click", () => stop(current()));
$("new").addEventListener("click", () => {
  fresh();
  newChat();
  $("prompt").focus();
});
$("open-settings").addEventListener("click", () => $("settings").showModal());

function fit() {
  $("picture").open = !narrow.matches;
  $("budget").placeholder = narrow.matches ? "budget" : "default";
}
narrow.addEventListener("change", fit);

// Returns whether the server could be asked.
async function connect() {
  try {
    await describe();
    showSettings(current().settings);
    return true;
  } catch (error) {
    $("model-name").textContent = error.message;
    return false;
  }
}

$("key").addEventListener("change", connect);
$("key-field").addEventListener("submit", (event) => event.preventDefault());
watch(() => {
  current().settings = settings(current().settings);
  save(current());
});

showTheme();
fit();
await openChats({ show, gone: stop, fresh, isRunning });
await connect();
if (!narrow.matches && !$("key-field").checkVisibility()) $("prompt").focus();
