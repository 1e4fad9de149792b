"use strict";
(() => {
  const byId = (id) => document.getElementById(id);
  const data = JSON.parse(byId("data").textContent);
  const steps = data.times.length - 1;
  const masks = new Set(data.masks);
  const kinds = data.kinds; // code of a change -> its name, which is also its CSS class
  const CHART_HEIGHT = 100;
  const HISTORY_ROWS = 14;

  let run = null; // the sample on show, unfolded
  let step = steps;
  let timer = null;
  let held = null; // the position whose history is open

  /** All frames, changes and counts of a sample, from its first frame and what each step changed. */
  function unfold(sample) {
    const frames = [sample.first];
    const changes = [new Map()];
    const history = sample.first.map((token) => [{ step: 0, token, kind: 0 }]);
    sample.steps.forEach((flat, index) => {
      const frame = frames[index].slice();
      const change = new Map();
      for (let i = 0; i < flat.length; i += 4) {
        const [position, token, kind, probability] = flat.slice(i, i + 4);
        frame[position] = token;
        change.set(position, kind);
        history[position].push({ step: index + 1, token, kind, probability });
      }
      frames.push(frame);
      changes.push(change);
    });
    const counts = changes.map((change) => {
      const count = {};
      for (const kind in kinds) count[kind] = 0;
      for (const kind of change.values()) if (kind in kinds) count[kind] += 1;
      return count;
    });
    return { frames, changes, history, counts };
  }

  function add(parent, tag, text, className) {
    const child = document.createElement(tag);
    if (text !== undefined) child.textContent = text;
    if (className) child.className = className;
    parent.append(child);
    return child;
  }

  function choose(sample) {
    run = unfold(data.samples[sample]);
    closeHistory();
    byId("text").replaceChildren();
    if (data.image) makeCanvases();
    else makeTokens();
    drawChart();
    show(step);
  }

  function makeTokens() {
    run.frames[0].forEach((_, position) => {
      byId("text").append(""); // where the space before the token goes, see showTokens()
      add(byId("text"), "span").dataset.position = position;
    });
  }

  /** One for the image, one for what changed: a pixel of them is a cell. */
  function makeCanvases() {
    for (const label of ["The image at this step", "What the step changed"]) {
      const canvas = add(byId("text"), "canvas");
      canvas.width = canvas.height = data.image.cells;
      canvas.setAttribute("role", "img");
      canvas.setAttribute("aria-label", label);
    }
  }

  const bytes = (colour) => [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16));

  function showImage(frame, change) {
    const { cells, channels } = data.image;
    const [state, changed] = [...byId("text").children].map((canvas) => canvas.getContext("2d"));
    const style = getComputedStyle(document.documentElement);
    const looks = Object.values(kinds).map((name) => bytes(style.getPropertyValue(`--${name}`).trim()));
    const codes = Object.keys(kinds);
    const image = state.createImageData(cells, cells);
    const map = changed.createImageData(cells, cells);
    for (let cell = 0; cell < cells * cells; cell += 1) {
      let most = 0; // channels may do several things: what is drawn is the last kind
      for (let part = 0; part < 3; part += 1) {
        const position = cell * channels + (channels === 3 ? part : 0);
        image.data[4 * cell + part] = palette[frame[position]][part];
        most = Math.max(most, change.get(position) ?? 0);
      }
      image.data[4 * cell + 3] = 255;
      if (most) map.data.set([...looks[codes.indexOf(String(most))], 255], 4 * cell);
    }
    state.putImageData(image, 0, 0);
    changed.putImageData(map, 0, 0);
  }

  function showTokens(frame, change) {
    const spans = byId("text").children;
    frame.forEach((token, position) => {
      const masked = masks.has(token);
      const span = spans[position];
      // A line break is both shown as a sign and made, so that paragraphs look like paragraphs.
      const text = masked ? "" : data.pieces[token].replaceAll("↵", "↵\n");
      // A word's leading space stands outside its span: at the end of a line it would be tinted.
      const [, space, rest] = text.match(/^( *(?=\S))?(.*)$/s);
      span.previousSibling.data = space ?? "";
      if (span.textContent !== rest) span.textContent = rest;
      const kind = kinds[change.get(position)] ?? "";
      const heldNow = position === held ? "held" : "";
      span.className = [masked ? "masked" : "", kind, heldNow].filter(Boolean).join(" ");
    });
  }

  function show(wanted) {
    step = Math.max(0, Math.min(steps, wanted));
    const frame = run.frames[step];
    if (data.image) showImage(frame, run.changes[step]);
    else showTokens(frame, run.changes[step]);

    const summary = [];
    for (const kind in kinds) {
      const count = run.counts[step][kind];
      byId(`count-${kinds[kind]}`).textContent = count;
      summary.push(`${count} ${kinds[kind]}`);
    }
    const left = frame.filter((token) => masks.has(token)).length;
    byId("count-masked").textContent = left;
    summary.push(`${left} masked`);

    const time = `t = ${data.times[step].toFixed(3)}`;
    byId("clock").textContent = `step ${step} / ${steps}, ${time}`;
    byId("step").value = step;
    byId("step").setAttribute("aria-valuetext", `step ${step} of ${steps}, ${time}`);
    // While playing, a screen reader could not keep up with every step.
    if (timer === null) byId("status").textContent = `Step ${step}: ${summary.join(", ")}`;
    byId("chart").querySelector(".marker").setAttribute("x", step);
    if (held !== null) openHistory(held);
  }

  /** Stacked bars, one column a frame; the first has no step before it and stays empty. */
  function drawChart() {
    const chart = byId("chart");
    const draw = (tag, attributes) => {
      const shape = document.createElementNS(chart.namespaceURI, tag);
      for (const name in attributes) shape.setAttribute(name, attributes[name]);
      chart.append(shape);
    };
    const total = (count) => Object.values(count).reduce((a, b) => a + b, 0);
    const highest = Math.max(1, ...run.counts.map(total));
    const gap = steps < 150 ? 0.1 : 0;
    const base = new Array(steps + 1).fill(0);
    chart.replaceChildren();
    chart.setAttribute("viewBox", `0 0 ${steps + 1} ${CHART_HEIGHT}`);
    for (const kind in kinds) {
      let path = "";
      run.counts.forEach((count, x) => {
        const height = (count[kind] / highest) * CHART_HEIGHT;
        if (!height) return;
        const bottom = CHART_HEIGHT - base[x];
        path += `M${x + gap} ${bottom}v${-height}h${1 - 2 * gap}v${height}z`;
        base[x] += height;
      });
      draw("path", { d: path, class: kinds[kind] });
    }
    draw("rect", { class: "marker", x: 0, y: 0, width: 1, height: CHART_HEIGHT });
    byId("highest").textContent = highest;
  }

  function openHistory(position) {
    const box = byId("history");
    const span = byId("text").children[position];
    const events = run.history[position];
    const current = events.findLastIndex((event) => event.step <= step);
    const start = Math.max(0, Math.min(current - HISTORY_ROWS + 4, events.length - HISTORY_ROWS));
    box.replaceChildren();
    const table = add(box, "table");
    add(table, "caption", `position ${position + 1} of ${run.history.length}`);
    const row = (label, text, rowClass, kind) => {
      const line = add(table, "tr", undefined, rowClass);
      add(line, "th", label).scope = "row";
      add(line, "td", text, kind);
    };
    if (start > 0) row("…", `${start} earlier`);
    events.slice(start, start + HISTORY_ROWS).forEach((event, offset) => {
      const index = start + offset;
      const when = index === current ? "now" : index > current ? "later" : "";
      const masked = masks.has(event.token);
      const text = masked ? "[mask]" : `“${data.pieces[event.token]}”`;
      // The model's own probability of what it wrote; what came from the noise has none.
      const sure = event.probability >= 0 ? `  ${(event.probability / 10).toFixed(1)} %` : "";
      row(`step ${event.step}`, text + sure, when, kinds[event.kind]);
    });
    const left = events.length - start - HISTORY_ROWS;
    if (left > 0) row("…", `${left} later`);

    if (held !== null && held !== position) byId("text").children[held].classList.remove("held");
    held = position;
    span.classList.add("held");
    box.hidden = false;
    const anchor = span.getClientRects()[0] ?? span.getBoundingClientRect();
    const below = anchor.bottom + 8;
    const fits = below + box.offsetHeight < window.innerHeight;
    const top = fits ? below : Math.max(4, anchor.top - box.offsetHeight - 8);
    const widest = document.documentElement.clientWidth - box.offsetWidth - 4;
    box.style.top = `${top}px`;
    box.style.left = `${Math.max(4, Math.min(anchor.left, widest))}px`;
  }

  function closeHistory() {
    if (held !== null) byId("text").children[held]?.classList.remove("held");
    held = null;
    byId("history").hidden = true;
  }

  function goTo(wanted) {
    clearInterval(timer);
    timer = null;
    byId("play").textContent = "Play";
    show(wanted);
  }

  function toggle() {
    if (timer !== null) {
      goTo(step);
      return;
    }
    if (step === steps) show(0);
    const delay = Math.max(40, Math.min(400, 9000 / Math.max(1, steps)));
    timer = setInterval(() => {
      if (step + 1 < steps) show(step + 1);
      else goTo(steps);
    }, delay);
    byId("play").textContent = "Pause";
  }

  function listen() {
    byId("play").addEventListener("click", toggle);
    byId("step").addEventListener("input", (event) => goTo(Number(event.target.value)));
    byId("sample").addEventListener("change", (event) => choose(Number(event.target.value)));
    byId("chart").addEventListener("click", (event) => {
      const box = byId("chart").getBoundingClientRect();
      goTo(Math.floor(((event.clientX - box.left) / box.width) * (steps + 1)));
    });
    const overToken = (event) => {
      const span = event.target.closest("#text span");
      if (span) openHistory(Number(span.dataset.position));
      else closeHistory();
    };
    document.addEventListener("pointerover", overToken);
    document.addEventListener("click", overToken);
    window.addEventListener("scroll", closeHistory, { passive: true });
    document.addEventListener("keydown", (event) => {
      if (event.altKey || event.ctrlKey || event.metaKey) return;
      const own = event.target.tagName; // these have a use of their own for some keys
      const moves = {
        ArrowLeft: step - 1, ArrowRight: step + 1, Home: 0, End: steps,
      };
      if (event.key === "Escape") closeHistory();
      else if (event.key === " " && !["BUTTON", "SELECT"].includes(own)) toggle();
      else if (event.key in moves && !["INPUT", "SELECT"].includes(own)) goTo(moves[event.key]);
      else return;
      event.preventDefault();
    });
  }

  const palette = data.image ? data.pieces.map(bytes) : [];
  data.samples.forEach((_, index) => {
    add(byId("sample"), "option", `${index + 1} of ${data.samples.length}`).value = index;
  });
  byId("chooser").hidden = data.samples.length < 2;
  byId("step").max = steps;
  // page.html#step=12&sample=2 opens there, so that a moment can be pointed at.
  const place = new URLSearchParams(location.hash.slice(1));
  step = Number(place.get("step") ?? steps) || 0;
  const sample = Math.max(1, Math.min(data.samples.length, Number(place.get("sample")) || 1)) - 1;
  byId("sample").value = sample;
  listen();
  choose(sample);
})();
