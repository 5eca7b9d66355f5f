// An answer: asked for, read as it is written, kept.

import { events } from "./client.js";
import { current, newId, save } from "./chats.js";
import { say } from "./dom.js";
import { withFiles } from "./files.js";
import { update } from "./messages.js";
import { N_BINS, showAbout } from "./rows.js";
import { fields, systemPrompt } from "./settings.js";

const SAVE_MS = 2000;
const running = new Map();  // by chat: what ends its answer

export const isRunning = (chat) => running.has(chat);
export const stop = (chat) => running.get(chat)?.abort();
// A browser that can bring a page back keeps its connections for a while.
addEventListener("pagehide", ({ persisted }) => persisted && [...running.keys()].forEach(stop));

// Asks for the answer to the last message. changed(chat, status): called when the answer has ended;
// status: of a request that was refused.
export function ask(chat, changed) {
  const request = {
    messages: requested(chat), stream: true, stream_options: { include_usage: true },
    return_progress: true, sparsekv_rows: N_BINS, ...fields(),
  };
  const about = { method: request.method, model: request.model };
  const answer = {
    id: newId(), role: "assistant", content: "", thinking: "", state: "writing", about,
  };
  chat.messages.push(answer);
  running.set(chat, new AbortController());
  save(chat);
  write(chat, answer, request, changed);
}

// The messages for the model. Those that got no answer are left out, since templates want turns.
function requested({ messages }) {
  const system = systemPrompt();
  const asked = system ? [{ role: "system", content: system }] : [];
  messages.forEach((message, i) => {
    const answer = message.role === "user" ? messages[i + 1] : message;
    if (!answer || answer.content)
      asked.push({ role: message.role, content: withFiles(message) });
  });
  return asked;
}

async function write(chat, answer, request, changed) {
  const screen = painter(chat, answer), started = performance.now();
  let whole = false, status;
  try {
    for await (const [name, data] of events(request, running.get(chat).signal)) {
      if (name === "error") throw new Error(data.error.message);
      if (name === "comment") waits(answer, data);
      else if (name === "sparsekv.rows") step(answer, data, started);
      else whole = part(answer, data, started) || whole;
      screen.soon();
    }
    if (!whole) throw new Error("the connection ended before the answer was whole");
    answer.state = "whole";
    say("The answer is complete.");
  } catch (error) {
    const stopped = error.name === "AbortError";
    status = error.status;
    answer.state = stopped ? "stopped" : "failed";
    answer.note = stopped ? "Stopped." : `Error: ${error.message}`;
    say(answer.note);
  }
  delete answer.about.read;
  running.delete(chat);
  screen.end();
  save(chat);
  changed(chat, status);
}

function waits(answer, text) {
  const progress = /^prefill (\d+) of (\d+)/.exec(text);
  if (!progress && text !== "ping") answer.waits = `${text}…`;
}

function step(answer, { rows, tokens, accepted }, started) {
  const about = answer.about;
  about.rows = rows;
  about.n = (about.n ?? 0) + tokens;
  about.accepted = (about.accepted ?? 0) + accepted;
  const seconds = (performance.now() - started) / 1000 - (about.first ?? 0);
  if (about.first && seconds > 0) about.speed = about.n / seconds;
}

// Takes a part of the answer. Returns whether it is the last.
function part(answer, data, started) {
  const about = answer.about;
  if (data.prompt_progress) {
    const { processed, total } = data.prompt_progress;
    [about.read, about.prompt] = [processed, total];
    answer.waits = `Reading the prompt: ${processed} of ${total} tokens…`;
  }
  const [choice] = data.choices ?? [], delta = choice?.delta ?? {};
  answer.thinking += delta.reasoning_content ?? "";
  answer.content += delta.content ?? "";
  if (!about.first && (delta.content || delta.reasoning_content))
    about.first = (performance.now() - started) / 1000;
  if (choice?.finish_reason === "length") answer.note = "The answer ends at the limit of tokens.";
  if (!data.usage) return false;
  const { context, ledger, method, timings } = data.sparsekv, { usage } = data;
  Object.assign(about, {
    method: method.name, budget: method.options.budget, n: usage.completion_tokens,
    prompt: usage.prompt_tokens, cached: usage.prompt_tokens_details.cached_tokens,
    used: context.used, size: context.size,
    attended: ledger.rows_attended / Math.max(1, ledger.rows_total),
  });
  if (timings.decode_s > 0) about.speed = usage.completion_tokens / timings.decode_s;
  return true;
}

// Shows an answer as it grows: at most every 50 ms, and less often where that takes long.
function painter(chat, answer) {
  let timer = null, saved = performance.now(), pause = 50;
  const paint = () => {
    timer = null;
    const began = performance.now();
    update(answer);
    if (chat === current()) showAbout(answer.about);
    pause = Math.max(50, 4 * (performance.now() - began));
    if (answer.state === "writing" && began - saved > SAVE_MS) {
      saved = began;
      save(chat);
    }
  };
  return {
    soon: () => { timer ??= setTimeout(paint, pause); },
    end: () => { clearTimeout(timer); paint(); },
  };
}
