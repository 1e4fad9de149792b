/** Where in their steps all panes are, and the way through them. */
import { closeHistory } from "./history.js";

const byId = (id) => document.getElementById(id);
const calm = matchMedia("(prefers-reduced-motion: reduce)");

export class Player {
  constructor(say) {
    this.say = say;
    this.panes = [];
    this.step = 0;
    this.timer = null;
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

  /** A pane has one more step. */
  grown() {
    byId("step").max = Math.max(0, ...this.panes.map((pane) => pane.run.steps));
    if (this.step === 0 || (calm.matches && this.timer === null && this.finished)) {
      this.show(calm.matches && this.finished ? this.here : 0);
    }
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
    closeHistory();
    this.show(wanted);
  }

  toggle() {
    if (this.timer !== null) this.pause();
    else this.play();
  }

  play() {
    if (this.finished && this.step === this.here) this.step = 0;
    const longest = Math.max(1, ...this.panes.map((pane) => pane.body.steps));
    const delay = Math.max(40, Math.min(400, 9000 / longest));
    this.timer = setInterval(() => this.#tick(), delay);
    byId("play").textContent = "Pause";
  }

  pause() {
    clearInterval(this.timer);
    this.timer = null;
    byId("play").textContent = "Play";
  }

  #tick() {
    if (this.step < this.here) this.show(this.step + 1);
    else if (this.finished) this.goTo(this.here);
  }
}
