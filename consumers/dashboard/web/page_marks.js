// Marks in charts: commands, checkpoints, evaluations, starts of attempts. A mark is a line below the curves and a symbol
// above the plot.
import uPlot from "uPlot";
import { clockText, grouped } from "page_text";
import { inkOf } from "page_theme";

export const MARKS_HEIGHT = 20;
const APART = 16; // pixels between two symbols, and between two lines of one kind
const NEAR_PIXELS = 9;
const PLACES = { batch: 1, sample: 2, epoch: 3, time: 4 };
// In a box of 10 by 10; the first ones have priority where symbols overlap.
const SYMBOLS = {
  __proto__: null,
  attempt: "M5 1.5a3.5 3.5 0 1 0 3.5 3.5h-1.4a2.1 2.1 0 1 1-2.1-2.1v1.6l2.6-2.3-2.6-2.2z",
  stop: "M2.2 2.2h5.6v5.6h-5.6z",
  pause: "M2.5 2h1.8v6h-1.8zM5.7 2h1.8v6h-1.8z",
  resume: "M3 1.8l5 3.2-5 3.2z",
  set: "M1.5 2.6h7v1.3h-7zM1.5 6.1h7v1.3h-7zM5.6 1.6h1.6v3.3h-1.6zM2.6 5.1h1.6v3.3h-1.6z",
  command: "M2 1.6l3.4 3.4-3.4 3.4-1-1 2.4-2.4-2.4-2.4zM5.2 7.2h3.8v1.3h-3.8z",
  checkpoint: "M4.3 1h1.4v3.6h1.8l-2.5 2.7-2.5-2.7h1.8zM2 8h6v1.3h-6z",
  evaluation: "M1.4 5.2l1-1 1.8 1.8 3.6-4 1 1-4.6 5z",
};
const KINDS = Object.keys(SYMBOLS);
const FAINT = ["evaluation", "checkpoint"]; // frequent kinds

// The marks of some runs on an axis, in order. The server sends each as [kind, batch, sample, epoch, seconds, time, text].
export function marksOn(axis, runs, marksOf, colorOf) {
  const marks = runs.flatMap((run) => (marksOf.get(run.id) || []).map((sent) => {
    const [kind, batch, , , seconds, time, text] = sent;
    const x = sent[PLACES[axis]];
    const own = { batch: "", time: ` · ${clockText(seconds, 0.1)}` }[axis] ?? ` · ${axis} ${grouped(Number(x.toPrecision(6)))}`;
    return {
      x, kind: SYMBOLS[kind] ? kind : "command", run: run.id, color: colorOf(run),
      text: (runs.length > 1 ? `${run.label}: ` : "") + text, when: `batch ${grouped(batch)}${own} · ${timeText(time)}`,
    };
  }));
  return marks.sort((one, other) => one.x - other.x);
}

export function drawMarkLines(uplot, marks) {
  const pen = uplot.ctx;
  const { top, height } = uplot.bbox;
  const last = new Map();
  pen.save();
  pen.setLineDash([3 * uPlot.pxRatio, 3 * uPlot.pxRatio]);
  pen.lineWidth = uPlot.pxRatio;
  for (const { at, mark } of shownOf(uplot, marks)) {
    const kind = `${mark.run} ${mark.kind}`;
    if (at - (last.get(kind) ?? -APART) < APART) continue;
    last.set(kind, at);
    pen.globalAlpha = FAINT.includes(mark.kind) ? 0.25 : 0.65;
    pen.strokeStyle = mark.color;
    pen.beginPath();
    const x = uplot.bbox.left + at * uPlot.pxRatio;
    pen.moveTo(x, top);
    pen.lineTo(x, top + height);
    pen.stroke();
  }
  pen.restore();
}

// A symbol for each mark with room, the more important first.
export function drawMarkSymbols(uplot, marks) {
  const shown = shownOf(uplot, marks);
  const taken = [];
  const [pen, ratio] = [uplot.ctx, uPlot.pxRatio];
  for (const kind of KINDS) {
    for (const { at, mark } of shown) {
      if (mark.kind !== kind || taken.some((other) => Math.abs(other - at) < APART)) continue;
      taken.push(at);
      pen.save();
      pen.translate(uplot.bbox.left + at * ratio, uplot.bbox.top - 0.5 * MARKS_HEIGHT * ratio);
      pen.scale(ratio, ratio);
      pen.beginPath();
      pen.arc(0, 0, 7, 0, 2 * Math.PI);
      pen.fillStyle = inkOf("--card");
      pen.strokeStyle = mark.color;
      pen.lineWidth = 1.2;
      pen.fill();
      pen.stroke();
      pen.translate(-4.5, -4.5);
      pen.scale(0.9, 0.9);
      pen.fillStyle = mark.color;
      pen.fill(new Path2D(SYMBOLS[kind]));
      pen.restore();
    }
  }
}

export function marksNear(uplot, marks, left) {
  return shownOf(uplot, marks).filter(({ at }) => Math.abs(at - left) <= NEAR_PIXELS).map(({ mark }) => mark);
}

// The visible marks, with their pixels from the left end of the plot.
function shownOf(uplot, marks) {
  const { min, max } = uplot.scales.x;
  return marks.filter(({ x }) => x >= min && x <= max).map((mark) => ({ mark, at: uplot.valToPos(mark.x, "x") }));
}

function timeText(seconds) {
  const time = new Date(1000 * seconds);
  const day = time.toDateString() === new Date().toDateString() ? {} : /** @type {const} */ ({ month: "short", day: "numeric" });
  return time.toLocaleString("en-GB", { ...day, hour: "2-digit", minute: "2-digit", second: "2-digit" });
}
