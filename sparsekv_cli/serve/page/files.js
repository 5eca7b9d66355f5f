// Files that go with a message: texts, by drag, by paste or by the button.

import { $, button, make } from "./dom.js";

const MOST = 2 << 20;  // bytes of a file; the server takes a request of 4 MiB by default
let files = [];

export function takeFiles() {
  const taken = files;
  keep([]);
  return taken;
}

function keep(kept) {
  files = kept;
  showFiles();
}

export async function addFiles(list) {
  const errors = [];
  for (const file of list) {
    try {
      files.push({ name: file.name, text: await readText(file) });
    } catch (error) {
      errors.push(error.message);
    }
  }
  showFiles();
  $("file-error").textContent = errors.join(" ");
}

async function readText(file) {
  const { name, size } = file;
  if (size > MOST) throw new Error(`${name} has ${size} bytes: at most ${MOST} are taken.`);
  const bytes = new Uint8Array(await file.arrayBuffer());
  if (new TextDecoder("latin1").decode(bytes.slice(0, 5)) === "%PDF-")
    throw new Error(`${name} is a PDF, and only text and code are taken: ` +
      "make a text of it first, for example with pdftotext.");
  try {
    const text = new TextDecoder("utf-8", { fatal: true }).decode(bytes);
    if (!text.includes("\0")) return text;
  } catch { /* told below */ }
  throw new Error(`${name} is no UTF-8 text: only text and code are taken.`);
}

function showFiles() {
  $("file-error").textContent = "";
  $("files").replaceChildren(...files.map((file) => {
    const drop = button("×", () => keep(files.filter((each) => each !== file)));
    drop.setAttribute("aria-label", `Remove ${file.name}`);
    return make("li", {}, file.name, drop);
  }));
}

// A message as the model gets it: each file as a fenced block, then the words.
export function withFiles({ content, files }) {
  const parts = (files ?? []).map(({ name, text }) => {
    const longest = Math.max(2, ...(text.match(/`+/g) ?? []).map((each) => each.length));
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
