// The picture of rows that were read, and the numbers of an answer.

import { $ } from "./dom.js";

export const N_BINS = 64;

export const perSecond = (about) => (about.speed ? `${about.speed.toFixed(1)} tokens/s` : "–");
export const share = (about) =>
  (about.attended == null ? "–" : `${(100 * about.attended).toFixed(1)}%`);

export const denseBelow = (n) => `dense below ${n.toLocaleString("en-US")} tokens`;

const NONE = "Nothing yet. A line is a layer, from the first at the top. A dark part was read.";
let shown = {};

// Shows what is known of an answer; {}: nothing yet.
export function showAbout(about) {
  shown = about;
  const tokens = (n) => (n == null ? "–" : `${n} tokens`);
  $("speed").textContent = perSecond(about);
  $("accepted").textContent = fromDrafts(about);
  $("first").textContent = about.first ? `${about.first.toFixed(2)} s` : "–";
  $("prompt-tokens").textContent =
    about.read == null ? tokens(about.prompt) : `${about.read} of ${about.prompt}`;
  const changed = about.changed ? `; ${about.changed} has changed` : "";
  $("cached").textContent = tokens(about.cached) + changed;
  $("attended").textContent = share(about);
  $("context").textContent = about.used == null ? "–" : `${about.used} of ${about.size}`;
  $("context-bar").value = about.used == null ? 0 : about.used / about.size;
  $("picture-summary").textContent = about.rows ? `${percent(about.rows)} in the last step` : "";
  draw(about.rows ?? []);
}

function fromDrafts({ accepted, n }) {
  if (accepted === null) return "–";  // nobody counted them
  return accepted ? `${accepted} of ${n ?? "–"}` : "none";
}

function percent(rows) {
  const all = rows.flat();
  return `${(all.reduce((sum, each) => sum + each, 0) / Math.max(1, all.length)).toFixed(1)}%`;
}

// A line a layer, a column a part of the context, darker where more rows were read.
function draw(rows) {
  const canvas = $("rows"), context = canvas.getContext("2d");
  canvas.width = Math.max(1, ...rows.map((row) => row.length));
  canvas.height = Math.max(1, rows.length);
  context.fillStyle = getComputedStyle(canvas).color;
  rows.forEach((row, y) => row.forEach((part, x) => {
    context.globalAlpha = Math.sqrt(part / 100);
    context.fillRect(x, y, 1, 1);
  }));
  $("rows-text").textContent =
    rows.length ? `${rows.length} layers; the last step read ${percent(rows)} of the rows.` : NONE;
}

// In the colours that the page now has.
export const drawAgain = () => draw(shown.rows ?? []);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAgain);
