// What a chat is asked with: its model, method, budget, system prompt and samplers.

import { $, make } from "./dom.js";
import { get } from "./client.js";
import { denseBelow, drawAgain } from "./rows.js";

const FIELDS = [...document.querySelectorAll("[data-setting]")];
const NUMBERS = ["temperature", "top_k", "top_p", "min_p", "repeat_penalty", "max_tokens", "seed"];
const ESCAPES = { n: "\n", t: "\t", "\\": "\\" };  // in stop texts
const NOT_HERE = "not for this model, or not calibrated";
let models = [], methods = [], ofServer = "full";

// Reads what the server has, for showSettings. Raises an Error with its words.
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
  $("model").replaceChildren(...models.map(({ id }) => make("option", { textContent: id })));
  $("model-field").hidden = models.length < 2;
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
    const title = disabled ? `${summary}; ${NOT_HERE}` : summary;
    return make("option", { textContent: name, value: name, title, disabled });
  }));
  $("method").value = usable.includes(wanted) ? wanted : defaultMethod();
  $("method-help").replaceChildren(...methods.flatMap(({ name, summary, use }) => [
    make("dt", {}, name),
    make("dd", {}, [summary, use, !usable.includes(name) && NOT_HERE].filter(Boolean).join("; ")),
  ]));
  const size = model?.context_length ? `${model.context_length} tokens of context` : "";
  const name = models.length > 1 ? "" : model?.id;
  $("model-name").textContent = [name, size].filter(Boolean).join(" · ");
  showMethod();
}

// The method of requests that name none.
const defaultMethod = () => chosen()?.method ?? ofServer;

// Says what the next message is asked with.
function showMethod() {
  const method = $("method").value, of = defaultMethod(), model = chosen();
  $("budget").disabled = method === "full";  // it reads all rows
  const option = methods.find(({ name }) => name === method)?.options
    ?.find(({ name }) => name === "budget");
  const stated = method === of ? model?.method_options?.budget : null;
  $("budget").placeholder = method === "full" ? "" : stated ?? option?.default ?? "default";
  const depth = $("from-first").checked ? 0 : model?.sparse_from?.[method];
  const reads = method === "full" ? "reads all rows" : depth ? denseBelow(depth)
    : depth === 0 ? "sparse from the first row" : "";
  const whose = method === of ? "the server's method" : `the server's method is ${of}`;
  $("using").textContent = method && `${[method, reads].filter(Boolean).join(": ")} (${whose})`;
}

$("model").addEventListener("change", () => {
  $("model-gone").textContent = "";
  showModel($("method").value);
});
$("method").addEventListener("change", showMethod);
$("from-first").addEventListener("change", showMethod);

function schema() {
  try {
    const value = JSON.parse($("schema").value);
    return typeof value === "object" && !Array.isArray(value) ? value : null;
  } catch {
    return null;
  }
}

const stops = () => $("stop-texts").value.split("\n").filter(Boolean)
  .map((text) => text.replace(/\\([nt\\])/g, (_, name) => ESCAPES[name]));

// Calls told() when somebody changes a setting.
export function watch(told) {
  for (const field of FIELDS) field.addEventListener("change", told);
}

const valueOf = (field) => (field.type === "checkbox" ? field.checked : field.value);

// Returns what the fields have. before: for those that have no choices yet. The server's method is
// no choice.
export function settings(before = {}) {
  const known = FIELDS.filter((field) => field.value || field.tagName !== "SELECT");
  const values = Object.fromEntries(known.map((field) => [field.id, valueOf(field)]));
  if (values.method === defaultMethod()) values.method = "";
  return { ...before, ...values };
}

// Whether the server that wrote the last answer of a chat has the models that are shown.
export function hasServed({ messages }) {
  const served = messages.at(-1)?.about?.served;
  return !served || models.some(({ id }) => id === served);
}

// Whether the browser understands the fields. If not, it says which and why.
export function areValid() {
  const [form] = $("settings").children, isRight = !$("schema").value.trim() || schema();
  $("schema").setCustomValidity(isRight ? "" : "Expected a JSON object, or nothing.");
  if (form.checkValidity()) return true;
  $("settings").showModal();
  return form.reportValidity();
}

// Shows the settings of a chat. What they lack is as at first. What is being typed stays. A model
// that is gone becomes the first.
export function showSettings(values) {
  const [first] = models;
  const isGone = first && values.model && !models.some(({ id }) => id === values.model);
  $("model-gone").textContent =
    isGone ? `The model ${values.model} is not on this server now: ${first.id} answers.` : "";
  for (const field of FIELDS) {
    if (field === document.activeElement || field.id === "method") continue;
    const value = values[field.id] ?? null;
    if (field.type === "checkbox") field.checked = value ?? field.defaultChecked;
    else if (field.id === "model") field.value = isGone || !value ? first?.id ?? "" : value;
    else field.value = value ?? "";
  }
  if (first) showModel(values.method);
}

// The fields of a request, of the settings that are shown.
export function fields() {
  const values = settings(), asked = { method: $("method").value };
  if (models.length > 1) asked.model = values.model;
  if (values.budget.trim() && asked.method !== "full") asked.budget = values.budget.trim();
  if (values["from-first"]) asked.sparse_from = 0;
  if (stops().length) asked.stop = stops();
  if (schema()) asked.response_format = { type: "json_object", schema: schema() };
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
