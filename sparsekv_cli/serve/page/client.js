// The server's protocol.

import { $ } from "./dom.js";

export function headers() {
  const key = $("key").value;
  return { "content-type": "application/json", ...(key && { authorization: "Bearer " + key }) };
}

// Returns an object of the server's. Raises an Error with the server's own words.
export async function get(path) {
  const response = await fetch(path, { headers: headers() });
  if (!response.ok) throw await failure(response);
  return response.json();
}

// Returns the text of a PDF or a Word file, which the server reads.
export async function documentText(name, file, signal) {
  const asked = { ...headers(), "content-type": "application/octet-stream" };
  const response = await fetch(`/documents?${new URLSearchParams({ name })}`,
    { method: "POST", headers: asked, body: file, signal });
  if (!response.ok) throw await failure(response);
  return (await response.json()).text;
}

const answerPath = (id) => `/v1/answers/${id}`;

// Yields the events of a new answer: [name, object], or ["comment", text]. The server goes on with
// it when this page is away.
export const begin = (id, request, signal) =>
  events(id, { method: "PUT", body: JSON.stringify(request), signal });

// Yields the events of an answer again, from the first one on.
export const again = (id, signal) => events(id, { signal });

// Ends an answer. One that the server does not have is ended too.
export async function end(id) {
  const asked = { method: "DELETE", headers: headers(), keepalive: true };
  await fetch(answerPath(id), asked).catch(() => {});
}

async function* events(id, options) {
  const response = await fetch(answerPath(id), { headers: headers(), ...options });
  if (!response.ok) throw await failure(response);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    held += value;
    const parts = held.split("\n\n");
    held = parts.pop();
    for (const part of parts) {
      const name = part.match(/^event: (.*)$/m), data = part.match(/^data: (.*)$/m);
      if (part.startsWith(": ")) yield ["comment", part.slice(2)];
      else if (data && data[1] !== "[DONE]") yield [name ? name[1] : "", JSON.parse(data[1])];
    }
  }
}

async function failure(response) {
  const { status } = response;
  if (status === 401) {
    $("key-field").hidden = false;
    $("key").focus();
  }
  let words = `status ${status}`;
  try {
    words = (await response.json()).error.message;
  } catch { /* not of this server */ }
  return Object.assign(new Error(words), { status });
}
