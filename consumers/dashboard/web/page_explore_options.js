// What ECharts is given for a scatter plot and for parallel coordinates of runs.
import { axisOf, colorsOf } from "page_explore_axes";
import { inkOf } from "page_theme";

const LARGE = 2000; // from so many points on they are drawn as one
const LETTER_PIXELS = 6.5;
const SIZES = [[100, 12], [1000, 9], [4000, 6], [Infinity, 5]];
const STRENGTHS = [[60, 0.8], [300, 0.5], [2000, 0.3], [Infinity, 0.12]];
const FAINT = 0.12;
export const SIDE_PIXELS = 64;
export const AXIS_PIXELS = 104;

function byCount(table, count) {
  return table.find(([most]) => count <= most)[1];
}

// The option of either has axes by `columns`, a number for each run that is drawn, and the selected ones once more, on
// top. `isLog` says of a column whether its axis is one.
export function scatterOption({ x, y, color, runs, selected, best, isLog, isDark, labelOf, tooltip }) {
  const axes = { x: axisOf(x, isLog(x)), y: axisOf(y, isLog(y)) };
  const { colors, of, legend } = colorsOf(color, color && isLog(color), isDark);
  const point = (run) => [axes.x.at(run), axes.y.at(run), run];
  const bins = colors.map(() => []);
  for (const run of runs) bins[of(run)].push(point(run));
  const isLarge = runs.length > LARGE;
  const size = byCount(SIZES, runs.length);
  const common = { type: "scatter", clip: false, emphasis: { disabled: isLarge }, cursor: "pointer" };
  const series = bins.map((data, place) => ({
    ...common, id: `color ${place}`, data, large: isLarge, largeThreshold: 0, symbolSize: size, z: 2,
    itemStyle: { color: colors[place], opacity: selected.length ? 0.3 : isLarge ? 0.6 : 0.85 },
  })).filter((one) => one.data.length); // ECharts fails with a large series that is empty.
  series.push({
    ...common, id: "selected", z: 4, symbolSize: size + 3,
    data: selected.map((run) => ({ value: point(run), itemStyle: { color: colors[of(run)] } })),
    itemStyle: { borderColor: inkOf("--ink"), borderWidth: 1.5, opacity: 1 },
  });
  series.push({
    ...common, id: "best", z: 5, silent: true, symbol: "circle", symbolSize: size + 10,
    data: best === null ? [] : [point(best)],
    itemStyle: { color: "transparent", borderColor: inkOf("--good"), borderWidth: 2 },
    label: { show: true, position: best === null ? "top" : labelSide(axes.x, axes.x.at(best)), distance: 5, formatter: () => labelOf(best), color: inkOf("--good"), fontWeight: 600, fontSize: 12 },
  });
  const option = {
    ...baseOption(tooltip),
    grid: { left: 40 + labelRoom(axes.y), right: 28, top: 32, bottom: 48 },
    xAxis: { ...axisOption(axes.x), name: x.title, nameLocation: "middle", nameGap: 30, nameTextStyle: { color: inkOf("--ink-soft"), fontWeight: 600 } },
    yAxis: { ...axisOption(axes.y), name: y.title, nameLocation: "middle", nameGap: labelRoom(axes.y) + 14, nameTextStyle: { color: inkOf("--ink-soft"), fontWeight: 600 } },
    series,
  };
  return { option, legend };
}

// Where the label of a point has room: near the sides beside it, and otherwise above it.
function labelSide(axis, place) {
  const scaled = axis.type === "log" ? Math.log : (value) => value;
  const part = (scaled(place) - scaled(axis.min)) / (scaled(axis.max) - scaled(axis.min) || 1);
  return part < 0.15 ? "right" : part > 0.85 ? "left" : "top";
}

export function parallelOption({ columns, runs, selected, isLog, isDark, tooltip }) {
  const metric = columns[columns.length - 1];
  const axes = columns.map((column) => axisOf(column, isLog(column)));
  const { colors, of, legend } = colorsOf(metric, isLog(metric), isDark);
  const line = (run) => ({ value: axes.map((axis) => axis.at(run) ?? "-"), lineStyle: { color: colors[of(run)] } });
  const strength = selected.length ? Math.min(FAINT, byCount(STRENGTHS, runs.length)) : byCount(STRENGTHS, runs.length);
  // To find out which of many lines the pointer is on takes longer than a frame.
  const common = { type: "parallel", emphasis: { disabled: true }, silent: runs.length > LARGE };
  const option = {
    ...baseOption(tooltip),
    parallel: { left: SIDE_PIXELS, right: SIDE_PIXELS, top: 40, bottom: 22 },
    parallelAxis: columns.map((column, place) => ({
      ...axisOption(axes[place]), id: column.name, dim: place, realtime: false, z: 8,
      name: column.title, nameTextStyle: { color: inkOf("--ink"), fontWeight: 600 }, nameTruncate: { maxWidth: AXIS_PIXELS - 6, ellipsis: "…" },
      axisLine: { lineStyle: { color: inkOf("--ink-soft") } }, splitLine: { show: false },
      axisLabel: {
        ...axisOption(axes[place]).axisLabel, textBorderColor: inkOf("--card"), textBorderWidth: 3,
        width: AXIS_PIXELS - 24, overflow: "truncate", color: inkOf("--ink"),
      },
      areaSelectStyle: { width: 18, borderWidth: 1, borderColor: inkOf("--accent"), color: inkOf("--accent"), opacity: 0.25 },
    })),
    series: [
      { ...common, id: "all", data: runs.map(line), z: 2, inactiveOpacity: strength, activeOpacity: strength, lineStyle: { width: 1.5, opacity: strength } },
      { ...common, id: "selected", data: selected.map(line), z: 3, inactiveOpacity: 1, activeOpacity: 1, lineStyle: { width: 2, opacity: 1 } },
    ],
  };
  return { option, legend };
}

// ECharts draws ranges anew in a colour of its own that hides the labels below.
export function paintRanges(chart) {
  for (const one of chart.getZr().storage.getDisplayList(true)) {
    if (one.type === "rect" && one.name === "main") one.setStyle({ fill: inkOf("--accent"), stroke: inkOf("--accent"), lineWidth: 1, opacity: 0.3 });
  }
}

function baseOption(tooltip) {
  const line = inkOf("--line");
  return {
    animation: false,
    backgroundColor: "transparent",
    textStyle: { fontFamily: getComputedStyle(document.body).fontFamily },
    tooltip: {
      trigger: "item", confine: true, transitionDuration: 0, formatter: tooltip,
      backgroundColor: inkOf("--card"), borderColor: line, textStyle: { color: inkOf("--ink"), fontSize: 12 }, padding: [6, 9],
    },
  };
}

function axisOption(axis) {
  const [ink, line] = [inkOf("--ink-soft"), inkOf("--line")];
  const places = axis.ticks ? { customValues: axis.ticks } : {};
  return {
    type: axis.type, min: axis.min, max: axis.max,
    axisLabel: { color: ink, fontSize: 11, hideOverlap: true, ...places, ...(axis.text ? { formatter: axis.text } : {}) },
    axisTick: { lineStyle: { color: line }, ...places },
    axisLine: { onZero: false, lineStyle: { color: line } },
    splitLine: { lineStyle: { color: line, opacity: 0.6 } }, minorSplitLine: { show: false },
  };
}

function labelRoom(axis) {
  const texts = axis.ticks ? axis.ticks.map(axis.text) : ["00:00:00"];
  return Math.min(Math.max(...texts.map((text) => LETTER_PIXELS * text.length), 24), 140);
}
