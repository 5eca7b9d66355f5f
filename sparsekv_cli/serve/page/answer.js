// Answers: asked for, read as they are written, kept, and found again after the page was away.

import { again, begin, end } from "./client.js";
import { allMessages } from "./chats/branches.js";
import { current, save } from "./chats/chats.js";
import { newId, say } from "./dom.js";
import { withFiles } from "./files.js";
import { update } from "./messages.js";
import { N_BINS, showAbout } from "./rows.js";
import { fields, systemPrompt } from "./settings.js";
import { takeComment, takeProgress, waitsFor } from "./waiting.js";

const SAVE_MS = 2000;
const PAUSES = [500, 1000, 2000, 4000, 8000, 16_000];  // ms before a lost connection is tried again
const running = new Map();  // by chat: its answer, and what ends the connection
let isLeft = false;

export const isRunning = (chat) => running.has(chat);

// Ends the answer of a chat, on the server too.
export function stop(chat) {
  const { answer, ends } = running.get(chat) ?? {};
  if (!answer) return;
  ends.abort();
  end(answer.id);
}

// The server goes on while the page is away. A browser may bring the page back as it was.
addEventListener("pagehide", () => {
  isLeft = true;
  for (const { ends } of running.values()) ends.abort();
});
addEventListener("pageshow", () => { isLeft = false; });

// Asks for the answer to the last message. fork: of the answer, if it has one. changed: called with
// the chat and the error, if any, when the answer has ended.
export function ask(chat, changed, fork) {
  const request = {
    messages: requested(chat), stream: true, stream_options: { include_usage: true },
    return_progress: true, sparsekv_rows: N_BINS, ...fields(),
  };
  const about = { method: request.method, model: request.model };
  const answer = {
    id: newId(), role: "assistant", content: "", thinking: "", state: "writing", about,
    started: Date.now(), ...(fork && { fork }),
  };
  chat.messages.push(answer);
  const saved = save(chat);  // first: who loads the page again finds the answer by its id
  write(chat, answer, changed, async function* (signal) {
    await saved;
    yield* begin(answer.id, request, signal);
  });
}

// Goes on with the answers of a chat that the server may still write.
export function resume(chat, changed) {
  const open = allMessages(chat).findLast(({ state }) => state === "writing");
  if (open && !isRunning(chat)) write(chat, open, changed, null);
  return Boolean(open);
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

async function write(chat, answer, changed, first) {
  const ends = new AbortController(), screen = painter(chat, answer);
  running.set(chat, { answer, ends });
  let failure = null;
  waitsFor(answer, "Waiting for the server");
  try {
    await follow(answer, ends.signal, screen, first);
    answer.state = "whole";
    say("The answer is complete.");
  } catch (error) {
    failure = error;
    const isStopped = error.name === "AbortError" || error.code === "stopped";
    answer.state = isStopped ? "stopped" : "failed";
    answer.note = isStopped ? "Stopped." : `Error: ${error.message}`;
    if (error.isForgotten)
      [answer.state, answer.note] = ["stopped", "This answer was interrupted."];
    if (isLeft) answer.state = "writing";
    else say(answer.note);
  }
  delete answer.about.read;
  delete answer.wait;
  running.delete(chat);
  screen.end();
  if (isLeft) return;
  save(chat);
  changed(chat, failure);
}

// Reads an answer up to its end, over connections that break. first: begins it; null: it is there.
async function follow(answer, signal, screen, first) {
  let source = first, lost = null, hasBegun = !first;
  for (let tries = 0; ;) {
    const told = { isAgain: !source, n: 0 };
    try {
      for await (const [name, data] of source?.(signal) ?? again(answer.id, signal)) {
        if (told.isAgain) beginAgain(answer);
        [told.isAgain, hasBegun, tries, lost] = [false, true, 0, null];
        if (take(answer, name, data, told)) return;
        screen.soon();
      }
      lost = new Error("the connection ended before the answer was whole");
    } catch (error) {
      if (error.status === 404 && !source)
        throw lost ?? Object.assign(error, { isForgotten: true });
      if (!(error instanceof TypeError && hasBegun)) throw error;
      lost = error;
    }
    if (tries === PAUSES.length) throw lost;
    waitsFor(answer, "The connection is lost. The page tries again");
    screen.soon();
    await pause(PAUSES[tries++], signal);
    source = null;
  }
}

function pause(ms, signal) {
  return new Promise((resolve, reject) => {
    const timer = setTimeout(resolve, ms);
    signal.addEventListener("abort", () => {
      clearTimeout(timer);
      reject(signal.reason);
    }, { once: true });
  });
}

// The server tells an answer from its first event on.
function beginAgain(answer) {
  Object.assign(answer, { content: "", thinking: "" });
  answer.about.accepted = null;  // nobody counted them meanwhile
  delete answer.note;
}

// Takes an event of an answer. told: what this connection has brought. Returns whether it is the
// last one.
function take(answer, name, data, told) {
  if (name === "error") {
    const { message, code } = data.error;
    throw Object.assign(new Error(message), { code });
  }
  if (name === "comment") takeComment(answer, data);
  else if (name === "sparsekv.rows") step(answer.about, data, told);
  else return part(answer, data);
  return false;
}

function step(about, { rows, tokens, accepted }, told) {
  about.rows = rows;
  if (about.accepted !== null) about.accepted = (about.accepted ?? 0) + accepted;
  const now = performance.now();
  if (told.since) {
    told.n += tokens;
    about.speed = (1000 * told.n) / Math.max(1, now - told.since);
  }
  told.since ??= now;
}

// Takes a part of the answer. Returns whether it is the last.
function part(answer, data) {
  const about = answer.about;
  about.served = data.model ?? about.served;
  if (data.prompt_progress) {
    const { processed, total } = data.prompt_progress;
    [about.read, about.prompt] = [processed, total];
    takeProgress(answer, processed, total);
  }
  const [choice] = data.choices ?? [], delta = choice?.delta ?? {};
  answer.thinking += delta.reasoning_content ?? "";
  answer.content += delta.content ?? "";
  if (delta.content || delta.reasoning_content) {
    answer.wait = null;
    about.first ??= (Date.now() - answer.started) / 1000;
  }
  if (choice?.finish_reason === "length") answer.note = "The answer ends at the limit of tokens.";
  if (!data.usage) return false;
  const { context, ledger, method, timings } = data.sparsekv, { usage } = data;
  Object.assign(about, {
    method: method.name, budget: method.options.budget, sparse_from: method.sparse_from,
    n: usage.completion_tokens,
    prompt: usage.prompt_tokens, cached: usage.prompt_tokens_details.cached_tokens,
    changed: data.sparsekv.difference?.cause,
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
  const soon = () => { timer ??= setTimeout(paint, pause); };
  const clock = setInterval(() => answer.wait && soon(), 1000);  // the time of a wait goes on
  return {
    soon,
    end: () => {
      clearTimeout(timer);
      clearInterval(clock);
      paint();
    },
  };
}
