// Conversations as files: one as Markdown, all as JSON, and the way back.

import { download, newId } from "../dom.js";
import { withFiles } from "../files.js";

const FORMAT = "sparsekv-cli conversations";
const MOST = 256 << 20;  // bytes of a file
const MOST_MESSAGES = 100_000, DEEPEST = 100, MOST_LAYERS = 1024, MOST_BINS = 256;
const ABOUT = ["method", "model", "budget", "n", "prompt", "cached", "used", "size", "attended"];
ABOUT.push("speed", "first", "accepted", "sparse_from", "changed");

// Saves the shown branch of a conversation as a Markdown file.
export function exportChat(chat) {
  const parts = chat.messages.map((message) => {
    if (message.role === "user") return `## You\n\n${withFiles(message)}\n`;
    const by = [message.about?.model, message.about?.method].filter(Boolean).join(", ");
    return `## Answer${by && ` (${by})`}\n\n${message.content}\n`;
  });
  const words = chat.settings.system?.trim(), system = words ? [`## System\n\n${words}\n`] : [];
  const name = chat.title.replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-+|-+$/g, "") || "chat";
  const text = [`# ${chat.title}\n`, ...system, ...parts].join("\n");
  download([text], "text/markdown", `${name}.md`);
}

export function exportAll(chats) {
  const texts = chats.map((chat, i) => `${i ? "," : ""}\n${JSON.stringify(chat)}`);
  const start = `{"format": ${JSON.stringify(FORMAT)}, "version": 1, "chats": [`;
  download([start, ...texts, "\n]}\n"], "application/json", "conversations.json");
}

// Returns the conversations of a file. Raises an Error that says what is wrong with it.
export async function readChats(file) {
  if (file.size > MOST) throw new Error(`it has ${file.size} bytes: at most ${MOST} are taken.`);
  let values;
  try {
    values = JSON.parse(await file.text());
  } catch {
    throw new Error("it is no JSON. Import takes the file that “Export all” saves.");
  }
  if (values?.format !== FORMAT || values.version !== 1 || !Array.isArray(values.chats))
    throw new Error("it holds no conversations. Import takes the file that “Export all” saves.");
  const left = { messages: MOST_MESSAGES };
  return values.chats.map((chat, i) => {
    try {
      return chatOf(chat, left);
    } catch (error) {
      throw new Error(`conversation ${i + 1}: ${error.message}`);
    }
  });
}

const check = (is, words) => {
  if (!is) throw new Error(words);
};
const isObject = (value) => typeof value === "object" && value !== null && !Array.isArray(value);

function textOf(value, name) {
  check(typeof value === "string", `${name}: expected a text`);
  return value;
}

// A copy with the known fields only.
function chatOf(chat, left) {
  check(isObject(chat), "expected an object");
  const { id, title, changed, messages, settings } = chat;
  check(/^[\w.-]{1,64}$/.test(textOf(id, "id")), "id: expected letters, digits and dashes");
  check(isObject(settings ?? {}), "settings: expected an object");
  const simple = ([, value]) => ["string", "boolean"].includes(typeof value);
  return {
    id, title: textOf(title, "title").slice(0, 100) || "Chat",
    changed: Math.min(Number.isFinite(changed) ? changed : 0, Date.now()),
    messages: listOf(messages, left, 0),
    settings: Object.fromEntries(Object.entries(settings ?? {}).filter(simple).slice(0, 64)),
  };
}

function listOf(messages, left, depth) {
  check(Array.isArray(messages) && messages.length, "messages: expected a list with messages");
  check(depth <= DEEPEST, `expected at most ${DEEPEST} branches in each other`);
  return messages.map((message, i) => {
    left.messages -= 1;
    check(left.messages >= 0, `expected at most ${MOST_MESSAGES} messages in the file`);
    check(isObject(message), `message ${i + 1}: expected an object`);
    return messageOf(message, left, depth);
  });
}

function messageOf({ role, content, thinking, note, state, files, about, fork }, left, depth) {
  check(["user", "assistant"].includes(role), "role: expected user or assistant");
  const kept = { id: newId(), role, content: textOf(content, "content") };
  if (role === "assistant") {
    kept.thinking = textOf(thinking ?? "", "thinking");
    kept.state = ["whole", "failed"].includes(state) ? state : "stopped";
    if (note != null) kept.note = textOf(note, "note");
    kept.about = aboutOf(about ?? {});
  } else if (files != null) {
    check(Array.isArray(files), "files: expected a list");
    kept.files = files.map((file) => (
      { name: textOf(file?.name, "files.name"), text: textOf(file.text, "files.text") }));
  }
  if (fork != null) kept.fork = forkOf(fork, left, depth);
  return kept;
}

function aboutOf(about) {
  check(isObject(about), "about: expected an object");
  const kept = {};
  for (const name of ABOUT)
    if (["string", "number"].includes(typeof about[name])) kept[name] = about[name];
  const { rows } = about;
  const isList = (list, most) => Array.isArray(list) && list.length <= most;
  const isRow = (row) => isList(row, MOST_BINS) && row.every(Number.isFinite);
  if (isList(rows, MOST_LAYERS) && rows.every(isRow)) kept.rows = rows;
  return kept;
}

function forkOf({ at, tails }, left, depth) {
  check(Array.isArray(tails) && Number.isInteger(at) && at >= 0 && at < tails.length,
    "fork: expected a list of branches and the place of the shown one");
  return { at, tails: tails.map((tail, i) => (i === at ? null : listOf(tail, left, depth + 1))) };
}
