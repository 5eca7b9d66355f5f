// The messages of a chat as the page shows them.

import { $, button, copyButton, make } from "./dom.js";
import { denseBelow, perSecond, share } from "./rows.js";
import { markdown } from "./text/markdown.js";
import { shownWait } from "./waiting.js";

let views = new Map();  // by the message's id
const EMPTY = "Ask the model something. " +
  "The picture shows which rows of the KV cache each layer reads for it.";
const NEAR = 120;  // pixels from the end within which the log follows an answer
let doings = null;

// given: what the buttons of a message do: edit(id, text), again(id) and turn(id, steps).
export function openMessages(given) {
  doings = given;
}

// Shows a chat. A message that is being edited stays as it is if the chat has it.
export function showMessages(chat) {
  const log = $("log"), edited = views, wasNear = isNear();
  views = new Map();
  const shown = chat.messages.map((message) => {
    const before = edited.get(message.id);
    const stays = before?.article.isConnected && before.article.querySelector(".edit-form");
    views.set(message.id, stays ? before : view(message, chat));
    return views.get(message.id).article;
  });
  if (!shown.length) shown.push(make("p", { className: "empty", textContent: EMPTY }));
  const isSame = shown.some((article) => article.isConnected);
  for (const child of [...log.children]) if (!shown.includes(child)) child.remove();
  shown.forEach((article, i) => {  // one that stays keeps the focus, so it is not moved
    if (log.children[i] !== article) log.insertBefore(article, log.children[i] ?? null);
  });
  for (const message of chat.messages) update(message);
  if (!isSame || wasNear) toEnd();
}

export function toEnd() {
  $("log").scrollTop = $("log").scrollHeight;
}

function isNear() {
  const log = $("log");
  return log.scrollHeight - log.scrollTop - log.clientHeight < NEAR;
}

function view(message, chat) {
  const mine = message.role === "user", name = mine ? "You" : "Answer";
  const article = make("article", { className: `message ${message.role}` }, make("h2", {}, name));
  return mine ? ofUser(message, chat, article) : ofModel(message, article);
}

// The buttons that show the other branches of a fork.
function branches({ id, fork }) {
  if (!fork) return [];
  const { at, tails } = fork, words = `Branch ${at + 1} of ${tails.length}`;
  const step = (text, label, by) => {
    const turn = button(text, () => doings.turn(id, by), { disabled: !tails[at + by] });
    turn.setAttribute("aria-label", label);
    return turn;
  };
  const group = make("span", { className: "branches" }, step("‹", "Previous branch", -1),
    make("span", {}, `${at + 1}/${tails.length}`), step("›", "Next branch", 1));
  group.setAttribute("role", "group");
  group.setAttribute("aria-label", words);
  return [group];
}

function ofUser(message, chat, article) {
  const body = make("div", { className: "body" });
  for (const { name, text } of message.files ?? []) {
    const pre = make("pre", { tabIndex: 0, textContent: text });
    body.append(make("details", { className: "file" }, make("summary", {}, name), pre));
  }
  body.append(make("div", { className: "said", textContent: message.content }));
  const edit = button("Edit", () => editor(message, chat, article), { className: "edit" });
  const actions = make("div", { className: "actions" }, ...branches(message),
    edit, copyButton(() => message.content, "Copy the message"));
  article.append(body, actions);
  return { article };
}

function editor(message, chat, article) {
  const field = make("textarea", { value: message.content, rows: 3 });
  field.setAttribute("aria-label", "Edit the message");
  const isLast = chat.messages.indexOf(message) >= chat.messages.length - 2;
  const hint = isLast ? "" : "The messages after it stay in a branch of their own.";
  const cancel = button("Cancel", () => {
    form.replaceWith(...old);
    old[1].querySelector(".edit").focus();
  });
  const send = make("button", { className: "main", textContent: "Send" });
  const form = make("form", { className: "edit-form" }, field,
    make("div", { className: "actions" }, send, cancel, hint));
  const old = [...article.children].slice(1);
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (field.value.trim() || message.files?.length) doings.edit(message.id, field.value.trim());
  });
  field.addEventListener("keydown", (event) => {
    if (event.isComposing) return;
    if (event.key === "Enter" && !event.shiftKey) {
      event.preventDefault();
      form.requestSubmit();
    } else if (event.key === "Escape") {
      event.stopPropagation();
      cancel.click();
    }
  });
  old[0].replaceWith(form);
  old[1].remove();
  field.focus();
}

export function startEdit(message) {
  views.get(message.id)?.article.querySelector(".edit")?.click();
}

function ofModel(message, article) {
  const seen = {
    article,
    waits: make("p", { className: "waits" }),
    thinking: make("details", { className: "thinking", hidden: true },
      make("summary"), make("div", { className: "said" })),
    text: make("div", { className: "text" }),
    note: make("p", { className: "note" }),
    about: make("span", { className: "about" }),
    actions: make("div", { className: "actions", hidden: true }),
  };
  const again = button("Regenerate", () => doings.again(message.id), { className: "again" });
  const copy = copyButton(() => message.content, "Copy the answer");
  seen.actions.append(...branches(message), again, copy, seen.about);
  article.append(seen.waits, seen.thinking, seen.text, seen.note, seen.actions);
  return seen;
}

// Shows what a message has become.
export function update(message) {
  const seen = views.get(message.id);
  if (!seen?.text) return;
  const wasNear = isNear();
  const isOpen = message.state === "writing", about = message.about ?? {};
  seen.waits.textContent = isOpen ? shownWait(message) : "";
  seen.thinking.hidden = !message.thinking;
  if (message.thinking) {
    const [summary, text] = seen.thinking.children;
    summary.textContent = isOpen && !message.content ? "Thinking…" : "Thinking";
    text.textContent = message.thinking;
  }
  markdown(message.content, seen.text);
  seen.note.textContent = message.note ?? "";
  seen.note.classList.toggle("error", message.state === "failed");
  seen.actions.hidden = isOpen;
  seen.about.textContent = isOpen ? "" : describe(about);
  if (wasNear) toEnd();
}

// The model where there are several, the method and what it did, with the answer.
function describe(about) {
  if (!about.method) return "";
  const parts = [about.model, about.method, about.budget && `budget ${about.budget}`];
  if (about.used <= about.sparse_from) parts.push(denseBelow(about.sparse_from));
  if (about.attended != null)
    parts.push(perSecond(about), `${share(about)} of rows read`, `${about.n} tokens`);
  return parts.filter(Boolean).join(" · ");
}
