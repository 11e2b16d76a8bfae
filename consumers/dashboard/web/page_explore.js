// The found runs as a scatter plot or parallel coordinates, from columns of values.
import { toggled } from "page_settings";
import { valueText } from "page_text";
import { inkOf, isDark, redrawn } from "page_theme";

const MOST_SELECTED = 1000; // as _MOST_SELECTED in home.py
const MOST_OPTIONS = 200;
const OF_METRIC = [".best", "", ".min", ".max"];
const NO_COLOR = "-";
const DIGITS = 5;
const DECADES = { hyperparameter: 8, metric: 100 }; // least ratio of values for a log axis
const LARGEST_COUNT = 100;
const EARLY = 0.35; // largest place of the median for a log axis
const SIZES = [[100, 12], [1000, 9], [4000, 6], [Infinity, 5]];
const STRENGTHS = [[60, 0.8], [300, 0.5], [2000, 0.3], [Infinity, 0.12]];
const MOST_SWATCHES = 8;
const LARGE = 2000;
const RAMP = {
  light: ["#35318f", "#7b2fa0", "#c2407a", "#e0703a", "#c99700"],
  dark: ["#7f86ff", "#b07be8", "#ea76a8", "#ff9f66", "#ffd866"],
};
const SIDE_PIXELS = 64;
const AXIS_PIXELS = 104;

/** @type {Component} */
export const Explore = {
  template: `
    <section class="explore" :aria-label="isScatter ? 'Scatter plot' : 'Parallel coordinates'">
      <p v-if="!settings.runs.length" class="explore-hint">{{ isScatter ? "Click a point to select its run, double click to open it." : "Draw over an axis to select the runs in that range." }}</p>
      <div class="explore-bar" role="toolbar" aria-label="Axes">
        <q-select v-for="one in selects" :key="one.role" :model-value="one.value" :options="options" class="explore-select" dense outlined options-dense
                  use-input :multiple="one.isList" :fill-input="!one.isList" hide-selected input-debounce="0" behavior="menu" :label="one.label" :aria-label="one.label"
                  :clearable="one.clearable && !!one.value" popup-content-class="home-menu explore-options" @filter="findOptions" @clear="settings[one.role] = one.none"
                  @update:model-value="(chosen) => chosen?.length && (settings[one.role] = chosen)">
          <template #no-option><div class="soft explore-none">no such column</div></template>
        </q-select>
        <q-btn v-if="within !== null" flat dense no-caps class="link" label="Clear ranges" @click="clearRanges()"></q-btn>
      </div>
      <p v-if="explored.problem" class="home-error" role="alert">{{ explored.problem }}</p>
      <figure class="explore-card">
        <div class="explore-scroll">
          <div ref="plot" class="explore-plot" role="application" tabindex="0" :aria-label="plotText" aria-describedby="explore-summary"
               :style="isScatter ? {} : {minWidth: parallelWidth + 'px'}" @pointerdown="isHeld = true" @keydown="onKey($event)" @blur="leaveKeys()"></div>
        </div>
        <p id="explore-summary" class="explore-summary" aria-live="polite">{{ atText || summary }}</p>
        <p v-if="emptyText" class="explore-empty">{{ emptyText }}</p>
      </figure>
    </section>`,
  mixins: [redrawn],
  props: { explored: Object, settings: Object, names: Object, linkTo: Function, emptyText: String },
  // `within`: number of runs within the ranges on axes; null without ranges.
  // `at`: the run chosen by keys.
  data: () => ({ options: [], within: null, at: null }),
  computed: {
    isScatter() {
      return this.settings.view === "scatter";
    },
    columns() {
      return new Map(this.explored.columns?.map((column) => [column.name, column]));
    },
    isReady() {
      return this.explored.view === this.settings.view && !!this.explored.y && (!this.isScatter || !!this.explored.x);
    },
    selects() {
      const { x, y, color, axes } = this.explored;
      if (!this.isScatter) return [{ role: "y", label: "metric", value: y }, { role: "axes", label: "axes", value: axes, isList: true }];
      return [
        { role: "x", label: "x axis", value: x },
        { role: "y", label: "y axis", value: y },
        { role: "color", label: "colour", value: color, clearable: true, none: NO_COLOR },
      ];
    },
    axisColumns() {
      return this.isReady && !this.isScatter ? [...this.explored.axes, this.explored.y].map((name) => this.column(name)) : [];
    },
    parallelWidth() {
      return 2 * SIDE_PIXELS + AXIS_PIXELS * Math.max(this.axisColumns.length - 1, 1);
    },
    metricTitle() {
      return this.column(this.explored.y)?.title || "";
    },
    // The numbers of the runs with all drawn values.
    drawn() {
      if (!this.isReady) return [];
      const needed = this.isScatter ? [this.column(this.explored.x), this.column(this.explored.y)] : [this.column(this.explored.y)];
      return this.explored.runs.map((_, run) => run).filter((run) => needed.every((column) => column.values[run] !== null));
    },
    chosen() {
      const names = new Set(this.settings.runs);
      return this.drawn.filter((run) => run === this.at || names.has(this.explored.runs[run]));
    },
    atText() {
      return this.drawn.includes(this.at) ? [this.labelOf(this.at), ...this.shownColumns.map((column) => `${column.title} ${textOf(column, column.values[this.at])}`)].join(", ") : "";
    },
    shownColumns() {
      return this.isScatter ? [...new Set([this.explored.x, this.explored.y, this.explored.color].filter(Boolean))].map((name) => this.column(name)) : this.axisColumns;
    },
    plotText() {
      if (!this.isReady) return "Nothing is drawn yet";
      if (this.isScatter) return `Scatter plot of ${this.column(this.explored.y).title} over ${this.column(this.explored.x).title}`;
      return `Parallel coordinates of ${this.axisColumns.map((column) => column.title).join(", ")}`;
    },
    summary() {
      if (!this.isReady) return "";
      const many = (count) => count.toLocaleString("en");
      const drawn = this.drawn.length;
      const { found } = this.explored;
      const parts = [`${many(drawn)} ${drawn === 1 ? "run" : "runs"}`];
      if (this.explored.runs.length < found) parts[0] += ` of the first ${many(this.explored.runs.length)} (${many(found)} are found)`;
      const left = this.explored.runs.length - drawn;
      if (left) parts.push(`${many(left)} more ${left === 1 ? "has" : "have"} no ${this.isScatter ? "value on both axes" : this.metricTitle}`);
      if (this.within !== null) parts.push(`${many(this.within)} within the ranges` + (this.within > MOST_SELECTED ? `, the first ${many(MOST_SELECTED)} are selected` : ""));
      return parts.join("; ") + ".";
    },
  },
  watch: {
    explored() {
      this.redraw();
    },
    settings: { deep: true, handler() { this.redraw(); } },
    "settings.view"() {
      this.wasDrawn = false;
      this.within = null;
    },
  },
  async mounted() {
    // New data waits while the user draws over an axis.
    this.isHeld = false;
    this.onRelease = () => {
      this.isHeld = false;
      if (this.isLate) this.redraw();
    };
    for (const name of ["pointerup", "pointercancel"]) window.addEventListener(name, this.onRelease);
    this.sizes = new ResizeObserver(() => {
      this.chart?.resize();
      this.redraw();
    });
    this.sizes.observe(this.$refs.plot);
    // The table does not need it.
    const { echarts } = await import("nicegui-echart");
    if (!this.$refs.plot) return;
    this.encode = echarts.format.encodeHTML;
    this.chart = Object.freeze({ ec: echarts.init(this.$refs.plot, null, { renderer: "canvas" }) }).ec;
    this.chart.on("click", (event) => this.onClick(event));
    this.chart.on("dblclick", (event) => this.open(this.runAt(event)));
    this.chart.on("axisareaselected", () => this.onBrush());
    this.redraw();
  },
  beforeUnmount() {
    this.sizes.disconnect();
    for (const name of ["pointerup", "pointercancel"]) window.removeEventListener(name, this.onRelease);
    this.chart?.dispose();
  },
  methods: {
    onTheme() {
      this.redraw();
    },
    column(name) {
      return this.columns.get(name);
    },
    findOptions(text, update) {
      update(() => {
        const wanted = text.toLowerCase();
        const { hyperparameters, metrics, rated, every } = this.names;
        const all = [...hyperparameters, ...metrics.flatMap((name) => OF_METRIC.filter((end) => end !== ".best" || rated.includes(name)).map((end) => name + end)), ...every, "run"];
        this.options = all.filter((name) => name.toLowerCase().includes(wanted)).slice(0, MOST_OPTIONS);
      });
    },
    labelOf(run) {
      return this.explored.runs[run].replace(/[\p{Cc}\p{Cf}]/gu, "�");
    },
    clearRanges() {
      this.wasDrawn = false;
      this.within = null;
      this.settings.runs = [];
      this.redraw();
    },
    // A range was drawn over an axis, or removed.
    onBrush() {
      const [all] = this.chart.getModel().getSeries();
      const places = all.getRawIndicesByActiveState("active");
      const hasRanges = this.chart.getModel().queryComponents({ mainType: "parallelAxis" }).some((axis) => axis.activeIntervals.length);
      this.within = hasRanges ? places.length : null;
      this.settings.runs = places.slice(0, MOST_SELECTED).map((place) => this.explored.runs[this.drawn[place]]);
    },
    redraw() {
      if (this.isStale || !this.chart) return;
      this.isStale = true;
      requestAnimationFrame(() => {
        this.isStale = false;
        this.isLate = this.isHeld;
        if (!this.isHeld && !this.chart.isDisposed()) this.draw();
      });
    },
    draw() {
      if (!this.isReady) return;
      const common = { runs: this.drawn, selected: this.chosen, isDark: isDark(), tooltip: (event) => this.tooltip(this.runAt(event)) };
      const option = this.isScatter
        ? scatterOption({ ...common, x: this.column(this.explored.x), y: this.column(this.explored.y), color: this.column(this.explored.color) })
        : parallelOption({ ...common, columns: this.axisColumns });
      // Unchanged axes keep their ranges.
      this.chart.setOption(option, this.wasDrawn && !this.isScatter ? { replaceMerge: ["series", "parallelAxis"] } : { notMerge: true });
      this.wasDrawn = true;
    },
    // The run of a point or a line.
    runAt({ seriesId, dataIndex, value }) {
      if (this.isScatter) return value?.[2];
      return (seriesId === "selected" ? this.chosen : this.drawn)[dataIndex];
    },
    tooltip(run) {
      if (run === undefined) return "";
      const rows = this.shownColumns.map((column) => `<tr><td>${this.encode(column.title)}</td><td class="number">${this.encode(textOf(column, column.values[run]))}</td></tr>`);
      return `<div class="tip"><strong>${this.encode(this.labelOf(run))}</strong><table>${rows.join("")}</table></div>`;
    },
    onKey(event) {
      const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
      const count = this.drawn.length;
      if (step && count) this.at = this.drawn[(Math.max(this.drawn.indexOf(this.at), step < 0 ? 0 : -1) + step + count) % count];
      else if (event.key === "Enter" && this.at !== null) this.open(this.at);
      else if (event.key === " " && this.at !== null) this.select(this.at);
      else return;
      event.preventDefault();
      this.redraw();
    },
    leaveKeys() {
      this.at = null;
      this.redraw();
    },
    onClick(event) {
      const run = this.runAt(event);
      if (run !== undefined) this.select(run);
    },
    select(run) {
      this.settings.runs = toggled(this.settings.runs, this.explored.runs[run]);
    },
    open(run) {
      if (run !== undefined) location.href = this.linkTo([this.explored.runs[run]]);
    },
    // For tests: the pixels of a run on the scatter plot.
    placeOf(name) {
      if (!this.wasDrawn) return null;
      const run = this.explored.runs.indexOf(name);
      const point = this.chart.getOption().series?.flatMap((one) => one.data).find((one) => one[2] === run);
      return point ? this.chart.convertToPixel({ seriesIndex: 0 }, point.slice(0, 2)) : null;
    },
    // The pixels of a value on its parallel axis.
    placeOn(name, value) {
      const place = this.axisColumns.findIndex((column) => column.name === name);
      return this.wasDrawn && place >= 0 ? this.chart.getModel().getComponent("parallel").coordinateSystem.dataToPoint(value, `dim${place}`) : null;
    },
  },
};

// Options for ECharts. A column has `values`, a number or null for each run; of a text, the place in its `texts`.

// A log axis is for positive values, decades apart, crowded at the lower end, but not for small counts.
function isLog(column) {
  if (column.kind !== "number") return false;
  const values = [...new Set(column.values)].filter((value) => value !== null).sort((one, other) => one - other);
  const [low, high] = [values[0], values.at(-1)];
  if (!(low > 0) || (high <= LARGEST_COUNT && values.every(Number.isInteger))) return false;
  if (high / low < (column.metric ? DECADES.metric : DECADES.hyperparameter) * (1 - 1e-9)) return false;
  return (values[Math.floor((values.length - 1) / 2)] - low) / (high - low) < EARLY;
}

function textOf(column, value) {
  if (value === null || value === undefined) return "–";
  if (column.kind === "text") return column.texts[value];
  return column.kind === "time" ? new Date(value).toLocaleString() : valueText(value, column.scale, DIGITS);
}

// The third number of a point is the run, the fourth its colour.
function scatterOption({ x, y, color, runs, selected, isDark, tooltip }) {
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

function parallelOption({ columns, runs, selected, isDark, tooltip }) {
  const metric = columns.at(-1);
  const shade = shadesOf(metric);
  const line = (run) => [...columns.map((column) => column.values[run] ?? "-"), shade(metric.values[run])];
  const strength = selected.length ? 0.12 : byCount(STRENGTHS, runs.length);
  // Finding the line at the pointer takes longer than a frame.
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

// Converts a value to its place among the colours.
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
