/** What the form says, and the same as the fragment of a link. */

const NUMBERS = ["steps", "temperature", "top_p", "tokens", "k", "seed"];
const FIELDS = ["text", "sampler", ...NUMBERS];

export function read(form) {
  const settings = { models: [...form.querySelectorAll("[name=model]:checked")].map((box) => box.value) };
  for (const name of FIELDS) settings[name] = form.elements[name].value;
  return settings;
}

/** Checks the boxes of the models that a link names; returns in words what had to be left out. */
export function choose(form, names, most) {
  if (!names.length) return [];
  const boxes = [...form.querySelectorAll("[name=model]")];
  const served = boxes.filter((box) => names.includes(box.value));
  for (const box of boxes) box.checked = served.indexOf(box) >= 0 && served.indexOf(box) < most;
  const unknown = names.filter((name) => !boxes.some((box) => box.value === name));
  const left = unknown.map((name) => `there is no model ${name}`);
  return served.length > most ? [...left, `only ${most} models fit side by side`] : left;
}

/** Fills in what a link says. A field that does not take it keeps its default; returns those, in words. */
export function fill(form, given) {
  const refused = FIELDS.filter((name) => given.has(name) && !takes(form.elements[name], given.get(name)));
  const kept = (name) => form.elements[name].value || "left open";
  return refused.map((name) => `${name} cannot be ${given.get(name) || "empty"}, it is ${kept(name)}`);
}

function takes(field, value) {
  if (field.type === "number" && Number.isNaN(Number(value))) return false;
  const before = field.value;
  field.value = value;
  // A choice is empty after it was given what it does not know.
  const taken = field.validity.valid && (field.value !== "") === (value !== "");
  if (!taken) field.value = before;
  return taken;
}

export function toFragment({ models, ...rest }) {
  // An empty text is a wish, an empty number none.
  const fields = Object.entries(rest).filter(([name, value]) => name === "text" || value !== "");
  return new URLSearchParams([...models.map((name) => ["model", name]), ...fields]).toString();
}

/** What a link says, by name; null where it asks for nothing. */
export function fromFragment(fragment) {
  const given = new URLSearchParams(fragment.replace(/^#/, ""));
  return ["model", ...FIELDS].some((name) => given.has(name)) ? given : null;
}

/** Runs of underscores become holes, one alone stays itself; a text without any gets one at its end. */
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
