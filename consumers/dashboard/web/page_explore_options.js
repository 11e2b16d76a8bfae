// What ECharts draws for a scatter plot and for parallel coordinates of runs. A column has `values`, of each run a number
// or null; of a text, the place in its `texts`.
import { valueText } from "page_text";
import { inkOf } from "page_theme";

const DIGITS = 5;
const DECADES = { hyperparameter: 8, metric: 100 }; // values this many times apart are on a log axis
const LARGEST_COUNT = 100;
const EARLY = 0.35; // if the middle one stands this near to the least
const SIZES = [[100, 12], [1000, 9], [4000, 6], [Infinity, 5]];
const STRENGTHS = [[60, 0.8], [300, 0.5], [2000, 0.3], [Infinity, 0.12]];
const MOST_SWATCHES = 8;
const LARGE = 2000;
const RAMP = {
  light: ["#35318f", "#7b2fa0", "#c2407a", "#e0703a", "#c99700"],
  dark: ["#7f86ff", "#b07be8", "#ea76a8", "#ff9f66", "#ffd866"],
};
export const SIDE_PIXELS = 64;
export const AXIS_PIXELS = 104;

// Whether a column has a log axis: its values are positive, decades apart, and crowded at the lower end. Small counts have
// none.
export function isLog(column) {
  if (column.kind !== "number") return false;
  const values = [...new Set(column.values)].filter((value) => value !== null).sort((one, other) => one - other);
  const [low, high] = [values[0], values.at(-1)];
  if (!(low > 0) || (high <= LARGEST_COUNT && values.every(Number.isInteger))) return false;
  if (high / low < (column.metric ? DECADES.metric : DECADES.hyperparameter) * (1 - 1e-9)) return false;
  return (values[Math.floor((values.length - 1) / 2)] - low) / (high - low) < EARLY;
}

export function textOf(column, value) {
  if (value === null || value === undefined) return "–";
  if (column.kind === "text") return column.texts[value];
  return column.kind === "time" ? new Date(value).toLocaleString() : valueText(value, column.scale, DIGITS);
}

// Of points the third number is the run, and the fourth its colour.
export function scatterOption({ x, y, color, runs, selected, isDark, tooltip }) {
  const shade = shadesOf(color);
  const point = (run) => [x.values[run], y.values[run], run, color ? shade(color.values[run]) : 0];
  const size = byCount(SIZES, runs.length);
  const common = { type: "scatter", clip: false, encode: { tooltip: [] } };
  return {
    ...baseOption(tooltip),
    grid: { left: 48, right: 28, top: 40, bottom: 44, containLabel: true },
    xAxis: { ...axisOption(x), name: x.title, nameLocation: "middle", nameGap: 30 },
    yAxis: { ...axisOption(y), name: y.title, nameLocation: "middle", nameGap: 62 },
    visualMap: mapOf(color, 3, isDark, [0, 1]),
    series: [
      { ...common, id: "all", data: runs.map(point), symbolSize: size, itemStyle: { opacity: selected.length ? 0.3 : 0.8, color: inkOf("--run-0") } },
      { ...common, id: "selected", data: selected.map(point), symbolSize: size + 3, z: 4, itemStyle: { borderColor: inkOf("--ink"), borderWidth: 1.5, color: inkOf("--run-0") } },
    ],
  };
}

export function parallelOption({ columns, runs, selected, isDark, tooltip }) {
  const metric = columns.at(-1);
  const shade = shadesOf(metric);
  const line = (run) => [...columns.map((column) => column.values[run] ?? "-"), shade(metric.values[run])];
  const strength = selected.length ? 0.12 : byCount(STRENGTHS, runs.length);
  // To find out which of many lines the pointer is on takes longer than a frame.
  const common = { type: "parallel", silent: runs.length > LARGE, smooth: false };
  return {
    ...baseOption(tooltip),
    parallel: { left: SIDE_PIXELS, right: SIDE_PIXELS, top: 72, bottom: 22 },
    parallelAxis: columns.map((column, place) => ({
      ...axisOption(column), id: column.name, dim: place, realtime: false, name: column.title, nameTruncate: { maxWidth: AXIS_PIXELS - 6 },
      splitLine: { show: false }, areaSelectStyle: { borderColor: inkOf("--accent"), color: inkOf("--accent"), opacity: 0.25 },
    })),
    visualMap: mapOf(metric, columns.length, isDark, [0, 1]),
    series: [
      { ...common, id: "all", data: runs.map(line), inactiveOpacity: 0.06, activeOpacity: strength, lineStyle: { width: 1.5, opacity: strength } },
      { ...common, id: "selected", data: selected.map(line), z: 3, inactiveOpacity: 1, activeOpacity: 1, lineStyle: { width: 2, opacity: 1 } },
    ],
  };
}

// Where a value of a column is among its colours.
function shadesOf(column) {
  return column && isLog(column) ? (value) => value && Math.log10(value) : (value) => value;
}

function mapOf(column, dimension, isDark, series) {
  if (!column) return [];
  const common = { dimension, seriesIndex: series, orient: "horizontal", left: 8, top: 4, textStyle: { color: inkOf("--ink-soft") }, outOfRange: { color: inkOf("--run-7") } };
  if (column.kind === "text") {
    const shown = column.texts.slice(0, MOST_SWATCHES - 1);
    const pieces = shown.map((label, value) => ({ value, label, color: inkOf(`--run-${value}`) }));
    return [{ ...common, type: "piecewise", pieces, selectedMode: false, itemSymbol: "circle" }];
  }
  const shades = column.values.filter((value) => value !== null).map(shadesOf(column));
  const [min, max] = shades.reduce(([low, high], one) => [Math.min(low, one), Math.max(high, one)], [Infinity, -Infinity]);
  const text = (shade) => textOf(column, isLog(column) ? 10 ** shade : shade);
  return [{ ...common, min, max, text: [text(max), `${column.title} ${text(min)}`], itemWidth: 9, itemHeight: 110, inRange: { color: RAMP[isDark ? "dark" : "light"] } }];
}

function byCount(table, count) {
  return table.find(([most]) => count <= most)[1];
}

function baseOption(tooltip) {
  return {
    animation: false,
    textStyle: { fontFamily: getComputedStyle(document.body).fontFamily },
    tooltip: {
      trigger: "item", confine: true, transitionDuration: 0, formatter: tooltip, padding: [6, 9],
      backgroundColor: inkOf("--card"), borderColor: inkOf("--line"), textStyle: { color: inkOf("--ink"), fontSize: 12 },
    },
  };
}

function axisOption(column) {
  const [soft, line] = [inkOf("--ink-soft"), inkOf("--line")];
  const kind = column.kind === "text" ? { type: "category", data: column.texts } : column.kind === "time" ? { type: "time" } : { type: isLog(column) ? "log" : "value", scale: true };
  const format = column.kind === "number" ? { formatter: (value) => textOf(column, value) } : {};
  return {
    ...kind, axisLabel: { color: soft, fontSize: 11, hideOverlap: true, width: AXIS_PIXELS - 24, overflow: "truncate", ...format },
    nameTextStyle: { color: inkOf("--ink"), fontWeight: 600 },
    axisTick: { lineStyle: { color: line } }, axisLine: { onZero: false, lineStyle: { color: line } }, splitLine: { lineStyle: { color: line, opacity: 0.6 } },
  };
}
