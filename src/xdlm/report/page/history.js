/** What a position went through, in a box beside its token: one box for the whole page. */
import { byId, element } from "./dom.js";
import { percent, quoted } from "./spelling.js";

const ROWS = 12;
const box = byId("history");
let held = null; // the token whose history is open

/** Opens the history of a token; returns it as words, for those who listen. */
export function openHistory(token, position, events, step) {
  closeHistory();
  held = token;
  token.classList.add("held");
  const now = events.findLastIndex((event) => event.step <= step);
  fill(position, events, now);
  box.hidden = false;
  place(token);
  const { text, probability } = events[now];
  return quoted(text) + (probability === null ? "" : `, the model gave it ${percent(probability)}`);
}

export function closeHistory() {
  held?.classList.remove("held");
  held = null;
  box.hidden = true;
}

function fill(position, events, now) {
  box.replaceChildren();
  const table = element(box, "table");
  element(table, "caption", `position ${position + 1}`);
  const row = (label, text, sure, when, kind) => {
    const line = element(table, "tr", undefined, when);
    element(line, "th", label).scope = "row";
    element(line, "td", text, kind);
    element(line, "td", sure, "sure");
  };
  const start = Math.max(0, Math.min(now - ROWS + 4, events.length - ROWS));
  if (start > 0) row("…", `${start} earlier`, "");
  events.slice(start, start + ROWS).forEach((event, offset) => {
    const when = start + offset === now ? "now" : start + offset > now ? "later" : "";
    // The model's own probability of what it wrote; what came from the noise has none.
    const noise = event.step > 0 && event.text !== null ? "noise" : "";
    const sure = event.probability === null ? noise : percent(event.probability);
    row(`step ${event.step}`, quoted(event.text), sure, when, event.kind);
  });
  const left = events.length - start - ROWS;
  if (left > 0) row("…", `${left} later`, "");
}

function place(token) {
  const anchor = token.getClientRects()[0] ?? token.getBoundingClientRect();
  const below = anchor.bottom + 8;
  const fits = below + box.offsetHeight < window.innerHeight;
  const widest = document.documentElement.clientWidth - box.offsetWidth - 4;
  box.style.top = `${fits ? below : Math.max(4, anchor.top - box.offsetHeight - 8)}px`;
  box.style.left = `${Math.max(4, Math.min(anchor.left, widest))}px`;
}
