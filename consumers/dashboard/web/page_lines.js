// The specs of charts for page_chart.js: the lines of a metric, and the stacked phases of a step.
import uPlot from "uPlot";
import { grouped, SECONDS, secondsText, valueText } from "page_text";
import { colorOf, faded, isDark } from "page_theme";

const MOST_THICK = 12;
const DASHES = [undefined, [7, 4], [2, 3]];
const BASELINE_DASH = [8, 4];
const PHASE_COLORS = {
  data: ["#e69f00", "#f0b73a"],
  forward: ["#3b82c4", "#6fb1ea"],
  loss: ["#8fbce0", "#b9d7f2"],
  backward: ["#205493", "#3f7fd0"],
  optimizer: ["#0b8a6a", "#36c298"],
  publishing: ["#c2255c", "#ff7eb6"],
  evaluation: ["#8b3fd1", "#c297ff"],
  other: ["#9aa4ae", "#6b7580"],
};
const MARK = "#e5484d";
const SHORT_DIGITS = 5;
const EXACT_DIGITS = 6;
const USUAL_SHARE = 0.9;
const STEP_BEYOND = 4; // times the usual duration: longer steps are cut off
const FEWEST_SMOOTHED = 10;
const NEIGHBOURS = 4;
const FEWEST_POINTS = 20;
const FAR_BEYOND = 2;
const WIDEST_SMOOTHING = 0.25;
const RATE = /(^|\/)(lr|learning_rate)(?![a-zA-Z])/;

// The lines of a metric. `lines` are {run, line: {x, y, n, low, high, count}}; `look` is {id, scale, isLog, isAll, smoothing}.
export function metricSpec(lines, look) {
  const isThick = lines.length <= MOST_THICK;
  const rank = ({ run }) => (run.baseline ? 3 : run.isGroup ? 2 : run.faint ? 0 : 1);
  const isMany = lines.length > 1;
  const specs = [...lines].sort((one, other) => rank(one) - rank(other)).flatMap(/** @returns {any[]} */ ({ run, line }) => {
    const color = colorOf(run);
    const ys = look.isLog ? line.y.map((y) => (y > 0 ? y : null)) : line.y;
    const common = {
      run: run.id, label: isMany ? run.label : "", xs: line.x,
      width: run.baseline || run.isGroup ? 2 : isThick ? 1.8 : 1, dash: run.baseline ? BASELINE_DASH : DASHES[run.dash],
    };
    const [low, high] = [line.low, line.high].map((edge) => (edge && look.isLog ? edge.map((y) => (y > 0 ? y : null)) : edge));
    const whole = { ...common, id: run.id, ys, low, high, color: run.faint ? faded(color, 0.35) : color, note: (x) => noteOf(line, x, run, look.scale) };
    if (!look.smoothing || line.x.length < FEWEST_SMOOTHED || RATE.test(look.id)) return [whole];
    const even = smoothed(line.x, ys, look.smoothing, ...endsOf([{ line }], null, look));
    const note = (x) => [valueText(even[line.x.indexOf(x)], look.scale, EXACT_DIGITS), noteOf(line, x, run, look.scale)[0]];
    return [
      { ...whole, color: faded(color, 0.28), width: 1, isQuiet: true },
      { ...common, id: `${run.id} smoothed`, ys: even, color, note },
    ];
  });
  const odd = lines.flatMap(({ run, line }) => line.n.map(([x, text]) => ({ x, isAbove: text === "inf", color: isMany ? colorOf(run) : MARK })));
  return { lines: specs, odd, cut: [], isLog: look.isLog, scale: look.scale };
}

// The outliers beyond the ends of the vertical axis in a range, for triangles and in words.
export function cutOf(lines, [first, last], [low, high], look) {
  const found = [];
  for (const { run, line } of lines) {
    line.y.forEach((y, place) => {
      const x = line.x[place];
      if (y !== null && (y > high || y < low) && x >= first && x <= last && !(look.isLog && y <= 0)) found.push({ x, y, isAbove: y > high, color: colorOf(run) });
    });
  }
  if (!found.length) return { cut: found, text: "" };
  const values = found.map(({ y }) => y);
  const [least, greatest] = [Math.min(...values), Math.max(...values)];
  const [leastText, greatestText] = [least, greatest].map((one) => valueText(one, look.scale, SHORT_DIGITS));
  const text = found.length === 1 ? `outlier: ${greatestText}`
    : "outliers " + (least > high ? `up to ${greatestText}` : greatest < low ? `down to ${leastText}` : `from ${leastText} to ${greatestText}`);
  return { cut: found, text };
}

// The least and the greatest value in a range, without outliers; a log scale has room for them.
export function endsOf(lines, range, { isLog, isAll }) {
  const [first, last] = range || [-Infinity, Infinity];
  let [low, high] = [Infinity, -Infinity];
  for (const { line } of lines) {
    const values = [];
    for (const ys of line.low ? [line.low, line.high] : [line.y]) {
      for (let place = 0; place < ys.length; place++) {
        if (ys[place] !== null && line.x[place] >= first && line.x[place] <= last && !(isLog && ys[place] <= 0)) values.push(ys[place]);
      }
    }
    const usual = isAll || isLog || line.low ? null : usualRange(values);
    for (const value of usual || values) [low, high] = [Math.min(low, value), Math.max(high, value)];
  }
  return low <= high ? [low, high] : isLog ? [1, 10] : [0, 1];
}

// The same with margins, for an axis.
export function axisEnds(ends, isLog) {
  return isLog ? uPlot.rangeLog(...ends, 10, false) : uPlot.rangeNum(...ends, 0.06, true);
}

function noteOf(line, x, run, scale) {
  const place = line.x.indexOf(x);
  const odd = line.n.find(([at]) => at === x)?.[1];
  if (odd) return [odd, ""];
  const texts = [line.y, line.low, line.high].map((values) => values && valueText(values[place], scale, EXACT_DIGITS));
  if (!line.low) return [texts[0], ""];
  const count = line.count[place] < run.size ? `, ${grouped(line.count[place])} of ${grouped(run.size)} runs` : "";
  return [texts[0], `${texts[1]} to ${texts[2]}${count}`];
}

// The phases of the steps of a rank, and the longest cut steps, in words.
export function phasesSpec(line, range, isAll) {
  const phases = Object.entries(line?.p || {});
  const xs = line?.x || [];
  const sums = xs.map(() => 0);
  const lines = phases.map(([name, values]) => {
    for (const [place, value] of values.entries()) sums[place] += value;
    const color = colorOfPhase(name);
    const note = (x) => {
      const place = xs.indexOf(x);
      return [secondsText(values[place]), `${((100 * values[place]) / (sums[place] || 1)).toFixed(1)} %`];
    };
    return { id: name, run: name, label: name, color, fill: color, width: 0, isStepped: true, xs, ys: [...sums], note };
  });
  // A step reaches back to the one before.
  const shown = xs.map((x, place) => ({ x, whole: sums[place] })).filter(({ x }, place) => x >= range[0] && (place === 0 || xs[place - 1] < range[1]));
  const usual = shown.map(({ whole }) => whole).sort((one, other) => one - other);
  const most = isAll ? Infinity : STEP_BEYOND * usual[Math.floor(USUAL_SHARE * (usual.length - 1))];
  const top = usual.findLast((whole) => whole <= most) || 1;
  const beyond = shown.filter(({ whole }) => whole > 1.06 * top);
  const longest = beyond.length && secondsText(usual.at(-1));
  const text = !beyond.length ? "" : beyond.length === 1 ? `1 step is cut off: ${longest}` : `${beyond.length} steps are cut off: up to ${longest}`;
  // The highest first: each covers the ones below.
  return { lines: lines.reverse(), odd: [], cut: beyond.map(({ x }) => ({ x, isAbove: true, color: MARK })), isLog: false, scale: SECONDS, ends: [0, 1.06 * top], text };
}

export function latestPhases(phases) {
  return Object.entries(phases)
    .map(([name, values]) => [name, values.at(-1)])
    .filter(([, value]) => value > 0)
    .map(([name, value]) => `${name} ${secondsText(value)}`)
    .join(", ");
}

export function colorOfPhase(name) {
  return PHASE_COLORS[name]?.[isDark() ? 1 : 0] || "#888888";
}

// The range of the values without outliers: up to four consecutive points more than twice the range of the others beyond
// them, found by a running median. The first and the last value continue outwards, so that both ends stay visible.
function usualRange(values) {
  if (values.length < FEWEST_POINTS) return null;
  const at = (place) => values[Math.min(Math.max(place, 0), values.length - 1)];
  const window = [];
  for (let place = -NEIGHBOURS; place < NEIGHBOURS; place++) insert(window, at(place));
  let [low, high] = [Infinity, -Infinity];
  for (let place = 0; place < values.length; place++) {
    insert(window, at(place + NEIGHBOURS));
    const median = window[NEIGHBOURS];
    low = Math.min(low, median);
    high = Math.max(high, median);
    window.splice(window.indexOf(at(place - NEIGHBOURS)), 1);
  }
  const far = FAR_BEYOND * (high - low);
  // Beside a constant, nothing is an outlier.
  if (!(far > 0)) return null;
  let [least, greatest] = [low, high];
  for (const value of values) {
    if (value >= low - far && value < least) least = value;
    if (value <= high + far && value > greatest) greatest = value;
  }
  return [least, greatest];
}

function insert(ordered, value) {
  let place = ordered.length;
  while (place && ordered[place - 1] > value) place--;
  ordered.splice(place, 0, value);
}

// An exponential moving average by distance on the axis, independent of the number of points. A value weighs 1/e at a
// distance of up to a quarter of the axis, or of some points of a short line. Outliers are left out.
function smoothed(xs, ys, amount, low, high) {
  const span = xs.at(-1) - xs[0] || 1;
  const reach = span * Math.max(WIDEST_SMOOTHING * amount * amount, (2 * amount) / Math.max(xs.length - 1, 1));
  let [mean, weights, before] = [0, 0, xs[0]];
  return ys.map((y, place) => {
    if (y === null) return null;
    if ((y < low || y > high) && weights) return mean;
    weights = weights * Math.exp((before - xs[place]) / reach) + 1;
    before = xs[place];
    // By the difference: the average of a constant is exactly that constant.
    mean += (y - mean) / weights;
    return mean;
  });
}
