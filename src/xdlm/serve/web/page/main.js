/** The page: a form, a pane for each model that was chosen, and a player for all of them. */
import { keep, models } from "./api.js";
import { closeHistory, element } from "./history.js";
import { Pane } from "./pane.js";
import { Player } from "./player.js";
import { body, fromFragment, newSeed, read, show, toFragment } from "./settings.js";

const MOST = 3; // models side by side
const byId = (id) => document.getElementById(id);
const form = byId("form");
const noises = new Map(); // of each model, in words

function say(words) {
  byId("status").textContent = words;
}

const player = new Player(say);
let stopping = null;

async function generate(settings) {
  stopping?.abort();
  const own = (stopping = new AbortController());
  closeHistory();
  history.replaceState(null, "", `#${toFragment(settings)}`);
  const panes = settings.models.map(
    (model) => new Pane(body(settings, model), noises.get(model) ?? "", { goTo: (step) => player.goTo(step), say }),
  );
  byId("panes").replaceChildren(...panes.map((pane) => pane.root));
  byId("panes").style.setProperty("--panes", panes.length);
  busy(true);
  player.watch(panes);
  await Promise.all(panes.map((pane) => pane.follow(own.signal, () => player.grown())));
  if (stopping === own) busy(false);
}

function busy(now) {
  byId("panes").setAttribute("aria-busy", now);
  byId("stop").hidden = !now;
  byId("link").disabled = false;
  say(now ? "Generating" : "Finished");
}

function submit(event) {
  event.preventDefault();
  const settings = read(form);
  if (!settings.models.length) {
    say("Choose a model");
    form.querySelector("[name=model]")?.focus();
    return;
  }
  settings.seed ||= newSeed();
  generate(settings);
}

function replay() {
  const settings = fromFragment(location.hash);
  if (settings === null) return;
  show(form, settings);
  limitModels();
  settings.seed ||= newSeed();
  generate(settings);
}

function limitModels() {
  const boxes = [...form.querySelectorAll("[name=model]")];
  const full = boxes.filter((box) => box.checked).length >= MOST;
  for (const box of boxes) box.disabled = full && !box.checked;
}

function offer(served) {
  const fieldset = byId("models");
  for (const old of fieldset.querySelectorAll("label")) old.remove();
  for (const { id, noise, k } of served) {
    noises.set(id, k === null ? `${noise} noise` : `${noise} noise, k = ${k}`);
    const label = element(fieldset, "label");
    const box = element(label, "input");
    Object.assign(box, { type: "checkbox", name: "model", value: id });
    box.checked = noises.size <= MOST;
    label.append(` ${id} `);
    element(label, "small", noises.get(id));
  }
  limitModels();
}

async function start() {
  try {
    offer(await models());
  } catch (error) {
    byId("key-field").hidden = error.status !== 401;
    say(error.message);
    return;
  }
  byId("key-field").hidden = true;
  replay();
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
  if (event.altKey || event.ctrlKey || event.metaKey) return;
  if (event.key === "Escape") closeHistory();
  // Fields and buttons have a use of their own for these keys.
  if (!player.panes.length || event.target.closest("input, select, textarea, button")) return;
  const { step, here } = player;
  const moves = { ArrowLeft: step - 1, ArrowRight: step + 1, Home: 0, End: here };
  if (event.key === " ") player.toggle();
  else if (event.key in moves) player.goTo(moves[event.key]);
  else return;
  event.preventDefault();
}

form.addEventListener("submit", submit);
byId("models").addEventListener("change", limitModels);
byId("stop").addEventListener("click", () => stopping?.abort());
byId("link").addEventListener("click", copyLink);
byId("key").addEventListener("change", (event) => {
  keep(event.target.value);
  start();
});
document.addEventListener("keydown", onKey);
window.addEventListener("hashchange", replay);
window.addEventListener("scroll", closeHistory, { passive: true });
start();
