// Charts of many lines, and of groups of runs: drawn as one series of hairlines, which a browser without a GPU paints
// sixty times a second, with a list of the lines next to the pointer in place of one of all.
import { echarts } from "nicegui-echart";
import { smoothed, usualRange } from "page_scales";
import { grouped, valueText } from "page_text";
import { inkOf } from "page_theme";

const MOST_SINGLE = 12;
const NEAR_PIXELS = 24;
const TIP_ROWS = 8;
const DASHES = [null, [7, 4], [2, 3]];
const DIMMED = 0.22;
const BASELINE_DASH = [8, 4];
const POINTER_GAP = 16;
const ODD_SIZE = [9, 6];
const ODD_OFFSET = 4;

// Whether the lines of a chart are drawn in this way.
export function isCrowd(lines) {
  return lines.length > MOST_SINGLE || lines.some((one) => one.line.low);
}

const Line = echarts.graphic.extendShape({
  type: "crowdLine",
  shape: { xs: [], ys: [], from: 0, to: 0, x0: 0, kx: 1, y0: 0, ky: 1, isLog: false },
  buildPath(path, { xs, ys, from, to, x0, kx, y0, ky, isLog }) {
    let isOpen = false;
    for (let place = from; place < to; place++) {
      const y = ys[place];
      if (y === null || (isLog && !(y > 0))) {
        isOpen = false;
        continue;
      }
      const [left, top] = [x0 + kx * xs[place], y0 + ky * (isLog ? Math.log10(y) : y)];
      if (isOpen) path.lineTo(left, top);
      else {
        path.moveTo(left, top);
        // A point between two holes is a dot.
        const after = place + 1 < to ? ys[place + 1] : null;
        if (after === null || after === undefined) path.lineTo(left + 1.5, top);
      }
      isOpen = true;
    }
  },
});

const Band = echarts.graphic.extendShape({
  type: "crowdBand",
  shape: { xs: [], low: [], high: [], from: 0, to: 0, x0: 0, kx: 1, y0: 0, ky: 1, isLog: false },
  buildPath(path, { xs, low, high, from, to, x0, kx, y0, ky, isLog }) {
    const top = (y) => y0 + ky * (isLog ? Math.log10(y) : y);
    const isHole = (place) => low[place] === null || high[place] === null || (isLog && !(low[place] > 0));
    for (let begin = from; begin < to; begin++) {
      if (isHole(begin)) continue;
      let end = begin;
      path.moveTo(x0 + kx * xs[begin], top(high[begin]));
      while (end + 1 < to && !isHole(end + 1)) path.lineTo(x0 + kx * xs[++end], top(high[end]));
      for (let place = end; place >= begin; place--) path.lineTo(x0 + kx * xs[place], top(low[place]));
      path.closePath();
      begin = end;
    }
  },
});

echarts.graphic.registerShape("crowdLine", Line);
echarts.graphic.registerShape("crowdBand", Band);

// The least and the greatest value of each line between two places, of a band its edges. Kept as long as the line is.
const known = new WeakMap();
export function endsOf(line, range, isLog, isAll) {
  const key = JSON.stringify([range, isLog, isAll]);
  const kept = known.get(line);
  if (kept?.key === key) return kept.ends;
  const [first, last] = range || [-Infinity, Infinity];
  const values = [];
  for (const ys of line.low ? [line.low, line.high] : [line.y]) {
    for (let place = 0; place < ys.length; place++) {
      const [x, y] = [line.x[place], ys[place]];
      if (y !== null && x >= first && x <= last && !(isLog && y <= 0)) values.push(y);
    }
  }
  const usual = isAll || isLog || line.low ? null : usualRange(values);
  const ends = usual || values.reduce(([low, high], one) => [Math.min(low, one), Math.max(high, one)], [Infinity, -Infinity]);
  known.set(line, { key, ends });
  return ends;
}

// The series of a chart, and the values that are beyond its edges. `lines` are {run, line, color}.
export function crowdSeries(lines, axis, look) {
  const drawn = lines.map((one) => ({ ...one, ys: smoothedYs(one.line, look, axis) }));
  const rank = ({ run }) => (run.baseline ? 3 : run.isGroup ? 2 : run.faint ? 0 : 1);
  drawn.sort((one, other) => rank(one) - rank(other));
  const items = [
    ...drawn.filter(({ line }) => line.low).map((one) => ({ ...one, isBand: true })),
    ...drawn.map((one) => ({ ...one, isBand: false })),
  ];
  const card = inkOf("--card");
  const mark = { type: "scatter", yAxisIndex: 1, symbol: "triangle", z: 4, zlevel: 1, clip: false, silent: true };
  const [first, last] = look.range || [-Infinity, Infinity];
  const odd = lines.flatMap(({ line, color }) => {
    const shown = line.n.filter(([x]) => x >= first && x <= last);
    return oddMarks(shown).map((one) => ({ ...one, itemStyle: { color } }));
  });
  const outliers = [];
  const cut = [];
  for (const { line, color } of lines) {
    line.y.forEach((y, place) => {
      const x = line.x[place];
      if (y === null || (y <= axis.max && y >= axis.min) || x < first || x > last || (look.isLog && y <= 0)) return;
      outliers.push(y);
      cut.push({ value: [x, y > axis.max ? 0.97 : 0.03], symbolRotate: y > axis.max ? 0 : 180, itemStyle: { color } });
    });
  }
  return {
    outliers,
    series: [
      {
        type: "custom", id: "crowd", z: 2, zlevel: 1, silent: true, clip: true, animation: false, progressive: 0,
        data: items.map((_, place) => [place]), encode: { x: [], y: [], tooltip: [] }, tooltip: { show: false },
        renderItem: (params, api) => rendered(items[params.dataIndex], params, api, axis, look),
      },
      { ...mark, id: "crowd not finite", data: odd },
      { ...mark, id: "crowd cut off", symbolSize: 9, itemStyle: { borderColor: card, borderWidth: 1 }, data: cut },
    ],
  };
}

// Marks of what is not finite, for a vertical axis from 0 to 1: beyond its ends, where they cover no line. Infinity is
// above, all else below.
export function oddMarks(odd) {
  return odd.map(([x, text]) => {
    const isAbove = text === "inf";
    return {
      value: [x, isAbove ? 1 : 0], text, symbolRotate: isAbove ? 0 : 180,
      symbolSize: ODD_SIZE, symbolOffset: [0, isAbove ? -ODD_OFFSET : ODD_OFFSET],
    };
  });
}

function smoothedYs(line, look, axis) {
  const amount = look.smoothing(line.x.length);
  if (!amount) return line.y;
  const points = line.x.map((x, place) => [x, line.y[place] !== null && look.isLog && line.y[place] <= 0 ? null : line.y[place]]);
  return smoothed(points, amount, axis.min, axis.max).map(([, y]) => y);
}

function rendered(item, params, api, axis, look) {
  const { run, line, color, dash, ys, isBand } = item;
  const isLog = look.isLog;
  const of = (y) => (isLog ? Math.log10(y) : y);
  const [left, right] = [params.coordSys.x, params.coordSys.x + params.coordSys.width];
  const [first, last] = look.ends();
  const kx = (right - left) / (last - first || 1);
  const [, bottom] = api.coord([first, axis.min]);
  const [, top] = api.coord([first, axis.max]);
  const ky = (top - bottom) / (of(axis.max) - of(axis.min));
  const from = Math.max(below(line.x, first) - 1, 0);
  const to = Math.min(below(line.x, last) + 2, line.x.length);
  const shape = { xs: line.x, from, to, x0: left - kx * first, kx, y0: bottom - ky * of(axis.min), ky, isLog };
  const focused = look.focused();
  const isFocused = focused === run.id;
  const dimmed = focused !== null && !isFocused ? DIMMED : 1;
  if (isBand) {
    return { type: "crowdBand", shape: { ...shape, low: line.low, high: line.high }, style: { fill: color, opacity: 0.16 * Math.max(dimmed, 0.4) }, silent: true };
  }
  const width = isFocused ? 2.5 : run.baseline || run.isGroup ? 2 : 1;
  const lineDash = run.baseline ? BASELINE_DASH : DASHES[dash];
  const opacity = (run.faint && !isFocused ? 0.35 : 1) * (run.baseline ? 1 : dimmed);
  return {
    type: "crowdLine", shape: { ...shape, ys }, silent: true, z2: isFocused ? 9 : 0,
    style: { stroke: color, fill: null, lineWidth: width, opacity, lineDash, lineJoin: "bevel" },
  };
}

// How many places of a line are before that one.
function below(xs, x) {
  let [low, high] = [0, xs.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (xs[middle] < x) low = middle + 1;
    else high = middle;
  }
  return low;
}

// What each line shows at a place of the axis, nearest to the pointer first: {run, color, x, y, apart in pixels}.
export function nearestAt(chart, lines, x, pixel) {
  const found = [];
  for (const { run, line, color } of lines) {
    const place = below(line.x, x);
    const [before, after] = [Math.max(place - 1, 0), Math.min(place, line.x.length - 1)];
    const near = Math.abs(line.x[before] - x) <= Math.abs(line.x[after] - x) ? before : after;
    const y = line.y[near];
    // A line that does not come that far is not there.
    if (y === null || y === undefined || x < line.x[0] || x > line.x[line.x.length - 1]) continue;
    const [one, other] = [line.y[before], line.y[after]];
    const share = line.x[after] > line.x[before] ? (x - line.x[before]) / (line.x[after] - line.x[before]) : 0;
    const height = one === null || other === null ? y : one + (other - one) * share;
    const top = chart.convertToPixel({ yAxisIndex: 0 }, height);
    found.push({ run, color, x: line.x[near], y, apart: Math.abs(top - pixel), low: line.low?.[near], high: line.high?.[near], count: line.count?.[near] });
  }
  return found.sort((one, other) => one.apart - other.apart);
}

// Follows the pointer over a chart of many lines: names those next to it, and tells which is the nearest.
export class CrowdPointer {
  constructor(plot, lines, focus, placeText) {
    Object.assign(this, { plot, lines, focus, placeText, tip: null, waiting: null });
    const zr = plot.chart.getZr();
    zr.on("mousemove", (event) => {
      this.at = { x: event.offsetX, y: event.offsetY, isDrawing: event.event.buttons > 0 };
      this.waiting ||= requestAnimationFrame(() => this.look());
    });
    zr.on("globalout", () => this.leave());
  }

  look() {
    this.waiting = null;
    const { chart } = this.plot;
    const lines = this.lines();
    if (chart.isDisposed() || !this.at) return;
    if (!isCrowd(lines) || this.at.isDrawing || !chart.containPixel({ gridIndex: 0 }, [this.at.x, this.at.y])) return this.leave();
    const x = chart.convertFromPixel({ xAxisIndex: 0 }, this.at.x);
    const near = nearestAt(chart, lines, x, this.at.y);
    const nearest = near[0] && near[0].apart <= NEAR_PIXELS ? near[0].run.id : null;
    this.focus(nearest);
    this.show(near, nearest);
  }

  show(near, nearest) {
    if (!near.length) return this.hide();
    const shown = near.slice(0, TIP_ROWS).sort((one, other) => other.y - one.y);
    const rows = shown.map((one) => {
      const values = [one.y, one.low, one.high].map((value) => valueText(value, this.plot.scale, 6));
      const range = one.low === undefined ? "" : `${values[1]} to ${values[2]}${one.count < one.run.size ? `, ${grouped(one.count)} of ${grouped(one.run.size)} runs` : ""}`;
      const name = echarts.format.encodeHTML(one.run.label);
      return `<tr${one.run.id === nearest ? ' class="nearest"' : ""}><td><span class="dot" style="background:${one.color}"></span>${name}</td>` +
        `<td class="number">${echarts.format.encodeHTML(values[0])}</td><td class="at">${echarts.format.encodeHTML(range)}</td></tr>`;
    });
    const more = near.length > shown.length ? `<div class="at">and ${near.length - shown.length} more</div>` : "";
    this.tip ||= document.body.appendChild(Object.assign(document.createElement("div"), { className: "tip crowd-tip" }));
    this.tip.innerHTML = `<div>${echarts.format.encodeHTML(this.placeText((near.find((one) => one.run.id === nearest) || near[0]).x))}</div><table>${rows.join("")}</table>${more}`;
    const box = this.plot.element.getBoundingClientRect();
    const [left, top] = [box.left + this.at.x, box.top + this.at.y];
    const { offsetWidth: width, offsetHeight: height } = this.tip;
    const isRight = left + POINTER_GAP + width <= window.innerWidth;
    this.tip.style.left = `${Math.max(isRight ? left + POINTER_GAP : left - POINTER_GAP - width, 0)}px`;
    this.tip.style.top = `${Math.max(Math.min(top + POINTER_GAP, window.innerHeight - height - 4), 0)}px`;
  }

  hide() {
    this.tip?.remove();
    this.tip = null;
  }

  leave() {
    this.at = null;
    this.hide();
    this.focus(null);
  }
}
