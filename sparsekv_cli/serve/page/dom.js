// Elements of the page. Text becomes text nodes; nothing here or elsewhere is given as markup.

export const $ = (id) => document.getElementById(id);

export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  Object.assign(element, attributes);
  element.append(...children);
  return element;
}

export function button(text, action, attributes = {}) {
  const element = make("button", { type: "button", textContent: text, ...attributes });
  element.addEventListener("click", action);
  return element;
}

// 32 hexadecimal digits that nobody can guess.
export function newId() {
  const bytes = [...crypto.getRandomValues(new Uint8Array(16))];
  return bytes.map((byte) => byte.toString(16).padStart(2, "0")).join("");
}

// Saves texts as one file.
export function download(parts, type, name) {
  const href = URL.createObjectURL(new Blob(parts, { type }));
  make("a", { href, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(href), 1000);
}

// A button that copies a text and says so.
export function copyButton(text, label) {
  const element = button("Copy", async () => {
    element.textContent = (await copy(text())) ? "Copied" : "Not copied";
    say(element.textContent + ".");
    setTimeout(() => { element.textContent = "Copy"; }, 1500);
  });
  element.setAttribute("aria-label", label);
  return element;
}

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {  // a browser has no clipboard for pages without encryption
    const field = make("textarea", { value: text, className: "hidden" });
    document.body.append(field);
    field.select();
    const done = document.execCommand("copy");
    field.remove();
    return done;
  }
}

// Tells a screen reader.
export function say(text) {
  $("status").textContent = text;
}

// Asks before something is lost.
export function confirmed(text) {
  const dialog = $("confirm");
  $("confirm-text").textContent = text;
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => resolve(dialog.returnValue === "yes"), { once: true });
  });
}
