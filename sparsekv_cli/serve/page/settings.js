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
  for (const model of models) {
    if (model.status !== "loaded") continue;  // its defaults are in its file
    const { params } = (await get(`/props?${new URLSearchParams({ model: model.id })}`))
      .default_generation_settings;
    model.defaults = { ...params, max_tokens: params.n_predict };
  }
  const before = $("model").value;
  $("model").replaceChildren(...models.map(({ id }) => make("option", { textContent: id })));
  if (models.some(({ id }) => id === before)) $("model").value = before;
  $("model-field").hidden = models.length < 2;
  showModel($("method").value);
}

const chosen = () => models.find(({ id }) => id === $("model").value) ?? models[0];

// Shows the chosen model's context, defaults and methods. Other methods are there to be seen.
function showModel(wanted) {
  const model = chosen();
  for (const name of NUMBERS) {
    const value = model?.defaults?.[name] ?? "default";
    $(name).placeholder = value < 0 ? "random" : value;
  }
  $("think-field").hidden = !model?.thinking_switch;
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

$("model").addEventListener("change", () => {
  $("model-gone").textContent = "";
  showModel($("method").value);
});
$("method").addEventListener("change", showBudget);

// Calls told() when somebody changes a setting.
export function watch(told) {
  for (const field of FIELDS) field.addEventListener("change", told);
}

// Returns what the fields have. before: for those that have no choices yet.
export function settings(before = {}) {
  const known = FIELDS.filter((field) => field.value || field.tagName !== "SELECT");
  return { ...before, ...Object.fromEntries(
    known.map((field) => [field.id, field.type === "checkbox" ? field.checked : field.value])) };
}

// Whether the browser understands the fields. If not, it says which and why.
export function areValid() {
  const [form] = $("settings").children;
  if (form.checkValidity()) return true;
  $("settings").showModal();
  return form.reportValidity();
}

// Shows the settings of a chat. What they lack stays as it is, and what is being typed. A model
// that is gone becomes the first.
export function showSettings(values) {
  const [first] = models;
  const isGone = first && values.model && !models.some(({ id }) => id === values.model);
  $("model-gone").textContent =
    isGone ? `The model ${values.model} is not on this server now: ${first.id} answers.` : "";
  for (const field of FIELDS) {
    const value = field.id === "model" && isGone ? first.id : values[field.id];
    if (value == null || field === document.activeElement) continue;
    if (field.type === "checkbox") field.checked = value;
    else field.value = value;
  }
  if (first) showModel(values.method ?? $("method").value);
}

// The fields of a request, of the settings that are shown.
export function fields() {
  const values = settings(), asked = { method: values.method };
  if (models.length > 1) asked.model = values.model;
  if (values.budget.trim() && values.method !== "full") asked.budget = values.budget.trim();
  if (values["at-once"]) asked.sparse_from = 0;
  for (const name of NUMBERS) if (values[name] !== "") asked[name] = Number(values[name]);
  const { thinking_switch: think } = chosen() ?? {};
  if (think && !values.think) asked.chat_template_kwargs = { [think]: false };
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
