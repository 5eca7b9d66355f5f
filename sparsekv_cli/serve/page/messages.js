// The messages of a chat as the page shows them.

import { $, button, copyButton, make } from "./dom.js";
import { markdown } from "./markdown.js";
import { perSecond, share } from "./rows.js";

const views = new WeakMap();  // by message
const EMPTY = "Ask the model something. " +
  "The picture shows which rows of the KV cache each layer reads for it.";
const NEAR = 120;  // pixels from the end within which the log follows an answer
let doings = null;

// given: {edit(message, text), again(message)}, what the buttons of a message do.
export function openMessages(given) {
  doings = given;
}

export function showMessages(chat) {
  $("log").replaceChildren(...chat.messages.map((message) => view(message, chat)));
  if (!chat.messages.length) $("log").append(make("p", { className: "empty", textContent: EMPTY }));
  for (const message of chat.messages) update(message);
  toEnd();
}

export function toEnd() {
  $("log").scrollTop = $("log").scrollHeight;
}

function view(message, chat) {
  const mine = message.role === "user", name = mine ? "You" : "Answer";
  const article = make("article", { className: `message ${message.role}` }, make("h2", {}, name));
  views.set(message, mine ? ofUser(message, chat, article) : ofModel(message, article));
  return article;
}

function ofUser(message, chat, article) {
  const body = make("div", { className: "body" });
  for (const { name, text } of message.files ?? []) {
    const pre = make("pre", { tabIndex: 0, textContent: text });
    body.append(make("details", { className: "file" }, make("summary", {}, name), pre));
  }
  body.append(make("div", { className: "said", textContent: message.content }));
  const edit = button("Edit", () => editor(message, chat, article), { className: "edit" });
  const actions = make("div", { className: "actions" },
    edit, copyButton(() => message.content, "Copy the message"));
  article.append(body, actions);
  return { article };
}

function editor(message, chat, article) {
  const field = make("textarea", { value: message.content, rows: 3 });
  field.setAttribute("aria-label", "Edit the message");
  const isLast = chat.messages.indexOf(message) >= chat.messages.length - 2;
  const hint = isLast ? "" : "The messages after it will be removed.";
  const cancel = button("Cancel", () => {
    form.replaceWith(...old);
    old[1].querySelector("button").focus();
  });
  const send = make("button", { className: "main", textContent: "Send" });
  const form = make("form", { className: "edit-form" }, field,
    make("div", { className: "actions" }, send, cancel, hint));
  const old = [...article.children].slice(1);
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (field.value.trim() || message.files?.length) doings.edit(message, field.value.trim());
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
  views.get(message)?.article.querySelector(".edit")?.click();
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
  const again = button("Regenerate", () => doings.again(message), { className: "again" });
  seen.actions.append(again, copyButton(() => message.content, "Copy the answer"), seen.about);
  article.append(seen.waits, seen.thinking, seen.text, seen.note, seen.actions);
  return seen;
}

// Shows what a message has become.
export function update(message) {
  const seen = views.get(message);
  if (!seen?.text) return;
  const log = $("log"), isNear = log.scrollHeight - log.scrollTop - log.clientHeight < NEAR;
  const isOpen = message.state === "writing", about = message.about ?? {};
  seen.waits.textContent = isOpen && !message.content ? message.waits ?? "" : "";
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
  if (isNear) toEnd();
}

// The model where there are several, the method and what it did, with the answer.
function describe(about) {
  if (!about.method) return "";
  const parts = [about.model, about.method, about.budget && `budget ${about.budget}`];
  if (about.attended != null)
    parts.push(perSecond(about), `${share(about)} of rows read`, `${about.n} tokens`);
  return parts.filter(Boolean).join(" · ");
}
