// The server's protocol.

import { $ } from "./dom.js";

export function headers() {
  const key = $("key").value;
  return { "content-type": "application/json", ...(key && { authorization: "Bearer " + key }) };
}

// Returns an object of the server's. Raises an Error with the server's own words.
export async function get(path) {
  const response = await fetch(path, { headers: headers() });
  if (!response.ok) throw new Error(await reason(response));
  return response.json();
}

// Yields the events of an answer: [name, object], or ["comment", text].
export async function* events(request, signal) {
  const response = await fetch("/v1/chat/completions", {
    method: "POST", headers: headers(), body: JSON.stringify(request), signal,
  });
  if (!response.ok) throw new Error(await reason(response));
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

async function reason(response) {
  if (response.status === 401) {
    $("key-field").hidden = false;
    $("key").focus();
  }
  try {
    return (await response.json()).error.message;
  } catch {
    return `status ${response.status}`;
  }
}
