/** What the form says, and the same as the fragment of a link. */

const NUMBERS = ["steps", "temperature", "top_p", "tokens", "k", "seed"];
const FIELDS = ["text", "sampler", ...NUMBERS];

export function read(form) {
  const settings = { models: [...form.querySelectorAll("[name=model]:checked")].map((box) => box.value) };
  for (const name of FIELDS) settings[name] = form.elements[name].value;
  return settings;
}

export function show(form, settings) {
  for (const name of FIELDS) if (name in settings) form.elements[name].value = settings[name];
  if (!settings.models) return;
  for (const box of form.querySelectorAll("[name=model]")) box.checked = settings.models.includes(box.value);
}

export function toFragment({ models, ...rest }) {
  const fields = Object.entries(rest).filter(([, value]) => value !== "");
  return new URLSearchParams([...models.map((name) => ["model", name]), ...fields]).toString();
}

/** Null where a link asks for nothing. */
export function fromFragment(fragment) {
  const given = new URLSearchParams(fragment.replace(/^#/, ""));
  const models = given.getAll("model");
  if (!models.length) return null;
  const settings = { models };
  for (const name of FIELDS) settings[name] = given.get(name) ?? "";
  return settings;
}

/** Runs of underscores become holes; a text without any gets one at its end. */
export function template({ text, tokens }) {
  const holed = text.replace(/_{2,}/g, (blank) => `<mask:${blank.length}>`);
  return /<mask:\d+>/.test(holed) ? holed : `${holed}<mask:${tokens}>`;
}

/** The body of a request to one model. */
export function body(settings, model) {
  const { steps, sampler, temperature, top_p, k, seed } = settings;
  const numbers = { steps, temperature, top_p, seed, ...(k === "" ? {} : { k }) };
  for (const name in numbers) numbers[name] = Number(numbers[name]);
  return { model, template: template(settings), sampler, ...numbers };
}

export const newSeed = () => String(crypto.getRandomValues(new Uint32Array(1))[0]);
