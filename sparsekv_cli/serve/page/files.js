// Files that go with a message, by drag, by paste or by the button: texts, and documents.

import { documentText } from "./client.js";
import { $, button, make } from "./dom.js";

const MOST = 2 << 20;  // bytes of a text; the server takes a request of 4 MiB by default
// How files begin that the server reads: PDFs, Word files, and Office files, which it refuses.
const DOCUMENTS = ["%PDF-", "PK\x03\x04", "\xd0\xcf\x11\xe0"];
let files = [], problems = [], reading = Promise.resolve();

// Returns the files, and forgets them. Says so and returns null while one of them is read.
export function takeFiles() {
  const taken = files, open = taken.find((file) => file.ends);
  if (open) {
    tell([...problems, `${open.name} is being read: send the message when it is there.`]);
    return null;
  }
  keep([]);
  tell(problems = []);
  return taken;
}

function tell(words) {
  $("file-error").textContent = words.join(" ");
}

function keep(kept) {
  files = kept;
  $("files").replaceChildren(...files.map((file) => {
    const drop = button("×", () => {
      file.ends?.abort();
      remove(file);
      tell(problems = []);
    });
    drop.setAttribute("aria-label", `Remove ${file.name}`);
    return make("li", {}, file.name, file.ends ? " is being read…" : "", drop);
  }));
}

const remove = (file) => keep(files.filter((each) => each !== file));

// Adds files, whose names are on one line. They are read one after the other.
export function addFiles(list) {
  const added = [...list].map((blob) => (
    { name: blob.name.replace(/[\p{C}\s]+/gu, " "), blob, ends: new AbortController() }));
  if (!files.some((file) => file.ends)) tell(problems = []);
  keep([...files, ...added]);
  reading = reading.then(() => readAll(added));
  return reading;
}

async function readAll(added) {
  for (const file of added) {
    const { blob, ends, name } = file;
    try {
      file.text = await read(name, blob, ends.signal);
      delete file.blob;
      delete file.ends;
      keep(files);
    } catch (error) {
      remove(file);
      if (error.name === "AbortError") continue;
      const words = error.message;
      problems.push(words.startsWith(name) ? words : `${name}: ${words}`);
    }
  }
  tell(problems);
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

const hasFiles = (event) => event.dataTransfer?.types.includes("Files");
document.addEventListener("dragover", (event) => {
  if (!hasFiles(event)) return;
  event.preventDefault();
  document.body.classList.add("dropping");
});
document.addEventListener("dragleave", (event) => {
  if (!event.relatedTarget) document.body.classList.remove("dropping");
});
document.addEventListener("drop", (event) => {
  if (!hasFiles(event)) return;
  event.preventDefault();
  document.body.classList.remove("dropping");
  addFiles(event.dataTransfer.files);
  $("prompt").focus();
});
$("prompt").addEventListener("paste", (event) => {
  if (!event.clipboardData.files.length) return;
  event.preventDefault();
  addFiles(event.clipboardData.files);
});
$("attach").addEventListener("click", () => $("attach-input").click());
$("attach-input").addEventListener("change", async () => {
  await addFiles($("attach-input").files);
  $("attach-input").value = "";
  $("prompt").focus();
});
