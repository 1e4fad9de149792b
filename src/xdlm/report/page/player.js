/** Where in their steps all panes are, and the way through them. */
import { byId } from "./dom.js";
import { closeHistory } from "./history.js";

const calm = matchMedia("(prefers-reduced-motion: reduce)");

export class Player {
  constructor(say) {
    this.say = say;
    this.panes = [];
    this.step = 0;
    this.timer = null;
    this.refreshing = null; // the frame in which what has come will be drawn
    byId("play").addEventListener("click", () => this.toggle());
    byId("step").addEventListener("input", (event) => this.goTo(Number(event.target.value)));
  }

  /** Steps that can be shown: all panes go together until they are finished. */
  get here() {
    const going = this.panes.filter((pane) => !pane.finished).map((pane) => pane.run.last);
    return going.length ? Math.min(...going) : Math.max(0, ...this.panes.map((pane) => pane.run.last));
  }

  get finished() {
    return this.panes.every((pane) => pane.finished);
  }

  watch(panes) {
    this.pause();
    this.panes = panes;
    this.step = 0;
    byId("player").hidden = false;
    if (!calm.matches) this.play();
  }

  /** Runs that are here as a whole. */
  open(panes, step) {
    this.pause();
    this.panes = panes;
    this.#draw();
    this.show(step);
  }

  /** There is nothing to show any more. */
  forget() {
    this.pause();
    this.panes = [];
    byId("player").hidden = true;
  }

  /** A pane has one more step. They may come faster than they can be drawn. */
  grown() {
    if (this.finished) this.#refresh();
    else this.refreshing ??= requestAnimationFrame(() => this.#refresh());
  }

  show(wanted) {
    this.step = Math.max(0, Math.min(this.here, wanted));
    const summaries = this.panes.map((pane) => pane.show(this.step));
    const { steps, times } = this.panes.reduce((a, b) => (b.run.steps > a.run.steps ? b : a)).run;
    const time = this.step in times ? `, t = ${times[this.step].toFixed(3)}` : "";
    byId("clock").textContent = `step ${this.step} / ${steps}${time}`;
    byId("step").value = this.step;
    byId("step").setAttribute("aria-valuetext", `step ${this.step} of ${steps}`);
    // While playing, a screen reader could not keep up with every step.
    if (this.timer === null && summaries[0]) this.say(`Step ${this.step}: ${summaries[0]}`);
  }

  goTo(wanted) {
    this.pause();
    this.show(wanted);
  }

  toggle() {
    if (this.timer !== null) this.pause();
    else this.play();
  }

  play() {
    if (this.finished && this.step === this.here) this.step = 0;
    const longest = Math.max(1, ...this.panes.map((pane) => pane.planned));
    const delay = Math.max(40, Math.min(400, 9000 / longest));
    this.timer = setInterval(() => this.#tick(), delay);
    byId("play").textContent = "Pause";
  }

  pause() {
    clearInterval(this.timer);
    this.timer = null;
    byId("play").textContent = "Play";
  }

  onKey(event) {
    if (event.altKey || event.ctrlKey || event.metaKey) return;
    if (event.key === "Escape") closeHistory();
    // Fields have a use of their own for these keys, and buttons for some.
    if (!this.panes.length || event.target.closest("input, select, textarea")) return;
    const moves = { ArrowLeft: this.step - 1, ArrowRight: this.step + 1, Home: 0, End: this.here };
    if (event.key === " " && !event.target.closest("button")) this.toggle();
    else if (event.key in moves) this.goTo(moves[event.key]);
    else return;
    event.preventDefault();
  }

  #refresh() {
    cancelAnimationFrame(this.refreshing);
    this.refreshing = null;
    if (!this.panes.length) return;
    this.#draw();
    // Those who want no motion see the first state, and then the last.
    const wanted = this.finished && this.timer === null && this.step === 0 ? this.here : this.step;
    if (wanted !== this.step || this.step === 0) this.show(wanted);
  }

  #draw() {
    byId("step").max = Math.max(0, ...this.panes.map((pane) => pane.run.steps));
    for (const pane of this.panes) pane.drawChart();
  }

  #tick() {
    if (this.step < this.here) this.show(this.step + 1);
    else if (this.finished) this.goTo(this.here);
  }
}
