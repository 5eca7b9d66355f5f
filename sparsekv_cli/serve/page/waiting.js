// What an answer waits for, for how long, and for how long still.

const RECENT_MS = 10_000;  // the part of a prefill that its speed is taken from
const LEAST_MS = 1000;

// Says that an answer waits for something. count: how far it is, if that is known.
export function waitsFor(answer, what, count = "") {
  if (answer.wait?.what !== what) answer.wait = { what, since: Date.now(), read: [] };
  answer.wait.count = count;
}

// Takes a comment of the stream.
export function takeComment(answer, text) {
  if (text === "ping" || /^prefill \d/.test(text)) return;
  const compiles = /^kernels of (\S+) are compiled(?:: (.*))?$/.exec(text);
  if (!compiles) waitsFor(answer, text);
  else waitsFor(answer, `The kernels of ${compiles[1]} are compiled, once`, compiles[2]);
}

// Takes the progress of a prefill, in tokens.
export function takeProgress(answer, done, total) {
  waitsFor(answer, "Reading the prompt", `${done} of ${total} tokens`);
  const { read } = answer.wait, now = Date.now();
  read.push({ now, done });
  while (read.length > 2 && now - read[0].now > RECENT_MS) read.shift();
  const [first] = read, passed = now - first.now;
  answer.wait.ends = null;
  if (done < total && passed >= LEAST_MS && done > first.done)
    answer.wait.ends = now + ((total - done) * passed) / (done - first.done);
}

// What the page shows: the cause, the count, the time, and an estimate.
export function shownWait({ wait }) {
  if (!wait) return "";
  const parts = [wait.count ? `${wait.what}: ${wait.count}` : wait.what];
  const passed = Math.floor((Date.now() - wait.since) / 1000);
  if (passed) parts.push(time(passed));
  const left = Math.ceil((wait.ends - Date.now()) / 1000);
  if (wait.ends) parts.push(`about ${time(Math.max(1, left))} left`);
  return `${parts.join(", ")}…`;
}

function time(seconds) {
  if (seconds < 100) return `${seconds} s`;
  return seconds < 6000 ? `${Math.round(seconds / 60)} min` : `${Math.round(seconds / 3600)} h`;
}
