// What of a line is drawn, and where: the ends and ticks of axes, and smoothing.
import { decimalsOf, grouped, unitOf, valueText } from "page_text";

const NEIGHBOURS = 4;
const FEWEST_POINTS = 20;
const FAR_BEYOND = 2;
const TICKS = 4;
const LOG_DIGITS = 3;
const WIDEST_SMOOTHING = 0.25;

// The ends that a chart needs for the values that are not outliers: single points, or up to four in a row, that lie
// more than twice as far beyond the others as those are apart. What is an outlier is found by a running median, for
// which the first and the last value go on outwards: where a line begins and where it is now can always be seen.
export function usualRange(values) {
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
  // Beside a constant, anything else is worth seeing.
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

// An exponential moving average by distance on the axis, so that it does not depend on how many points are drawn. The
// distance after which a value weighs 1/e is up to a quarter of the axis, and for lines of few points some of them.
// What is beyond those ends has no part in it.
export function smoothed(xs, ys, amount, low, high) {
  const span = xs.at(-1) - xs[0] || 1;
  const reach = span * Math.max(WIDEST_SMOOTHING * amount * amount, (2 * amount) / Math.max(xs.length - 1, 1));
  let [mean, weights, before] = [0, 0, xs[0]];
  return ys.map((y, place) => {
    if (y === null) return null;
    if ((y < low || y > high) && weights) return mean;
    weights = weights * Math.exp((before - xs[place]) / reach) + 1;
    before = xs[place];
    // By the difference: the average of what is constant is the very same number.
    mean += (y - mean) / weights;
    return mean;
  });
}

// The vertical axis: its ends and ticks at round places, and the text of a tick.
export function verticalAxis(low, high, isLog, scale) {
  if (isLog) return logAxis(low, high, scale);
  if (low === high) [low, high] = low ? [low - Math.abs(low) / 10, low + Math.abs(low) / 10] : [-1, 1];
  const [factor, suffix] = unitOf(Math.max(Math.abs(low), Math.abs(high)), scale);
  const step = roundStep((high - low) / factor / TICKS);
  const [first, last] = [Math.floor(low / factor / step + 1e-9), Math.ceil(high / factor / step - 1e-9)];
  const ticks = [];
  for (let place = first; place <= last; place++) ticks.push(place * step * factor);
  const decimals = decimalsOf(step);
  // A tick is not exact: 12 * 0.0002 is more than 0.0024, which is not beyond it.
  return { min: Math.min(ticks[0], low), max: Math.max(ticks[ticks.length - 1], high), ticks, text: (value) => grouped(zero(value / factor, step), decimals) + suffix };
}

// The ends of a log axis, a little beyond the values, and round places in between.
function logAxis(low, high, scale) {
  const [from, to] = [Math.log10(low), Math.log10(high)];
  const room = to > from ? Math.max((to - from) / 20, 1e-9) : 0.04;
  const min = Math.max(Math.pow(10, from - room), Number.MIN_VALUE);
  const max = Math.min(Math.pow(10, to + room), Number.MAX_VALUE);
  const decades = to - from;
  let ticks = [];
  if (decades < 0.7) {
    const linear = verticalAxis(min, max, false, scale);
    return { min, max, ticks: linear.ticks.filter((one) => one >= min && one <= max), text: linear.text };
  }
  const stride = Math.ceil(decades / 6);
  for (let power = Math.floor(from - room); power <= to + room; power++) {
    if (power % stride) continue;
    for (const one of decades < 2.5 ? [1, 2, 5] : [1]) ticks.push(one * Math.pow(10, power));
  }
  ticks = ticks.filter((one) => one >= min && one <= max);
  return { min, max, ticks, text: (value) => valueText(value, scale, LOG_DIGITS) };
}

function roundStep(rough, steps = [1, 2, 5, 10]) {
  const power = Math.pow(10, Math.floor(Math.log10(rough)));
  return power * steps.find((one) => one * power >= rough * (1 - 1e-9));
}

// A tick at zero is not always quite there.
function zero(value, step) {
  return Math.abs(value) < step / 1e6 ? 0 : value;
}
