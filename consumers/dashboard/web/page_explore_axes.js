// Columns of values as axes and colours: what of them is drawn, where, and in words.
import { verticalAxis } from "page_scales";
import { valueText } from "page_text";
import { inkOf } from "page_theme";

const DIGITS = 5;
const DECADES = { hyperparameter: 8, metric: 100 }; // so many times apart are values that a log axis is usual for
const LARGEST_COUNT = 100;
const STEPS = 16;
const MOST_SWATCHES = 8;
const MOST_PLACES = 7; // values that all have a tick
const EARLY = 0.35; // values of which the middle one stands so near to the least are written in decades
const ROOM = 0.04;
const SPREAD = 0.5; // of the room of a text: runs with the same text are not on one line
const GOLDEN = 0.618034;
const RAMP = {
  light: ["#35318f", "#7b2fa0", "#c2407a", "#e0703a", "#c99700"],
  dark: ["#7f86ff", "#b07be8", "#ea76a8", "#ff9f66", "#ffd866"],
};

export function isNumber(column) {
  return column.kind === "number";
}

// The least and the greatest value; null where there is none.
export function endsOf(values) {
  let [low, high] = [Infinity, -Infinity];
  for (const value of values) {
    if (value === null) continue;
    if (value < low) low = value;
    if (value > high) high = value;
  }
  return low <= high ? [low, high] : null;
}

export function canBeLog(column) {
  const ends = isNumber(column) && endsOf(column.values);
  return !!ends && ends[0] > 0;
}

function distinctOf(column) {
  return [...new Set(column.values)].filter((value) => value !== null).sort((one, other) => one - other);
}

// Whether a log axis is usual for a column: its values are positive, decades apart, and crowded at the lower end. Small
// counts are not.
export function isUsuallyLog(column) {
  if (!canBeLog(column)) return false;
  const [low, high] = endsOf(column.values);
  if (high <= LARGEST_COUNT && column.values.every((value) => value === null || Number.isInteger(value))) return false;
  if (high / low < (column.metric ? DECADES.metric : DECADES.hyperparameter) * (1 - 1e-9)) return false;
  const distinct = distinctOf(column);
  return (distinct[Math.floor((distinct.length - 1) / 2)] - low) / (high - low) < EARLY;
}

// An axis of a column: its ends, ticks and their texts, and where a run stands on it.
export function axisOf(column, isLog) {
  if (column.kind === "text") {
    const count = column.texts.length;
    const isCrowded = column.values.length > count;
    return {
      type: "value",
      min: -0.5,
      max: count - 0.5,
      ticks: column.texts.map((_, place) => place),
      text: (place) => column.texts[Math.round(place)] ?? "",
      at: (run) => {
        const place = column.values[run];
        return place === null || !isCrowded ? place : place + SPREAD * (((run * GOLDEN) % 1) - 0.5);
      },
    };
  }
  const ends = endsOf(column.values) || [0, 1];
  if (column.kind === "time") {
    const room = Math.max((ends[1] - ends[0]) / 30, 1);
    return { type: "time", min: 1000 * (ends[0] - room), max: 1000 * (ends[1] + room), at: (run) => column.values[run] && 1000 * column.values[run] };
  }
  const distinct = column.metric ? [] : distinctOf(column);
  const scale = distinct.length > 1 && distinct.length <= MOST_PLACES ? placesAxis(distinct, isLog, column) : verticalAxis(...ends, isLog, column.scale);
  return { type: isLog ? "log" : "value", ...scale, at: (run) => column.values[run] };
}

// The axis of a few values: a tick at each.
function placesAxis(values, isLog, column) {
  const [there, back] = isLog ? [Math.log, Math.exp] : [(value) => value, (value) => value];
  const [low, high] = [there(values[0]), there(values[values.length - 1])];
  const room = ROOM * (high - low);
  return { min: back(low - room), max: back(high + room), ticks: values, text: (value) => textOf(column, value) };
}

export function valueIn(column, run) {
  return textOf(column, column.values[run]);
}

export function textOf(column, value) {
  if (value === null || value === undefined) return "–";
  if (column.kind === "text") return column.texts[value];
  if (column.kind === "time") return new Date(1000 * value).toLocaleString();
  return valueText(value, column.scale, DIGITS);
}

// The run with the best value of a metric among some; null where none of its values are better.
export function bestOf(column, runs) {
  if (!column?.better || !runs.length) return null;
  const sign = column.better === "max" ? 1 : -1;
  return runs.reduce((best, run) => (sign * (column.values[run] - column.values[best]) > 0 ? run : best), runs[0]);
}

// How runs are coloured by a column: colours, of each run the number of one, and the legend.
export function colorsOf(column, isLog, isDark) {
  const none = inkOf("--run-7");
  if (!column) return { colors: [inkOf("--run-0")], of: () => 0, legend: null };
  const swatches = (texts, colors, of) => ({
    colors: [...colors, none],
    of: (run) => (column.values[run] === null ? colors.length : of(run)),
    legend: { swatches: texts.map((text, place) => ({ text, color: colors[place] })) },
  });
  if (column.kind === "text") {
    const colors = column.texts.map((_, place) => (place < MOST_SWATCHES - 1 ? inkOf(`--run-${place}`) : none));
    const found = swatches(column.texts, colors, (run) => column.values[run]);
    const listed = found.legend.swatches;
    if (listed.length > MOST_SWATCHES) listed.splice(MOST_SWATCHES - 1, Infinity, { text: "others", color: none });
    return found;
  }
  const distinct = distinctOf(column);
  const ramp = RAMP[isDark ? "dark" : "light"];
  const shade = (part) => mixed(ramp, part);
  if (distinct.length < MOST_SWATCHES && column.kind !== "time") {
    const colors = distinct.map((_, place) => shade(place / Math.max(distinct.length - 1, 1)));
    const places = new Map(distinct.map((value, place) => [value, place]));
    return swatches(distinct.map((value) => textOf(column, value)), colors, (run) => places.get(column.values[run]));
  }
  const [low, high] = endsOf(column.values) || [0, 1];
  const scaled = isLog ? Math.log : (value) => value;
  const span = scaled(high) - scaled(low) || 1;
  const colors = Array.from({ length: STEPS }, (_, step) => shade(step / (STEPS - 1)));
  return {
    colors: [...colors, none],
    of: (run) => {
      const value = column.values[run];
      return value === null ? STEPS : Math.min(Math.floor(((scaled(value) - scaled(low)) / span) * STEPS), STEPS - 1);
    },
    legend: { low: textOf(column, low), high: textOf(column, high), gradient: `linear-gradient(90deg, ${ramp.join(", ")})` },
  };
}

function mixed(ramp, part) {
  const place = part * (ramp.length - 1);
  const first = Math.min(Math.floor(place), ramp.length - 2);
  const channel = (color, at) => parseInt(color.slice(1 + 2 * at, 3 + 2 * at), 16);
  const parts = [0, 1, 2].map((at) => {
    const [from, to] = [channel(ramp[first], at), channel(ramp[first + 1], at)];
    return Math.round(from + (to - from) * (place - first));
  });
  return `rgb(${parts.join(", ")})`;
}
