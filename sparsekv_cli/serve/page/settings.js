// What a chat is asked with: its model, method, budget, system prompt and samplers.

import { $, make } from "./dom.js";
import { get } from "./client.js";
import { drawAgain } from "./rows.js";

const FIELDS = [...document.querySelectorAll("[data-setting]")];
const NUMBERS = ["temperature", "top_k", "top_p", "min_p", "repeat_penalty", "max_tokens", "seed"];
const SHOWS = "lfps";  // the method of a server that has none but full, whose picture shows nothing
let models = [], methods = [], ofServer = "full";

// Reads what the server has. Raises an Error with its words.
export async function describe() {
  const described = await get("/v1/methods");
  [methods, ofServer] = [described.methods, described.default];
  models = (await get("/v1/models")).data;
  const chosen = $("model").value;
  $("model").replaceChildren(...models.map(({ id }) => make("option", { textContent: id })));
  if (models.some(({ id }) => id === chosen)) $("model").value = chosen;
  $("model-field").hidden = models.length < 2;
  const { default_generation_settings: { params }, chat_template } = await get("/props");
  const defaults = { ...params, max_tokens: params.n_predict };
  for (const name of NUMBERS) $(name).placeholder = defaults[name] < 0 ? "random" : defaults[name];
  $("think-field").hidden = !chat_template.includes("enable_thinking");
  showMethods($("method").value);
}

// Lists the methods of the chosen model. Others are there to be seen.
function showMethods(wanted) {
  const model = models.find(({ id }) => id === $("model").value) ?? models[0];
  const usable = model?.methods ?? methods.map(({ name }) => name);
  $("method").replaceChildren(...methods.map(({ name, summary }) => {
    const disabled = !usable.includes(name);
    const title = disabled ? `${summary}; not for this model, or not calibrated` : summary;
    return make("option", { textContent: name, value: name, title, disabled });
  }));
  const preferred = ofServer === "full" && usable.includes(SHOWS) ? SHOWS : ofServer;
  $("method").value = usable.includes(wanted) ? wanted : preferred;
  const size = model?.context_length ? `${model.context_length} tokens of context` : "";
  const name = models.length > 1 ? "" : model?.id;
  $("model-name").textContent = [name, size].filter(Boolean).join(" · ");
  showBudget();
}

function showBudget() {
  $("budget").disabled = $("method").value === "full";  // it reads all rows
}

$("model").addEventListener("change", () => showMethods($("method").value));
$("method").addEventListener("change", showBudget);

// Calls told() when somebody changes a setting.
export function watch(told) {
  for (const field of FIELDS) field.addEventListener("change", told);
}

export function settings() {
  return Object.fromEntries(
    FIELDS.map((field) => [field.id, field.type === "checkbox" ? field.checked : field.value]));
}

// Shows the settings of a chat; what they lack stays as it is.
export function showSettings(values) {
  for (const field of FIELDS) {
    const value = values[field.id];
    if (value == null || (field.id === "model" && !models.some(({ id }) => id === value))) continue;
    if (field.type === "checkbox") field.checked = value;
    else field.value = value;
  }
  if (models.length) showMethods(values.method ?? $("method").value);
}

// The fields of a request, of the settings that are shown.
export function fields() {
  const values = settings(), asked = { method: values.method };
  if (models.length > 1) asked.model = values.model;
  if (values.budget.trim() && values.method !== "full") asked.budget = values.budget.trim();
  if (values["at-once"]) asked.sparse_from = 0;
  for (const name of NUMBERS) if (values[name] !== "") asked[name] = Number(values[name]);
  if (!$("think-field").hidden && !values.think)
    asked.chat_template_kwargs = { enable_thinking: false };
  return asked;
}

export const systemPrompt = () => $("system").value.trim();

// Shows the chosen colours. A browser may refuse to keep the choice.
export function showTheme() {
  try {
    $("theme").value = localStorage.getItem("theme") ?? "";
  } catch { /* as the system has it */ }
  document.documentElement.dataset.theme = $("theme").value;
  drawAgain();
}

$("theme").addEventListener("change", () => {
  try {
    localStorage.setItem("theme", $("theme").value);
  } catch { /* until the page is closed */ }
  showTheme();
});
