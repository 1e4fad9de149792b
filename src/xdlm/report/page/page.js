/** A recording that the page itself holds: its samples, one at a time. */
import { byId, element } from "./dom.js";
import { closeHistory } from "./history.js";
import { Player } from "./player.js";
import { KINDS } from "./run.js";
import { View } from "./view.js";

const data = JSON.parse(byId("data").textContent);
const steps = data.times.length - 1;
const masks = new Set(data.masks);
const pieceOf = (token) => (masks.has(token) ? null : data.pieces[token]);
const bytes = (colour) => [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16));

/** Tokens as cells of an image, and beside it what changed: a pixel of two canvases is a cell. */
class ImageView extends View {
  palette = new Map(data.pieces.map((piece, token) => [pieceOf(token), bytes(piece)]));

  makePlaces() {
    for (const label of ["The image at this step", "What the step changed"]) {
      const canvas = element(this.tokens, "canvas");
      canvas.width = canvas.height = data.image.cells;
      canvas.setAttribute("role", "img");
      canvas.setAttribute("aria-label", label);
    }
  }

  showState(state, kinds) {
    const { cells, channels } = data.image;
    const [shown, changed] = [...this.tokens.children].map((canvas) => canvas.getContext("2d"));
    const style = getComputedStyle(document.documentElement);
    const looks = KINDS.map((name) => bytes(style.getPropertyValue(`--${name}`).trim()));
    const image = shown.createImageData(cells, cells);
    const map = changed.createImageData(cells, cells);
    for (let cell = 0; cell < cells * cells; cell += 1) {
      let most = -1; // channels may do several things: what is drawn is the last kind
      for (let part = 0; part < 3; part += 1) {
        const position = cell * channels + (channels === 3 ? part : 0);
        image.data[4 * cell + part] = this.palette.get(state[position])[part];
        most = Math.max(most, KINDS.indexOf(kinds.get(position)));
      }
      image.data[4 * cell + 3] = 255;
      if (most >= 0) map.data.set([...looks[most], 255], 4 * cell);
    }
    shown.putImageData(image, 0, 0);
    changed.putImageData(map, 0, 0);
  }
}

const say = (words) => (byId("status").textContent = words);
const player = new Player(say);
const view = new (data.image ? ImageView : View)(document.body, { goTo: (step) => player.goTo(step), say });
view.finished = true;

/** All of a sample's states, from its first frame and what each step changed. */
function unfold({ first, steps: changed }) {
  const changes = first.map((token, position) => [position, pieceOf(token), null]);
  view.begin({ steps, time: data.times[0], changes, open: first.keys() });
  changed.forEach((flat, index) => {
    const moved = [];
    for (let i = 0; i < flat.length; i += 4) {
      const [position, token, kind, perMille] = flat.slice(i, i + 4);
      // From one mask to another is no change that has a name.
      if (kind) moved.push([position, pieceOf(token), perMille < 0 ? null : perMille / 1000]);
    }
    view.run.add({ step: index + 1, steps, time: data.times[index + 1], changes: moved });
  });
}

function choose(sample, step) {
  closeHistory();
  unfold(data.samples[sample]);
  player.open([view], step);
}

data.samples.forEach((_, index) => {
  element(byId("sample"), "option", `${index + 1} of ${data.samples.length}`).value = index;
});
byId("chooser").hidden = data.samples.length < 2;
byId("sample").addEventListener("change", (event) => choose(Number(event.target.value), player.step));
document.addEventListener("keydown", (event) => player.onKey(event));
window.addEventListener("scroll", closeHistory, { passive: true });
// page.html#step=12&sample=2 opens there, so that a moment can be pointed at.
const asked = new URLSearchParams(location.hash.slice(1));
const sample = Math.max(1, Math.min(data.samples.length, Number(asked.get("sample")) || 1)) - 1;
byId("sample").value = sample;
choose(sample, Number(asked.get("step") ?? steps) || 0);
