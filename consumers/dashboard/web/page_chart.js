// A chart of lines over one axis, drawn by uPlot. `show` draws a spec; the chart reports the user's actions.
import uPlot from "uPlot";
import { drawMarkLines, drawMarkSymbols, marksNear, MARKS_HEIGHT } from "page_marks";
import { clockText, decimalsOf, grouped, unitOf, valueText } from "page_text";
import { faded, inkOf } from "page_theme";

const NEAR_PIXELS = 24; // a line this near to the pointer is highlighted
const MOST_POINTS_AT_CURSOR = 12;
const FEW_POINTS = 40; // a shorter line has a symbol at each point
const LETTER_PIXELS = 6.5;
const LEAST_LEFT = 46;
const RIGHT = 20;
const TRIANGLE = 4.5;
const LOG_DIGITS = 3;
const EXACT_DIGITS = 6;
const WHEEL_PIXELS = 400;
const FURTHEST = 120;
const LINE_PIXELS = 16;
const MOST_ROWS = 8;
const TIP_GAP = 16;
const STEPS = [1, 2, 2.5, 5];
const ROUND_STEPS = Array.from({ length: 28 }, (_, power) => STEPS.map((step) => step * 10 ** (power - 14))).flat();
const WHOLE_STEPS = ROUND_STEPS.filter((step) => Number.isInteger(step));
const CLOCK_STEPS = [
  ...ROUND_STEPS.filter((step) => step < 1),
  ...[1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200],
  ...WHOLE_STEPS.map((step) => 86400 * step),
];
const STEPS_OF = { batch: WHOLE_STEPS, sample: WHOLE_STEPS, epoch: ROUND_STEPS, time: CLOCK_STEPS };

// A spec has:
//   axis     the horizontal axis
//   extent   the ends of that axis, and `range`, the visible part
//   ends     the ends of the vertical axis
//   isLog    the vertical axis is logarithmic
//   scale    the units of values
//   lines    {id, run, label, color, width, dash, fill, isStepped, xs, ys, isQuiet, low, high, note}; the pointer ignores
//            a quiet one; note(x) gives [value, more] for the tip
//   odd      {x, isAbove, color} of values that are not finite, and `cut` of outliers
//   marks    see page_marks.js
export class LineChart {
  // `on` has zoom(range or null), focus(run or null) and reset().
  constructor(element, on) {
    this.element = element;
    this.on = on;
    Object.assign(this, { uplot: null, spec: null, focused: null, isHovered: false });
    element.addEventListener("wheel", (event) => this.onWheel(event), { passive: false });
    element.addEventListener("pointermove", (event) => this.onPointer(event));
    element.addEventListener("pointerleave", () => this.onLeave());
  }

  // Draws a spec; uPlot is made again only if the style of a line has changed.
  show(spec) {
    const looks = JSON.stringify([
      spec.axis, spec.isLog, spec.marks.length > 0, ...spec.lines.map(({ id, color, width, dash, fill, low }) => [id, color, width, dash, fill, !!low]),
    ]);
    this.spec = spec;
    this.alone = new Map();
    const data = this.dataOf(spec);
    if (looks !== this.looks) {
      this.uplot?.destroy();
      this.uplot = new uPlot(this.options(), data, this.element);
      this.looks = looks;
      this.setFocus(this.focused);
    } else this.uplot.setData(data);
  }

  // Shows another part of the same data.
  zoom(range, extent, ends) {
    Object.assign(this.spec, { range, extent, ends });
    this.uplot.setScale("x", { min: range[0], max: range[1] });
  }

  resize() {
    const { clientWidth: width, clientHeight: height } = this.element;
    if (width && height) this.uplot?.setSize({ width, height });
  }

  destroy() {
    this.onLeave();
    this.uplot?.destroy();
    this.uplot = null;
  }

  // Highlights the line of a run, or none.
  setFocus(run) {
    this.focused = run;
    const place = this.columns.findIndex((line) => line.run === run && !line.isQuiet);
    if (this.uplot && this.columns.length > 1) this.uplot.setSeries(run === null || place < 0 ? null : place + 1, { focus: true });
  }

  // The lines on common places. A band has three columns: its ends and its line.
  dataOf({ lines }) {
    this.columns = lines.flatMap((line) => (line.low ? [{ ...line, isEdge: true }, { ...line, isEdge: true }, line] : [line]));
    const data = uPlot.join(lines.length ? lines.map((line) => (line.low ? [line.xs, line.low, line.high, line.ys] : [line.xs, line.ys])) : [[[]]]);
    this.columns.forEach((line, place) => {
      if (!line.isEdge && line.ys.includes(null)) this.alone.set(place + 1, placesAlone(data[place + 1]));
    });
    return data;
  }

  options() {
    const { spec, columns, element } = this;
    const [soft, grid] = [inkOf("--ink-soft"), inkOf("--line")];
    const common = { stroke: soft, font: `11px ${getComputedStyle(document.body).fontFamily}`, ticks: { stroke: grid, width: 1, size: 4 } };
    const isMany = columns.length > MOST_POINTS_AT_CURSOR;
    return {
      width: element.clientWidth || 300,
      height: element.clientHeight || 150,
      padding: [spec.marks.length ? MARKS_HEIGHT : 10, RIGHT, 0, 0],
      legend: { show: false },
      focus: { alpha: 0.22 },
      scales: {
        x: { time: false, range: () => this.spec.range },
        y: { distr: spec.isLog ? 3 : 1, range: () => this.spec.ends },
      },
      axes: [
        { ...common, size: 24, space: 60, grid: { show: false }, border: { show: true, stroke: grid, width: 1 }, incrs: STEPS_OF[spec.axis], splits: splitsOf, values: this.placeTexts.bind(this) },
        { ...common, space: 36, grid: { stroke: grid, width: 1 }, ticks: { show: false }, values: this.valueTexts.bind(this), size: widthOf, ...(spec.isLog ? {} : { incrs: this.valueSteps.bind(this), splits: splitsOf }) },
      ],
      series: [{}, ...columns.map((line, place) => this.seriesOf(line, place + 1))],
      bands: columns.flatMap((line, place) => (line.low && !line.isEdge ? [{ series: [place, place - 1], fill: faded(line.color, 0.16) }] : [])),
      cursor: {
        y: false,
        drag: { setScale: false },
        bind: { dblclick: () => () => this.on.reset() },
        sync: { key: `board ${spec.axis}`, scales: ["x", null], filters: { pub: (type) => type === "mousemove" || type === "mouseleave", sub: () => true } },
        points: { size: 6, show: (uplot, place) => (isMany || columns[place - 1].isEdge ? null : document.createElement("div")) },
        focus: { prox: columns.length > 1 ? NEAR_PIXELS : -1, dist: (uplot, place, index, at, pointer) => this.distance(columns[place - 1], at - pointer) },
      },
      hooks: {
        drawAxes: [(uplot) => drawMarkLines(uplot, this.spec.marks)],
        draw: [(uplot) => this.drawBeyond(uplot)],
        setSelect: [(uplot) => this.onSelect(uplot)],
        setSeries: [(uplot, place) => this.onFocus(place)],
        setCursor: [(uplot) => this.onCursor(uplot)],
      },
    };
  }

  seriesOf(line, place) {
    if (line.isEdge) return { width: 0, points: { show: false } };
    const { color, width, dash, fill, isStepped, ys } = line;
    return {
      stroke: color, width, dash, fill, paths: isStepped ? uPlot.paths.stepped({ align: -1 }) : undefined,
      points: { show: () => !isStepped && ys.length < FEW_POINTS, size: 5, fill: color, filter: (uplot, own, isShown) => (isShown ? null : this.alone.get(place)) },
    };
  }

  // In charts without the pointer, the highlighted line counts as the nearest.
  distance(line, pixels) {
    if (line.isQuiet || line.isEdge) return Infinity;
    if (this.isHovered) return pixels;
    return line.run === this.focused ? 0 : Infinity;
  }

  placeTexts(uplot, splits, axis, space, step) {
    if (this.spec.axis === "time") return splits.map((place) => clockText(place, step));
    return textsOf(splits, step, []);
  }

  valueTexts(uplot, splits, axis, space, step) {
    const { scale, isLog } = this.spec;
    return isLog ? splits.map((value) => (value === null ? "" : valueText(value, scale, LOG_DIGITS))) : textsOf(splits, step, scale);
  }

  valueSteps(uplot, axis, min, max) {
    const [factor] = unitOf(Math.max(Math.abs(min), Math.abs(max)), this.spec.scale);
    return ROUND_STEPS.map((step) => step * factor);
  }

  // Marks, and triangles: beyond the ends for values that are not finite, within them for outliers.
  drawBeyond(uplot) {
    const { left, top, width, height } = uplot.bbox;
    const size = TRIANGLE * uPlot.pxRatio;
    const draw = ({ x, isAbove, color }, inward) => {
      const at = uplot.valToPos(x, "x", true);
      if (at < left - 1 || at > left + width + 1) return;
      const edge = isAbove ? top + inward : top + height - inward;
      triangle(uplot.ctx, at, edge, isAbove ? -size : size, color);
    };
    this.spec.odd.forEach((one) => draw(one, -size));
    this.spec.cut.forEach((one) => draw(one, 2 * size));
    drawMarkSymbols(uplot, this.spec.marks);
  }

  onSelect(uplot) {
    const { left, width } = uplot.select;
    if (width < 2) return;
    const range = [uplot.posToVal(left, "x"), uplot.posToVal(left + width, "x")];
    uplot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
    this.on.zoom(range);
  }

  // Ctrl and the wheel, or two fingers on a touchpad, zoom at the pointer.
  onWheel(event) {
    if (!event.ctrlKey || !this.uplot) return;
    event.preventDefault();
    const { range: [from, to], extent: [low, high] } = this.spec;
    const place = this.uplot.posToVal(event.clientX - this.uplot.over.getBoundingClientRect().left, "x");
    const at = Math.min(Math.max(place, from), to);
    const pixels = event.deltaY * (event.deltaMode ? LINE_PIXELS : 1);
    const factor = Math.exp(Math.min(Math.max(pixels, -FURTHEST), FURTHEST) / WHEEL_PIXELS);
    const range = [Math.max(at - (at - from) * factor, low), Math.min(at + (to - at) * factor, high)];
    // Closer places are equal in numbers of 64 bits.
    if (range[1] - range[0] <= 1e-9 * Math.max(Math.abs(low), Math.abs(high))) return;
    this.spec.range = range;
    this.on.zoom(range[0] <= low && range[1] >= high ? null : range);
  }

  // uPlot follows the pointer over the lines; the symbols of marks are above them.
  onPointer(event) {
    this.isHovered = true;
    if (!this.uplot || this.uplot.over.contains(event.target)) return;
    this.uplot.setCursor({ left: event.clientX - this.uplot.over.getBoundingClientRect().left, top: 0 });
  }

  onLeave() {
    if (!this.isHovered) return;
    this.isHovered = false;
    hideTip();
    this.uplot?.setCursor({ left: -10, top: -10 });
    this.on.focus(null);
  }

  onFocus(place) {
    if (!this.isHovered) return;
    this.focused = place === null ? null : this.columns[place - 1].run;
    this.on.focus(this.focused);
  }

  onCursor(uplot) {
    const { left, top, idxs } = uplot.cursor;
    if (!this.isHovered) return;
    if (left < 0 || left > uplot.over.clientWidth) return hideTip();
    const at = uplot.posToVal(left, "x");
    const rows = [];
    this.columns.forEach((line, place) => {
      const index = idxs[place + 1];
      if (line.isQuiet || line.isEdge || index === null || index === undefined) return;
      // The line ends before this place.
      if (this.columns.length > 1 && (at < line.xs[0] || at > line.xs.at(-1))) return;
      const [x, y] = [uplot.data[0][index], uplot.data[place + 1][index]];
      const [value, more] = line.note?.(x) || [valueText(y, this.spec.scale, EXACT_DIGITS), ""];
      const apart = y === null ? Infinity : Math.abs(uplot.valToPos(y, "y") - top);
      rows.push({ x, y: y ?? -Infinity, apart, run: line.run, cells: { color: line.color, name: line.label, value, more } });
    });
    showTip(uplot.over, left, top, {
      rows, focused: this.focused, marks: marksNear(uplot, this.spec.marks, left), placeText: (x) => `${this.spec.axis} ${placeText(x, this.spec.axis)}`,
    });
  }
}

function placeText(value, axis) {
  return axis === "time" ? clockText(value, 0.1) : grouped(Number(value.toPrecision(8)));
}

function splitsOf(uplot, axis, min, max, step) {
  const splits = [];
  for (let place = Math.ceil(min / step - 1e-9); place * step <= max + step * 1e-9; place++) splits.push(place * step);
  return splits;
}

function textsOf(splits, step, scale) {
  const [factor, suffix] = unitOf(Math.max(...splits.map(Math.abs), 0), scale);
  const decimals = decimalsOf(step / factor);
  // A tick at zero may be slightly off.
  return splits.map((value) => grouped(Math.abs(value) < step / 1e6 ? 0 : value / factor, decimals) + suffix);
}

function widthOf(uplot, texts, axis, cycle) {
  if (cycle > 1) return uplot.axes[axis]._size;
  return Math.max(LEAST_LEFT, ...(texts || []).map((text) => LETTER_PIXELS * text.length + 14));
}

// A point between two gaps has no line.
function placesAlone(ys) {
  const known = ys.flatMap((y, place) => (y === undefined ? [] : [place]));
  return known.filter((place, at) => ys[place] !== null && (ys[known[at - 1]] ?? null) === null && (ys[known[at + 1]] ?? null) === null);
}

function triangle(pen, x, y, size, color) {
  pen.beginPath();
  pen.moveTo(x, y + size);
  pen.lineTo(x - size, y - size);
  pen.lineTo(x + size, y - size);
  pen.closePath();
  pen.fillStyle = color;
  pen.fill();
}

let tip = null;

// Shows the tip near the pointer: the nearest lines, the highest value first, and marks. `rows` are {x, y, apart, run,
// cells: {color, name, value, more}}, `marks` {color, text, when}.
function showTip(element, left, top, { rows, focused, marks, placeText }) {
  if (!rows.length && !marks.length) return hideTip();
  const near = [...rows].sort((one, other) => one.apart - other.apart);
  const shown = near.slice(0, MOST_ROWS).sort((one, other) => other.y - one.y);
  tip ||= document.body.appendChild(made("div", "tip chart-tip"));
  tip.replaceChildren();
  if (near.length) {
    tip.append(made("div", "", placeText((near.find(({ run }) => run === focused) || near[0]).x)));
    const table = tip.appendChild(made("table", ""));
    for (const { run, cells } of shown) {
      const row = table.appendChild(made("tr", rows.length > 1 && run === focused ? "nearest" : ""));
      const name = row.appendChild(made("td", ""));
      name.append(dotOf(cells.color), cells.name);
      row.append(made("td", "number", cells.value), made("td", "at", cells.more));
    }
    if (near.length > shown.length) tip.append(made("div", "at", `and ${near.length - shown.length} more`));
  }
  for (const mark of marks.slice(0, MOST_ROWS)) {
    const row = tip.appendChild(made("div", "at-mark"));
    row.append(dotOf(mark.color), mark.text, " ", made("span", "at", mark.when));
  }
  if (marks.length > MOST_ROWS) tip.append(made("div", "at", `and ${marks.length - MOST_ROWS} more`));
  const box = element.getBoundingClientRect();
  const [x, y] = [box.left + left, box.top + top];
  const { offsetWidth: width, offsetHeight: height } = tip;
  const isRight = x + TIP_GAP + width <= window.innerWidth;
  tip.style.left = `${Math.max(isRight ? x + TIP_GAP : x - TIP_GAP - width, 0)}px`;
  tip.style.top = `${Math.max(Math.min(y + TIP_GAP, window.innerHeight - height - 4), 0)}px`;
}

function hideTip() {
  tip?.remove();
  tip = null;
}

function made(tag, className, text = "") {
  return Object.assign(document.createElement(tag), { className, textContent: text });
}

function dotOf(color) {
  const dot = made("span", "dot");
  dot.style.background = color;
  return dot;
}
