/** A run on show, within an element that has a place for its tokens, its chart and its counts. */
import { columnAt, drawChart, mark } from "./chart.js";
import { element } from "./dom.js";
import { closeHistory, openHistory } from "./history.js";
import { Run } from "./run.js";
import { visible } from "./spelling.js";

export class View {
  /** `goTo(step)` is called where the chart is clicked, `say(words)` with what a token went through. */
  constructor(root, { goTo, say }) {
    this.root = root;
    this.say = say;
    this.run = new Run();
    this.step = 0;
    this.finished = false; // nothing is added to the run any more
    this.find = (selector) => this.root.querySelector(selector);
    this.tokens = this.find(".tokens");
    this.chart = this.find(".chart");
    this.#listen(goTo);
  }

  /** Steps that there will be. */
  get planned() {
    return this.run.steps;
  }

  begin(first) {
    this.run.begin(first);
    this.tokens.replaceChildren();
    this.makePlaces();
  }

  /** As far as the run has come. */
  drawChart() {
    this.find(".highest").textContent = drawChart(this.chart, this.run.counts, this.run.steps + 1);
    mark(this.chart, this.step);
  }

  /** Returns the counts of the step, in words. */
  show(step) {
    if (this.run.last < 0) return;
    this.step = Math.min(step, this.run.last);
    this.showState(this.run.states[this.step], this.run.kinds[this.step]);
    const counts = { ...this.run.counts[this.step], masked: this.run.masked(this.step) };
    for (const name in counts) this.find(`.count-${name}`).textContent = counts[name];
    mark(this.chart, this.step);
    const held = this.find(".tokens > .held");
    if (held) this.#open(held);
    return Object.entries(counts).map(([name, count]) => `${count} ${name}`).join(", ");
  }

  makePlaces() {
    this.run.states[0].forEach((_, position) => {
      this.tokens.append(""); // where the space before the token goes
      const token = element(this.tokens, "span");
      token.dataset.position = position;
      token.tabIndex = position ? -1 : 0; // one stop for Tab, the arrow keys go on from there
    });
  }

  showState(state, kinds) {
    state.forEach((text, position) => this.#showToken(position, text, kinds));
  }

  #showToken(position, text, kinds) {
    const token = this.tokens.children[position];
    // A word's leading space stands outside its span: at the end of a line it would be tinted.
    const [, space, rest] = (text === null ? "" : visible(text)).match(/^( *(?=\S))?(.*)$/s);
    token.previousSibling.data = space ?? "";
    if (token.textContent !== rest) token.textContent = rest;
    const names = {
      masked: text === null, given: !this.run.open.has(position),
      held: token.classList.contains("held"), [kinds.get(position) ?? ""]: kinds.has(position),
    };
    token.className = Object.keys(names).filter((name) => names[name]).join(" ");
  }

  #listen(goTo) {
    this.chart.addEventListener("click", (event) => goTo(columnAt(this.chart, event)));
    const open = (event) => {
      const token = event.target.closest(".tokens > span");
      if (token) this.#open(token);
    };
    for (const kind of ["pointerover", "focusin", "click"]) this.tokens.addEventListener(kind, open);
    for (const kind of ["pointerleave", "focusout"]) this.tokens.addEventListener(kind, closeHistory);
    this.tokens.addEventListener("keydown", (event) => this.#move(event));
  }

  #open(token) {
    const position = Number(token.dataset.position);
    const words = openHistory(token, position, this.run.histories[position], this.step);
    if (document.activeElement === token) this.say(words);
  }

  #move(event) {
    const spans = this.tokens.children;
    const position = Number(event.target.dataset.position);
    const moves = { ArrowLeft: position - 1, ArrowRight: position + 1, Home: 0, End: spans.length - 1 };
    const next = spans[moves[event.key]];
    if (!(event.key in moves) || event.altKey || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    event.stopPropagation(); // elsewhere these keys go through the steps
    if (!next) return;
    event.target.tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  }
}
