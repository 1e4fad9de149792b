/** The page: a form, a pane for each model that was chosen, and a player for all of them. */
import { keep, models } from "./api.js";
import { byId, element } from "./dom.js";
import { closeHistory } from "./history.js";
import { Pane } from "./pane.js";
import { Player } from "./player.js";
import { body, choose, fill, fromFragment, newSeed, read, toFragment } from "./settings.js";

const MOST = 3; // models side by side
const form = byId("form");
const noises = new Map(); // of each model, in words
const limits = new Map(); // of each model, as far as the server tells
const LIMITED = { steps: "max_steps", tokens: "max_tokens" };
const MOST_OF_ANY = 1024;
const calm = matchMedia("(prefers-reduced-motion: reduce)");

function say(words) {
  byId("status").textContent = words;
}

/** One line below the form, for all to see; without words it goes away. */
function notice(words = "") {
  byId("notice").textContent = words;
  byId("notice").hidden = !words;
}

const player = new Player(say);
let stopping = null;
let starting = false;

async function generate(settings) {
  stopping?.abort();
  const own = (stopping = new AbortController());
  closeHistory();
  const panes = settings.models.map(
    (model) => new Pane(body(settings, model), noises.get(model) ?? "", { goTo: (step) => player.goTo(step), say }),
  );
  byId("panes").replaceChildren(...panes.map((pane) => pane.root));
  byId("panes").style.setProperty("--panes", panes.length);
  busy(true);
  player.watch(panes);
  bringIntoView(byId("player"));
  await Promise.all(panes.map((pane) => pane.follow(own.signal, () => player.grown())));
  if (stopping === own) busy(false, own.signal.aborted ? "Stopped" : "Finished");
}

function busy(now, words = "Generating") {
  byId("panes").setAttribute("aria-busy", now);
  byId("stop").hidden = !now;
  byId("link").disabled = false;
  say(words);
}

/** On a phone what is generated stands below the form, out of sight. */
function bringIntoView(part) {
  if (part.getBoundingClientRect().top < window.innerHeight / 2) return;
  part.scrollIntoView({ behavior: calm.matches ? "instant" : "smooth" });
}

function submit(event) {
  event.preventDefault();
  if (!byId("key-field").hidden) {
    unlock();
    return;
  }
  const settings = read(form);
  if (!settings.models.length) {
    notice("Choose a model");
    form.querySelector("[name=model]")?.focus();
    return;
  }
  notice();
  settings.seed ||= newSeed();
  const fragment = `#${toFragment(settings)}`;
  if (fragment !== location.hash) history.pushState(null, "", fragment);
  generate(settings);
}

/** What the address asks for: at the start, after a step back or forth, and where it was typed. */
function replay() {
  const given = fromFragment(location.hash);
  if (given === null) {
    stopping?.abort();
    player.forget();
    byId("panes").replaceChildren();
    return;
  }
  form.reset();
  const passedOver = choose(form, given.getAll("model"), MOST);
  limit();
  passedOver.push(...fill(form, given));
  notice(passedOver.length ? `In this link ${passedOver.join("; ")}.` : "");
  const settings = read(form);
  if (!settings.models.length) return;
  settings.seed ||= newSeed();
  history.replaceState(null, "", `#${toFragment(settings)}`);
  generate(settings);
}

/** No more models than fit, and no more steps and tokens than those that are chosen allow. */
function limit() {
  const boxes = [...form.querySelectorAll("[name=model]")];
  const chosen = boxes.filter((box) => box.checked).map((box) => box.value);
  for (const box of boxes) box.disabled = chosen.length >= MOST && !box.checked;
  for (const [name, key] of Object.entries(LIMITED)) {
    const told = chosen.map((id) => limits.get(id)?.[key]).filter(Number.isInteger);
    const field = form.elements[name];
    field.max = Math.min(...(told.length ? told : [MOST_OF_ANY]));
    if (Number(field.value) > Number(field.max)) field.value = field.max;
  }
}

function offer(served) {
  const fieldset = byId("models");
  for (const old of fieldset.querySelectorAll("label")) old.remove();
  for (const { id, noise, k, xdlm } of served) {
    limits.set(id, xdlm);
    noises.set(id, k === null ? `${noise} noise` : `${noise} noise, k = ${k}`);
    const label = element(fieldset, "label");
    const box = element(label, "input");
    Object.assign(box, { type: "checkbox", name: "model", value: id });
    box.defaultChecked = noises.size <= MOST;
    label.append(` ${id} `);
    element(label, "small", noises.get(id));
  }
  limit();
}

async function start() {
  if (starting) return;
  starting = true;
  try {
    offer(await models());
  } catch (error) {
    byId("key-field").hidden = error.status !== 401;
    notice(error.message);
    return;
  } finally {
    starting = false;
  }
  byId("key-field").hidden = true;
  notice();
  if (location.hash) replay();
}

/** Enter means both a changed key and a sent form: the second finds the first at work. */
function unlock() {
  keep(byId("key").value);
  start();
}

async function copyLink() {
  const button = byId("link");
  // Browsers give the clipboard to pages of this machine and of https alone.
  const copied = await navigator.clipboard?.writeText(location.href).then(() => true, () => false);
  button.textContent = copied ? "Copied" : "It is in the address bar";
  setTimeout(() => (button.textContent = "Copy link"), 2000);
}

function onKey(event) {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
    form.requestSubmit();
    return;
  }
  player.onKey(event);
}

form.addEventListener("submit", submit);
byId("models").addEventListener("change", limit);
byId("stop").addEventListener("click", () => stopping?.abort());
byId("link").addEventListener("click", copyLink);
byId("key").addEventListener("change", unlock);
document.addEventListener("keydown", onKey);
window.addEventListener("hashchange", replay); // steps back and forth are such changes too
window.addEventListener("scroll", closeHistory, { passive: true });
start();
