// The charts of the dashboard, drawn by ECharts. The server sends lines that are thinned to what can be seen; what can
// be seen (which charts, how wide, which part of the axis) is told to the server by the event "look".
import { echarts } from "nicegui-echart";

const ROOM = { left: 56, right: 14, top: 12, bottom: 26 };
const RUN_COLORS = 8; // --run-0 and so on in page.css
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
const CUT = "cut off";
const USUAL_SHARE = 0.9;
const FAR_BEYOND = 4;
const SMOOTHING_SCALE = 1000;
const SETTLE_MS = 60;
const PAINTED_MS = 1000;
const EXACT_DIGITS = 6;

export default {
  template: `
    <div class="board">
      <p v-if="!groups.length" class="empty">{{ empty }}</p>
      <p v-else-if="!shownGroups.length" class="empty">no chart is called '{{ filter }}'</p>
      <section v-for="group in shownGroups" :key="group.charts[0].kind + group.title" class="group" :aria-label="group.title"
               :style="{'--charts': Math.min(group.charts.length, 3)}">
        <h2>
          <button type="button" class="group-title" :aria-expanded="String(!closed[group.title])"
                  @click="closed[group.title] = !closed[group.title]">
            <span class="arrow" aria-hidden="true">▾</span>{{ group.title }}
            <span class="count">{{ group.charts.length }}</span>
          </button>
        </h2>
        <div class="grid" v-if="!closed[group.title]">
          <figure v-for="chart in group.charts" :key="chart.id" class="chart" :class="{wide: wide[chart.id], many: runs.length > 1}"
                  :data-chart="chart.id">
            <figcaption>
              <span class="title" :title="chart.id">{{ chart.title }}</span>
              <span v-if="oddText(chart)" class="odd">{{ oddText(chart) }}</span>
              <span v-if="cut[chart.id]" class="cut">{{ cut[chart.id] }}</span>
              <span class="latest">
                <span v-for="one in latestOf(chart)" :key="one.run" class="value">
                  <span v-if="runs.length > 1" class="dot" :style="{background: one.color}" aria-hidden="true"></span>{{ one.text }}
                </span>
              </span>
              <button type="button" class="enlarge" :aria-pressed="String(!!wide[chart.id])"
                      :aria-label="(wide[chart.id] ? 'Make smaller: ' : 'Make larger: ') + chart.title"
                      @click="enlarge(chart)">{{ wide[chart.id] ? "−" : "+" }}</button>
            </figcaption>
            <div class="plot" role="img" tabindex="0" :aria-label="summary(chart)" :data-plot="chart.id"
                 aria-keyshortcuts="+ - ArrowLeft ArrowRight 0" @keydown="onKey($event)" v-plot="chart"></div>
          </figure>
        </div>
      </section>
    </div>`,
  props: { empty: String },
  directives: {
    plot: {
      mounted: (element, binding) => binding.instance.watchPlot(element, binding.value),
      unmounted: (element, binding) => binding.instance.dropPlot(element, binding.value),
    },
  },
  data: () => ({
    groups: [],
    runs: [],
    hidden: {},
    closed: {},
    wide: {},
    filter: "",
    latest: {},
    odd: {},
    spoken: {}, // the newest phases of a chart, in words
    cut: {}, // which steps of a chart go beyond its upper edge, in words
    look: { x: "batch", smoothing: 0, log: false },
  }),
  computed: {
    shownGroups() {
      const wanted = this.filter.toLowerCase();
      return this.groups
        .map((group) => ({ ...group, charts: group.charts.filter((one) => one.id.toLowerCase().includes(wanted)) }))
        .filter((group) => group.charts.length);
    },
  },
  created() {
    // Kept out of Vue's sight: it would follow every number.
    this.plots = new Map(); // chart -> {element, chart, kind, drawn}
    // Also of charts that cannot be seen: the server sends a line once, and then what is new.
    this.lines = new Map(); // chart -> Map(run -> {x, y})
    this.visible = new Map(); // chart -> width in pixels
    this.range = null; // the chosen part of the axis
    this.told = "";
  },
  mounted() {
    this.observer = new IntersectionObserver((entries) => this.onSeen(entries), { rootMargin: "150px" });
    this.sizes = new ResizeObserver((entries) => entries.forEach((entry) => this.onSize(entry.target)));
    this.dark = isDark();
    this.theme = new MutationObserver(() => this.onTheme());
    this.theme.observe(document.body, { attributeFilter: ["class"] });
    this.onVisibility = () => this.tell();
    document.addEventListener("visibilitychange", this.onVisibility);
  },
  beforeUnmount() {
    this.observer.disconnect();
    this.sizes.disconnect();
    this.theme.disconnect();
    document.removeEventListener("visibilitychange", this.onVisibility);
    this.plots.forEach((plot) => plot.chart?.dispose());
  },
  methods: {
    // What the server calls: everything that has changed. The answer, once it is drawn, is what lets it send the next:
    // how many seconds that took says how soon.
    async frame(update) {
      const began = performance.now();
      if (update.runs) this.runs = update.runs;
      if (update.groups) this.groups = update.groups;
      if (update.hidden) this.hidden = update.hidden;
      if (update.filter !== undefined) this.filter = update.filter;
      if (update.look) {
        if (update.look.x !== this.look.x) {
          this.lines.clear();
          this.range = null;
        }
        this.look = update.look;
      }
      if (update.whole) this.range = null;
      const touched = new Set();
      for (const line of update.lines || []) {
        this.takeLine(line);
        touched.add(line.c);
      }
      Object.assign(this.latest, update.latest || {});
      const all = update.runs || update.hidden || update.look || update.whole;
      if (all) this.drawAll(false);
      else {
        touched.forEach((id) => this.draw(id));
        // The others keep to the same axis.
        this.visible.forEach((_, id) => this.hasOldAxis(id) && this.draw(id));
      }
      if (all) this.tell();
      await painted();
      return [update.number, (performance.now() - began) / 1000];
    },
    hasOldAxis(id) {
      const plot = this.plots.get(id);
      return plot?.chart && plot.end !== this.extent(plot)[1];
    },
    takeLine(line) {
      if (!this.lines.has(line.c)) this.lines.set(line.c, new Map());
      const runs = this.lines.get(line.c);
      const old = runs.get(line.r);
      if (line.a && old) {
        const first = line.x[0];
        let keep = old.x.length;
        while (keep && old.x[keep - 1] >= first) keep--;
        line.x = old.x.slice(0, keep).concat(line.x);
        line.y = old.y.slice(0, keep).concat(line.y);
        line.n = old.n.filter((one) => one[0] < first).concat(line.n);
      }
      runs.set(line.r, { x: line.x, y: line.y, n: line.n || [], p: line.p });
      if (line.p) this.spoken[line.c] = latestPhases(line.p);
      this.odd[line.c] = [...runs.values()].reduce((sum, one) => sum + one.n.length, 0);
    },
    watchPlot(element, chart) {
      this.plots.set(chart.id, { element, kind: chart.kind, chart: null });
      this.observer.observe(element);
      this.sizes.observe(element);
    },
    dropPlot(element, chart) {
      this.observer.unobserve(element);
      this.sizes.unobserve(element);
      const plot = this.plots.get(chart.id);
      if (plot?.element === element) {
        plot.chart?.dispose();
        this.plots.delete(chart.id);
        this.visible.delete(chart.id);
        this.tell();
      }
    },
    onSeen(entries) {
      for (const entry of entries) {
        const id = entry.target.dataset.plot;
        if (entry.isIntersecting) this.visible.set(id, Math.round(entry.target.clientWidth));
        else this.visible.delete(id);
        if (entry.isIntersecting) this.draw(id);
      }
      this.tell();
    },
    onTheme() {
      // The class is written anew with every update of the page.
      if (isDark() === this.dark) return;
      this.dark = isDark();
      this.drawAll(true);
    },
    onSize(element) {
      const plot = this.plots.get(element.dataset.plot);
      plot?.chart?.resize();
      if (this.visible.has(element.dataset.plot)) {
        this.visible.set(element.dataset.plot, Math.round(element.clientWidth));
        this.tell();
      }
    },
    tell() {
      clearTimeout(this.telling);
      this.telling = setTimeout(() => {
        const visible = document.hidden ? {} : Object.fromEntries(this.visible);
        const look = { visible, range: this.range, x: this.look.x, hidden: document.hidden };
        const text = JSON.stringify(look);
        if (text === this.told) return;
        this.told = text;
        this.$emit("look", look);
      }, SETTLE_MS);
    },
    axisOf(plot) {
      return plot.kind === "phases" ? "batch" : this.look.x;
    },
    zooms(plot) {
      return plot.kind !== "phases" || this.look.x === "batch";
    },
    start(id, plot) {
      plot.chart = echarts.init(plot.element, null, { renderer: "canvas" });
      plot.chart.on("datazoom", () => this.onZoom(plot));
      plot.chart.getZr().on("dblclick", () => this.zoom(null));
      plot.chart.on("updateAxisPointer", (event) => this.onPointer(plot, event.axesInfo[0]?.value));
      plot.chart.on("legendselectchanged", (event) => this.onLegend(plot, event.name, event.selected[event.name]));
    },
    // The other charts that can be seen and have the same axis. ECharts' own way to connect charts goes by the number of
    // a point, which is another one in each line.
    others(plot) {
      const mine = this.axisOf(plot);
      return [...this.plots]
        .filter(([id, other]) => other !== plot && other.chart && this.visible.has(id) && this.axisOf(other) === mine)
        .map(([, other]) => other.chart);
    },
    // The pointer shows its place in all charts; without a value it has left.
    onPointer(plot, value) {
      for (const chart of this.others(plot)) {
        const place = value === undefined
          ? { currTrigger: "leave" }
          : { x: chart.convertToPixel({ xAxisIndex: 0 }, value), y: chart.getHeight() / 2 };
        chart.dispatchAction({ type: "updateAxisPointer", ...place }, { silent: true });
      }
    },
    onLegend(plot, name, isShown) {
      const type = isShown ? "legendSelect" : "legendUnSelect";
      this.others(plot).forEach((chart) => chart.dispatchAction({ type, name }, { silent: true }));
    },
    onZoom(plot) {
      if (this.setting || !this.zooms(plot)) return;
      const zoom = plot.chart.getOption().dataZoom[0];
      const [low, high] = this.extent(plot);
      const range = [zoom.startValue, zoom.endValue];
      const isAll = range[0] <= low && range[1] >= high;
      this.zoom(isAll ? null : range);
    },
    // Shows that part of the axis in every chart, and asks for its points.
    zoom(range) {
      if (JSON.stringify(range) === JSON.stringify(this.range)) return;
      this.range = range;
      this.drawAll(false);
      this.tell();
    },
    onKey(event) {
      const plot = this.plots.get(event.currentTarget.dataset.plot);
      if (!plot?.chart || !this.zooms(plot) || event.ctrlKey || event.metaKey || event.altKey) return;
      const [low, high] = this.extent(plot);
      let [from, to] = this.range || [low, high];
      const span = to - from;
      if (event.key === "+" || event.key === "=") [from, to] = [from + span / 4, to - span / 4];
      else if (event.key === "-") [from, to] = [from - span / 2, to + span / 2];
      else if (event.key === "ArrowLeft") [from, to] = [from - span / 4, to - span / 4];
      else if (event.key === "ArrowRight") [from, to] = [from + span / 4, to + span / 4];
      else if (event.key === "0") [from, to] = [low, high];
      else return;
      event.preventDefault();
      event.stopPropagation();
      from = Math.max(from, low);
      to = Math.min(to, high);
      if (to > from) this.zoom(from <= low && to >= high ? null : [from, to]);
    },
    enlarge(chart) {
      this.wide[chart.id] = !this.wide[chart.id];
    },
    // The ends of the axis: of everything that was seen of the charts that share it.
    extent(plot) {
      const mine = this.axisOf(plot);
      let [low, high] = this.extents?.[mine] || [Infinity, -Infinity];
      this.lines.forEach((runs, id) => {
        const other = this.plots.get(id);
        if (!other || this.axisOf(other) !== mine) return;
        runs.forEach((line) => {
          if (!line.x.length) return;
          low = Math.min(low, line.x[0]);
          high = Math.max(high, line.x[line.x.length - 1]);
        });
      });
      if (high < low) [low, high] = [0, 1];
      this.extents = { ...this.extents, [mine]: [low, high] };
      return [low, high];
    },
    drawAll(anew) {
      this.extents = this.range ? this.extents : {};
      this.plots.forEach((plot, id) => {
        if (this.visible.has(id)) this.draw(id, anew);
      });
    },
    draw(id, anew) {
      const plot = this.plots.get(id);
      if (!plot || !this.visible.has(id)) return;
      if (!plot.chart) this.start(id, plot);
      this.setting = true;
      const option = plot.kind === "phases" ? this.phasesOption(id, plot) : this.metricOption(id, plot);
      plot.chart.setOption(option, { replaceMerge: ["series"], lazyUpdate: !anew });
      this.setting = false;
      if (!plot.selects && window.matchMedia("(pointer: fine)").matches) {
        // Drawing with the pointer selects what to zoom to.
        plot.selects = true;
        setTimeout(() => {
          if (plot.chart.isDisposed()) return;
          plot.chart.dispatchAction({ type: "takeGlobalCursor", key: "dataZoomSelect", dataZoomSelectActive: true });
        });
      }
    },
    baseOption(plot, name) {
      const style = getComputedStyle(document.body);
      const ink = style.getPropertyValue("--ink-soft").trim();
      const line = style.getPropertyValue("--line").trim();
      const [low, high] = this.extent(plot);
      plot.end = high;
      const range = this.zooms(plot) && this.range ? this.range : [low, high];
      const label = { color: ink, fontSize: 11, hideOverlap: true };
      const isTime = plot.kind !== "phases" && this.look.x === "time";
      return {
        animation: false,
        backgroundColor: "transparent",
        grid: ROOM,
        textStyle: { fontFamily: style.fontFamily },
        xAxis: {
          type: "value", min: low, max: high, name, nameLocation: "middle", nameGap: 0,
          axisLabel: { ...label, formatter: isTime ? clock : compact },
          axisLine: { lineStyle: { color: line } }, axisTick: { lineStyle: { color: line } },
          splitLine: { show: false }, nameTextStyle: { color: "transparent" }, minInterval: isTime ? 0 : 1,
          axisPointer: { label: { show: false } },
        },
        tooltip: {
          trigger: "axis", confine: true, transitionDuration: 0, appendTo: "body",
          axisPointer: { type: "line", lineStyle: { color: ink, type: "solid", opacity: 0.6 }, animation: false },
          backgroundColor: style.getPropertyValue("--card").trim(), borderColor: line,
          textStyle: { color: style.getPropertyValue("--ink").trim(), fontSize: 12 }, padding: [6, 9],
        },
        dataZoom: [{
          id: "zoom", type: "inside", filterMode: "none", zoomOnMouseWheel: "ctrl", moveOnMouseMove: false,
          moveOnMouseWheel: false, preventDefaultMouseMove: false, startValue: range[0], endValue: range[1],
          disabled: !this.zooms(plot), throttle: 60,
        }],
        toolbox: {
          left: -200, itemSize: 1, feature: { dataZoom: { yAxisIndex: "none", filterMode: "none" } },
          ...(this.zooms(plot) ? {} : { show: false }),
        },
        _label: label, _line: line,
      };
    },
    metricOption(id, plot) {
      const { _label: label, _line: line, ...option } = this.baseOption(plot, this.look.x);
      const style = getComputedStyle(document.body);
      const card = style.getPropertyValue("--card").trim();
      const series = [];
      let [low, high] = [Infinity, -Infinity];
      for (const run of this.runs) {
        const data = this.lines.get(id)?.get(run.id);
        if (!data || this.hidden[run.id]) continue;
        const color = style.getPropertyValue(runColor(run.color)).trim();
        const points = data.x.map((x, place) => [x, shownValue(data.y[place], this.look.log)]);
        for (const [, y] of points) {
          if (y !== null) [low, high] = [Math.min(low, y), Math.max(high, y)];
        }
        const common = { type: "line", color, showSymbol: points.length < 40, symbolSize: 5, connectNulls: false };
        const isFaint = this.look.smoothing > 0;
        series.push({
          ...common, id: run.id, name: run.label, data: alone(points), showAllSymbol: true, z: 2,
          ...(isFaint ? { showSymbol: false } : {}),
          lineStyle: { width: isFaint ? 1 : 1.8, opacity: isFaint ? 0.28 : 1 }, emphasis: { disabled: true },
        });
        if (isFaint) {
          series.push({
            ...common, id: run.id + " smoothed", name: run.label, z: 3, showSymbol: false,
            data: smoothed(points, this.look.smoothing), lineStyle: { width: 2 }, emphasis: { disabled: true },
          });
        }
        if (data.n.length) {
          series.push({
            type: "scatter", id: run.id + " not finite", name: run.label, yAxisIndex: 1, symbol: "triangle", z: 4,
            symbolSize: 11, itemStyle: { color: MARK, borderColor: card, borderWidth: 1 }, clip: false,
            data: data.n.map(([x, text]) => ({ value: [x, text === "inf" ? 0.97 : 0.03], text, symbolRotate: text === "inf" ? 0 : 180 })),
          });
        }
      }
      // By itself ECharts would widen a log axis to whole powers of ten.
      const log = this.look.log && low <= high ? logAxis(low, high) : { min: null, max: null, ticks: null };
      const digits = axisDigits(low, high);
      option.yAxis = [
        {
          type: this.look.log ? "log" : "value", scale: true, min: log.min, max: log.max,
          axisLabel: { ...label, formatter: (value) => number(value, digits), customValues: log.ticks },
          axisTick: { customValues: log.ticks },
          splitLine: { lineStyle: { color: line, opacity: 0.6 } }, minorSplitLine: { show: false }, splitNumber: 4,
        },
        { type: "value", min: 0, max: 1, show: false },
      ];
      option.tooltip.formatter = (shown) => this.tooltip(shown, Math.max(EXACT_DIGITS, digits));
      option.series = series;
      return option;
    },
    tooltip(shown, digits) {
      const place = this.look.x === "time" ? clock : compact;
      const drawn = shown.filter((one) => one.data);
      const at = place(drawn[0]?.value[0] ?? shown[0]?.axisValue ?? 0);
      const rows = drawn.map((one) => {
        const isSmooth = one.seriesId?.endsWith(" smoothed");
        const value = one.data.text || number(one.value[1], digits);
        const name = (this.runs.length > 1 ? one.seriesName : "") + (isSmooth ? " smoothed" : "");
        // Runs do not have points at the same places.
        const own = place(one.value[0]);
        const apart = own === at ? "" : `at ${own}`;
        return `<tr><td>${one.marker}${encode(name)}</td><td class="number">${encode(value)}</td><td class="at">${apart}</td></tr>`;
      });
      return `<div class="tip"><div>${this.look.x} ${at}</div><table>${rows.join("")}</table></div>`;
    },
    phasesOption(id, plot) {
      const { _label: label, _line: line, ...option } = this.baseOption(plot, "batch");
      const shade = isDark() ? 1 : 0;
      const data = [...(this.lines.get(id)?.values() || [])][0];
      option.legend = {
        bottom: 0, left: "center", type: "scroll", itemWidth: 12, itemHeight: 8, textStyle: label, icon: "roundRect",
        pageTextStyle: label,
      };
      option.grid = { ...ROOM, bottom: 48 };
      const phases = Object.entries(data?.p || {});
      const steps = (data?.x || []).map((x, place) => [x, phases.reduce((sum, [, values]) => sum + values[place], 0)]);
      const [first, last] = this.zooms(plot) && this.range ? this.range : [-Infinity, Infinity];
      // A step reaches back to the one before.
      const shownSteps = steps.filter(([x], place) => x >= first && (place === 0 || steps[place - 1][0] < last));
      const end = upperEdge(shownSteps.map(([, whole]) => whole));
      const beyond = shownSteps.filter(([, whole]) => whole > end);
      this.cut[id] = cutText(beyond);
      option.yAxis = [
        {
          type: "value", max: beyond.length ? end : null, splitNumber: 4,
          // The edge itself is no round number.
          axisLabel: { ...label, formatter: seconds, showMaxLabel: beyond.length ? false : null },
          splitLine: { lineStyle: { color: line, opacity: 0.6 } },
        },
        { type: "value", min: 0, max: 1, show: false },
      ];
      option.series = phases.map(([name, values]) => ({
        type: "line", id: name, name, stack: "step", showSymbol: false, step: "end", lineStyle: { width: 0 },
        areaStyle: { opacity: 0.9 }, color: PHASE_COLORS[name]?.[shade] || "#888", emphasis: { disabled: true },
        data: steps.map(([x], place) => [x, values[place]]),
      }));
      option.series.push({
        type: "scatter", id: CUT, yAxisIndex: 1, symbol: "triangle", symbolSize: 9, z: 4, clip: false, silent: true,
        itemStyle: { color: MARK, borderColor: getComputedStyle(document.body).getPropertyValue("--card").trim(), borderWidth: 1 },
        data: beyond.map(([x]) => [x, 0.97]),
      });
      option.legend.data = phases.map(([name]) => name);
      option.tooltip.formatter = (all) => {
        const shown = all.filter((one) => one.data && one.seriesId !== CUT);
        const whole = shown.reduce((sum, one) => sum + one.value[1], 0) || 1;
        const rows = shown
          .filter((one) => one.value[1] > 0)
          .reverse()
          .map((one) => `<tr><td>${one.marker}${encode(one.seriesName)}</td><td class="number">${seconds(one.value[1])}</td>` +
            `<td class="at">${((100 * one.value[1]) / whole).toFixed(1)} %</td></tr>`);
        const at = shown.length ? compact(shown[0].value[0]) : "";
        const isCut = beyond.some(([x]) => x === shown[0]?.value[0]) ? ", cut off at the edge" : "";
        return `<div class="tip"><div>batch ${at}: ${seconds(whole)}${isCut}</div><table>${rows.join("")}</table></div>`;
      };
      return option;
    },
    latestOf(chart) {
      const values = this.latest[chart.id] || {};
      return this.runs
        .filter((run) => run.id in values && !this.hidden[run.id])
        .map((run) => ({ run: run.id, text: values[run.id], color: `var(${runColor(run.color)})` }));
    },
    oddText(chart) {
      const odd = this.odd[chart.id];
      return odd ? `${odd} not finite` : "";
    },
    summary(chart) {
      if (chart.kind === "phases") {
        const [run, rank] = chart.id.split("/").slice(-2).map(Number);
        const label = this.runs.find((known) => known.id === run)?.label;
        const cut = this.cut[chart.id] ? ` ${this.cut[chart.id]}.` : "";
        return `Where a step's time goes, run ${label}, rank ${rank}. Latest: ${this.spoken[chart.id] || "nothing yet"}.${cut}`;
      }
      const values = this.latestOf(chart).map((one) => {
        const run = this.runs.find((known) => known.id === one.run);
        return this.runs.length > 1 ? `${run.label}: ${one.text}` : one.text;
      });
      const odd = this.oddText(chart) ? `, ${this.oddText(chart)}` : "";
      return `Chart of ${chart.id} over ${this.look.x}${odd}. Latest: ${values.join(", ") || "nothing yet"}.`;
    },
    // What a test or a reader of the page can ask: the points that a chart holds.
    pointsOf(id) {
      return [...(this.lines.get(id)?.entries() || [])].map(([run, line]) => ({ run, x: line.x, y: line.y, n: line.n }));
    },
    shownRange(id) {
      const zoom = this.plots.get(id)?.chart?.getOption()?.dataZoom?.[0];
      return zoom ? [zoom.startValue, zoom.endValue] : null;
    },
    shownScale(id) {
      const axis = this.plots.get(id)?.chart?.getOption()?.yAxis?.[0];
      return axis ? { min: axis.min, max: axis.max, ticks: axis.axisLabel.customValues } : null;
    },
  },
};

// After the next picture is on the screen; a page that cannot be seen has none.
function painted() {
  return new Promise((resolve) => {
    setTimeout(resolve, PAINTED_MS);
    requestAnimationFrame(() => setTimeout(resolve));
  });
}

function isDark() {
  return document.body.classList.contains("body--dark");
}

function runColor(number) {
  return `--run-${number % RUN_COLORS}`;
}

function encode(text) {
  return echarts.format.encodeHTML(String(text));
}

function shownValue(y, isLog) {
  return y === null || (isLog && y <= 0) ? null : y;
}

// A point between two holes has no line to it: it gets a symbol, so that it can be seen.
function alone(points) {
  return points.map((point, place) => {
    if (point[1] === null) return point;
    const before = place > 0 && points[place - 1][1] !== null;
    const after = place + 1 < points.length && points[place + 1][1] !== null;
    return before || after ? point : { value: point, symbol: "circle", symbolSize: 5 };
  });
}

// An exponential moving average by distance on the axis, so that it does not depend on how many points are drawn
// (the "time weighted" one of Weights & Biases, https://docs.wandb.ai/guides/app/features/panels/line-plot/smoothing).
function smoothed(points, amount) {
  const span = points.length ? points[points.length - 1][0] - points[0][0] || 1 : 1;
  const weight = Math.min(Math.sqrt(amount), 0.999);
  let [value, whole, before] = [0, 0, points.length ? points[0][0] : 0];
  return points.map(([x, y]) => {
    if (y === null) return [x, null];
    const kept = Math.pow(weight, ((x - before) / span) * SMOOTHING_SCALE);
    before = x;
    value = value * kept + y;
    whole = whole * kept + 1;
    return [x, value / whole];
  });
}

// The ends of a log axis, a little beyond the values, and round places in between.
function logAxis(low, high) {
  const [from, to] = [Math.log10(low), Math.log10(high)];
  const room = to > from ? Math.max((to - from) / 20, 1e-9) : 0.04;
  const min = Math.max(Math.pow(10, from - room), Number.MIN_VALUE);
  const max = Math.min(Math.pow(10, to + room), Number.MAX_VALUE);
  const decades = to - from;
  const ticks = [];
  if (decades < 0.7) {
    const rough = (max - min) / 5;
    const power = Math.pow(10, Math.floor(Math.log10(rough)));
    const step = power * [1, 2, 5, 10].find((one) => one * power >= rough);
    for (let place = Math.ceil(min / step); place * step <= max; place++) ticks.push(place * step);
  } else {
    const stride = Math.ceil(decades / 6);
    for (let power = Math.floor(from - room); power <= to + room; power++) {
      if (power % stride) continue;
      for (const one of decades < 2.5 ? [1, 2, 5] : [1]) ticks.push(one * Math.pow(10, power));
    }
  }
  return { min, max, ticks: ticks.filter((one) => one >= min && one <= max) };
}

// So many digits tell the labels of an axis apart.
function axisDigits(low, high) {
  if (!(low < high)) return 3;
  const size = Math.max(Math.abs(low), Math.abs(high));
  return Math.min(Math.max(Math.ceil(Math.log10(size / (high - low))) + 2, 3), 12);
}

function number(value, digits) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-4 || size >= 1e9)) {
    return value.toExponential(digits - 1).replace(/\.?0+e/, "e").replace("e+", "e");
  }
  if (digits === 3 && size >= 1e6) return Number((value / 1e6).toPrecision(3)) + "M";
  return grouped(Number(value.toPrecision(digits)));
}

// Where a chart of stacked times ends, so that one long step does not make all others invisible: steps that take more
// than four times as long as nine in ten of them go beyond it.
function upperEdge(wholes) {
  const ordered = [...wholes].sort((one, other) => one - other);
  const usual = ordered[Math.floor(USUAL_SHARE * (ordered.length - 1))];
  return 1.05 * Math.max(...ordered.filter((whole) => whole <= FAR_BEYOND * usual));
}

function cutText(steps) {
  if (!steps.length) return "";
  const longest = seconds(Math.max(...steps.map(([, whole]) => whole)));
  return steps.length === 1 ? `1 step is cut off: ${longest}` : `${steps.length} steps are cut off: up to ${longest}`;
}

function latestPhases(phases) {
  return Object.entries(phases)
    .map(([name, values]) => [name, values[values.length - 1]])
    .filter(([, value]) => value > 0)
    .map(([name, value]) => `${name} ${seconds(value)}`)
    .join(", ");
}

function compact(value) {
  if (Math.abs(value) >= 1e6) return Number((value / 1e6).toPrecision(6)) + "M";
  return grouped(Number(Number(value).toPrecision(8)));
}

// With separators for thousands, and all of its digits.
function grouped(value) {
  return value.toLocaleString("en", { maximumFractionDigits: 20 });
}

function clock(value) {
  const whole = Math.round(value);
  const [hours, minutes, rest] = [Math.floor(whole / 3600), Math.floor(whole / 60) % 60, whole % 60];
  const two = (one) => String(one).padStart(2, "0");
  return hours ? `${hours}:${two(minutes)}:${two(rest)}` : `${minutes}:${two(rest)}`;
}

function seconds(value) {
  if (value === 0) return "0";
  if (value < 1e-3) return `${Number((value * 1e6).toPrecision(3))} µs`;
  return value < 1 ? `${Number((value * 1e3).toPrecision(3))} ms` : `${grouped(Number(value.toPrecision(3)))} s`;
}
