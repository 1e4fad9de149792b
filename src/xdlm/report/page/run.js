/** A text, or an image, on its way: every state, what each step changed, and the history of every position.
 *
 * A change is [position, text, probability]: the text is null for a mask, the probability null where the
 * token came from the noise.
 */
export const KINDS = ["unmasked", "refined", "remasked"];

function kindOf(before, after) {
  if (before === null) return "unmasked";
  return after === null ? "remasked" : "refined";
}

export class Run {
  constructor() {
    this.states = [];
    this.kinds = []; // of each step: position -> kind of change
    this.counts = []; // of each step: kind -> how many
    this.histories = []; // of each position: {step, text, kind, probability}
    this.times = [];
    this.steps = 0; // in all, as far as one knows
    this.open = new Set();
  }

  /** Steps that are here. */
  get last() {
    return this.states.length - 1;
  }

  begin({ steps, time, changes, open }) {
    this.steps = steps;
    this.open = new Set(open);
    this.states = [changes.map(([, text]) => text)];
    this.kinds = [new Map()];
    this.counts = [Object.fromEntries(KINDS.map((kind) => [kind, 0]))];
    this.histories = changes.map(([, text]) => [{ step: 0, text, kind: "", probability: null }]);
    this.times = [time];
  }

  add({ step, steps, time, changes }) {
    const state = this.states.at(-1).slice();
    const kinds = new Map();
    const counts = Object.fromEntries(KINDS.map((kind) => [kind, 0]));
    for (const [position, text, probability] of changes) {
      const kind = kindOf(state[position], text);
      state[position] = text;
      kinds.set(position, kind);
      counts[kind] += 1;
      this.histories[position].push({ step, text, kind, probability });
    }
    this.steps = steps;
    this.states.push(state);
    this.kinds.push(kinds);
    this.counts.push(counts);
    this.times.push(time);
  }

  masked(step) {
    return this.states[step].filter((text) => text === null).length;
  }
}
