// Files that go with a message, by drag, by paste or by the button: texts, and documents.

import { documentText } from "./client.js";
import { $, button, make } from "./dom.js";

const LONG_TEXT = 50_000;  // characters of a text that may be pasted into a field
const MOST = 2 << 20;  // bytes of a text; the server takes a request of 4 MiB by default
// How files begin that the server reads: PDFs, Word files, and Office files, which it refuses.
const DOCUMENTS = ["%PDF-", "PK\x03\x04", "\xd0\xcf\x11\xe0"];
const ofChats = new WeakMap();  // by chat: the files of its next message, and what went wrong
let shown = { files: [], problems: [] }, reading = Promise.resolve();

// Shows the files that wait in a chat.
export function showFiles(chat) {
  shown = waiting(chat);
  keep(shown, shown.files);
  tell(shown);
}

function waiting(chat) {
  if (!ofChats.has(chat)) ofChats.set(chat, { files: [], problems: [] });
  return ofChats.get(chat);
}

export const hasFiles = (chat) => waiting(chat).files.length > 0;

// Returns the files of a chat, and forgets them. Says so and returns null while one is being read.
export function takeFiles(chat) {
  const mine = waiting(chat), taken = mine.files, open = taken.find((file) => file.ends);
  if (open) {
    tell(mine, `${open.name} is being read: send the message when it is there.`);
    return null;
  }
  mine.problems = [];
  keep(mine, []);
  tell(mine);
  return taken;
}

function tell(mine, ...words) {
  if (mine === shown) $("file-error").textContent = [...mine.problems, ...words].join(" ");
}

function keep(mine, files) {
  mine.files = files;
  if (mine !== shown) return;
  $("files").replaceChildren(...files.map((file) => {
    const drop = button("×", () => {
      file.ends?.abort();
      mine.problems = [];
      remove(mine, file);
      tell(mine);
    });
    drop.setAttribute("aria-label", `Remove ${file.name}`);
    return make("li", {}, file.name, file.ends ? " is being read…" : "", drop);
  }));
}

const remove = (mine, file) => keep(mine, mine.files.filter((each) => each !== file));

// Adds files to the shown chat. Their names are on one line. They are read one after the other.
export function addFiles(list) {
  const mine = shown, added = [...list].map((blob) => (
    { name: blob.name.replace(/[\p{C}\s]+/gu, " "), blob, ends: new AbortController() }));
  if (!mine.files.some((file) => file.ends)) mine.problems = [];
  tell(mine);
  keep(mine, [...mine.files, ...added]);
  reading = reading.then(() => readAll(mine, added));
  return reading;
}

async function readAll(mine, added) {
  for (const file of added) {
    const { blob, ends, name } = file;
    try {
      file.text = await read(name, blob, ends.signal);
      delete file.blob;
      delete file.ends;
      keep(mine, mine.files);
    } catch (error) {
      remove(mine, file);
      if (error.name === "AbortError") continue;
      const words = error.message;
      mine.problems.push(words.startsWith(name) ? words : `${name}: ${words}`);
    }
  }
  tell(mine);
}

async function read(name, blob, signal) {
  const start = new TextDecoder("latin1").decode(await blob.slice(0, 8).arrayBuffer());
  if (DOCUMENTS.some((each) => start.startsWith(each)))
    return documentText(name, blob, signal).catch((error) => {
      if (!(error instanceof TypeError)) throw error;
      throw new Error("it did not reach the server: is it larger than serve --max-body allows?");
    });
  if (blob.size > MOST) throw new Error(`it has ${blob.size} bytes: at most ${MOST} are taken.`);
  try {
    const marked = { "\xff\xfe": "utf-16le", "\xfe\xff": "utf-16be" }[start.slice(0, 2)];
    const decoder = new TextDecoder(marked ?? "utf-8", { fatal: true });
    const text = decoder.decode(await blob.arrayBuffer());
    if (!text.includes("\0")) return text;
  } catch { /* told below */ }
  throw new Error("it is no UTF-8 text, PDF or Word file: only these are taken.");
}

// A message as the model gets it: each file as a fenced block, then the words.
export function withFiles({ content, files }) {
  const parts = (files ?? []).map(({ name, text }) => {
    const longest = (text.match(/`+/g) ?? []).reduce((n, { length }) => Math.max(n, length), 2);
    const fence = "`".repeat(longest + 1);
    return `${name}:\n${fence}\n${text.trimEnd()}\n${fence}\n\n`;
  });
  return parts.join("") + content;
}

const bringsFiles = (event) => event.dataTransfer?.types.includes("Files");
document.addEventListener("dragover", (event) => {
  if (!bringsFiles(event)) return;
  event.preventDefault();
  document.body.classList.add("dropping");
});
document.addEventListener("dragleave", (event) => {
  if (!event.relatedTarget) document.body.classList.remove("dropping");
});
document.addEventListener("drop", (event) => {
  if (!bringsFiles(event)) {
    takeLongText(event, event.dataTransfer);
    return;
  }
  event.preventDefault();
  document.body.classList.remove("dropping");
  addFiles(event.dataTransfer.files);
  $("prompt").focus();
});
document.addEventListener("paste", (event) => {
  const { clipboardData: data, target } = event;
  if (target !== $("prompt") || !data.files.length) return takeLongText(event, data);
  event.preventDefault();
  addFiles(data.files);
});

// A field with a very long text makes a browser wait. Such a text becomes a file of the message.
function takeLongText(event, data) {
  const text = event.target.matches?.("textarea") ? data?.getData("text/plain") ?? "" : "";
  if (text.length <= LONG_TEXT) return;
  event.preventDefault();
  addFiles([new File([text], "pasted text.txt")]);
}
$("attach").addEventListener("click", () => $("attach-input").click());
$("attach-input").addEventListener("change", async () => {
  await addFiles($("attach-input").files);
  $("attach-input").value = "";
  $("prompt").focus();
});
