/** Stacked bars, one column a state; the first has no step before it and stays empty. */
import { KINDS } from "./run.js";

const HEIGHT = 100;

function draw(chart, tag, attributes) {
  const shape = document.createElementNS(chart.namespaceURI, tag);
  for (const name in attributes) shape.setAttribute(name, attributes[name]);
  chart.append(shape);
}

/** Returns the highest bar. */
export function drawChart(chart, counts, columns) {
  const total = (count) => KINDS.reduce((sum, kind) => sum + count[kind], 0);
  const highest = Math.max(1, ...counts.map(total));
  const gap = columns < 150 ? 0.1 : 0;
  const base = new Array(counts.length).fill(0);
  chart.replaceChildren();
  chart.setAttribute("viewBox", `0 0 ${columns} ${HEIGHT}`);
  for (const kind of KINDS) {
    let path = "";
    counts.forEach((count, x) => {
      const height = (count[kind] / highest) * HEIGHT;
      if (!height) return;
      path += `M${x + gap} ${HEIGHT - base[x]}v${-height}h${1 - 2 * gap}v${height}z`;
      base[x] += height;
    });
    draw(chart, "path", { d: path, class: kind });
  }
  draw(chart, "rect", { class: "marker", x: 0, y: 0, width: 1, height: HEIGHT });
  return highest;
}

export function mark(chart, column) {
  chart.querySelector(".marker")?.setAttribute("x", column);
}

export function columnAt(chart, event) {
  const box = chart.getBoundingClientRect();
  return Math.floor(((event.clientX - box.left) / box.width) * chart.viewBox.baseVal.width);
}
