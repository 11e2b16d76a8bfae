// The values that the vertical axis of a chart is made for, and smoothing.

const NEIGHBOURS = 4;
const FEWEST_POINTS = 20;
const FAR_BEYOND = 2;
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
