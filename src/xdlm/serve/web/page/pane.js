/** One model's generation as it comes, and the buttons that save it. */
import { generation, saved } from "./api.js";
import { element } from "./dom.js";
import { KINDS } from "./run.js";
import { View } from "./view.js";

const MEANINGS = { unmasked: "mask → token", refined: "token → token", remasked: "token → mask" };

export class Pane extends View {
  constructor(body, noise, told) {
    super(document.getElementById("pane").content.firstElementChild.cloneNode(true), told);
    this.body = body;
    this.find("h2").textContent = body.model;
    this.find(".noise").textContent = noise;
    this.root.setAttribute("aria-label", body.model);
    this.tokens.setAttribute("aria-label", `Text of ${body.model} at this step`);
    this.#addLegend();
    for (const button of this.root.querySelectorAll("[data-format]"))
      button.addEventListener("click", () => this.#save(button));
  }

  get planned() {
    return this.body.steps;
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

  #take(told) {
    if (told.step === 0) this.begin(told);
    else this.run.add(told);
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
