/** One model's text, its chart and its counts. */
import { generation, saved } from "./api.js";
import { columnAt, drawChart, mark } from "./chart.js";
import { closeHistory, element, openHistory } from "./history.js";
import { KINDS, Run } from "./run.js";
import { visible } from "./spelling.js";

const MEANINGS = { unmasked: "mask → token", refined: "token → token", remasked: "token → mask" };

export class Pane {
  /** `goTo(step)` is called where the chart is clicked, `say(words)` with what a token went through. */
  constructor(body, noise, { goTo, say }) {
    this.body = body;
    this.say = say;
    this.run = new Run();
    this.step = 0;
    this.finished = false;
    this.root = document.getElementById("pane").content.firstElementChild.cloneNode(true);
    this.find = (selector) => this.root.querySelector(selector);
    this.tokens = this.find(".tokens");
    this.chart = this.find(".chart");
    this.find("h2").textContent = body.model;
    this.find(".noise").textContent = noise;
    this.root.setAttribute("aria-label", body.model);
    this.tokens.setAttribute("aria-label", `Text of ${body.model} at this step`);
    this.#addLegend();
    this.#listen(goTo);
  }

  /** Follow the generation to its end; `grown` is called after every step. */
  async follow(signal, grown) {
    const began = performance.now();
    try {
      for await (const told of generation(this.body, signal)) {
        if (told.xdlm) this.#take(told.xdlm);
        if (told.usage) this.#finish(told.usage, performance.now() - began);
        grown();
      }
    } catch (error) {
      if (error.name === "AbortError") this.find(".facts").textContent = "stopped";
      else this.fail(error.message);
    } finally {
      this.finished = true;
      grown();
    }
  }

  fail(message) {
    this.find(".error").textContent = message;
    this.find(".error").hidden = false;
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
    const kinds = this.run.kinds[this.step];
    this.run.states[this.step].forEach((text, position) => this.#showToken(position, text, kinds));
    const counts = { ...this.run.counts[this.step], masked: this.run.masked(this.step) };
    for (const name in counts) this.find(`.count-${name}`).textContent = counts[name];
    mark(this.chart, this.step);
    const held = this.find(".tokens > .held");
    if (held) this.#open(held);
    return Object.entries(counts).map(([name, count]) => `${count} ${name}`).join(", ");
  }

  #take(told) {
    if (told.step === 0) {
      this.run.begin(told);
      this.#makeTokens();
    } else this.run.add(told);
  }

  #finish(usage, milliseconds) {
    const seconds = (milliseconds / 1000).toFixed(1);
    this.find(".facts").textContent =
      `seed ${this.body.seed}, ${usage.forward_passes} forward passes, ${seconds} s`;
    this.find(".saves").hidden = false;
  }

  #addLegend() {
    for (const name of [...KINDS, "masked"]) {
      const item = element(this.find(".legend"), "li");
      element(item, "span", undefined, `swatch ${name}`);
      item.append(`${name} `);
      element(item, "b", "0", `count-${name}`);
      if (name in MEANINGS) item.title = MEANINGS[name];
    }
  }

  #makeTokens() {
    this.tokens.replaceChildren();
    this.run.states[0].forEach((_, position) => {
      this.tokens.append(""); // where the space before the token goes
      const token = element(this.tokens, "span");
      token.dataset.position = position;
      token.tabIndex = position ? -1 : 0; // one stop for Tab, the arrow keys go on from there
    });
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
    for (const button of this.root.querySelectorAll("[data-format]"))
      button.addEventListener("click", () => this.#save(button));
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

  async #save(button) {
    const format = button.dataset.format;
    button.disabled = true;
    try {
      const link = document.createElement("a");
      link.href = URL.createObjectURL(await saved(this.body, format));
      link.download = `${this.body.model.replaceAll(/[^\w.-]+/g, "-")}-${this.body.seed}.${format}`;
      link.click();
      setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
    } catch (error) {
      this.fail(error.message);
    }
    button.disabled = false;
  }
}
