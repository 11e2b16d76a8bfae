// The charts of the dashboard, drawn by ECharts. The server sends lines that are thinned to what can be seen; what can
// be seen (which charts, how wide, which part of the axis) is told to the server by the event "look".
import { echarts } from "nicegui-echart";
import { toRaw } from "vue";
import { Compare } from "page_compare";
import { CrowdPointer, crowdSeries, endsOf, isCrowd, oddMarks } from "page_crowd";
import { exporting } from "page_export";
import { EXTREMES, EXTREMES_TABLE, withExtremes } from "page_extremes";
import { marked, MARKS_SWITCH, MARKS_TIP } from "page_marks";
import { MENU, pinnable, withPinned } from "page_pins";
import { horizontalAxis, isSmoothed, smoothed, verticalAxis } from "page_scales";
import { ALL_RUNS, AXES, hashOf, MOST_SMOOTHING, settingsOf, storeOf } from "page_settings";
import { clockText, grouped, SECONDS, secondsText, valueText } from "page_text";
import { colorOf, inkOf, isDark, paged, painted, redrawn, THEME_BUTTON } from "page_theme";
import { isZooming, zoomByWheel, zoomLightly } from "page_zoom";

const ROOM = { left: 56, right: 20, top: 12, bottom: 26 };
const MOST_VALUES = 12;
const LETTER_PIXELS = 6.5;
const LABEL_ROOM = 12;
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
const NOT_FINITE = " not finite";
const SMOOTHED = " smoothed";
const USUAL_SHARE = 0.9;
const FAR_BEYOND = 4;
const SMOOTHING_STEP = 0.1;
const SETTLE_MS = 60;
const SHORT_DIGITS = 5;
const EXACT_DIGITS = 6;

export default {
  template: `
    <div class="board">
      ${THEME_BUTTON}
      <Teleport v-if="home" to="#home" defer><a class="home-link" :href="home"><q-icon name="arrow_back" aria-hidden="true"></q-icon>all runs</a></Teleport>
      <div class="controls" role="toolbar" aria-label="How charts are drawn">
        <div class="named" role="group" aria-label="X axis">
          <span>x axis</span>
          <q-btn-toggle v-model="settings.x" :options="axes" dense no-caps unelevated toggle-color="primary"></q-btn-toggle>
        </div>
        <div class="named">
          <span>smoothing</span>
          <q-slider v-model="settings.smoothing" :min="0" :max="mostSmoothing" :step="0.01" label aria-label="Smoothing"></q-slider>
        </div>
        <q-toggle v-model="settings.log" label="log scale"></q-toggle>
        ${MARKS_SWITCH}
        <q-input v-model="settings.find" ref="find" placeholder="find charts" dense outlined clearable
                 aria-label="Find charts by name" @clear="settings.find = ''"></q-input>
        <q-btn flat dense no-caps class="link" label="Reset zoom" @click="zoom(null)"></q-btn>
      </div>
      <Compare :told="compare" :runs="runs" @compare="$emit('compare', $event)"></Compare>
      <span id="charts" tabindex="-1"></span>
      <div class="groups">
      <p v-if="!groups.length" class="empty">{{ empty }}</p>
      <p v-else-if="!shownGroups.length" class="empty">no chart is called '{{ settings.find }}'</p>
      <section v-for="group in shownGroups" :key="group.isPinned ? '' : group.charts[0].kind + group.title" class="group" :class="{closed: isClosed(group), whole: group.charts.some((one) => isWide(one)) && !isClosed(group)}" :aria-label="group.title"
               :style="{'--charts': Math.min(group.charts.length, 3)}">
        <h2>
          <button type="button" class="group-title" :aria-expanded="String(!isClosed(group))"
                  @click="toggle(settings.closed, group.title)">
            <span class="arrow" aria-hidden="true">▾</span>{{ group.title }}
            <span class="count">{{ group.charts.length }}</span>
          </button>
        </h2>
        <div class="grid" v-if="!isClosed(group)">
          <figure v-for="chart in group.charts" :key="chart.id" class="chart" :class="[{wide: isWide(chart), many: runs.length > 1}, dropClass(chart)]"
                  :data-chart="chart.id" v-on="dragOf(group, chart)">
            <figcaption :draggable="group.isPinned ? 'true' : null">
              <span class="title" :title="chart.id">{{ chart.title }}</span>
              <label v-if="chart.ranks.length > 1" class="of-rank">rank
                <select :value="rankOf(chart)" @change="settings.rank = Number($event.target.value)">
                  <option v-for="rank in chart.ranks" :key="rank" :value="rank">{{ rank }}</option>
                </select></label>
              <span v-if="oddText(chart)" class="odd">{{ oddText(chart) }}</span>
              <button v-if="cut.get(chart.id) || all.get(chart.id)" type="button" class="cut" @click="showAll(chart.id)"
                      :title="all.get(chart.id) ? 'Cut off what is far beyond the rest' : 'Show all values (or double click)'"
                      >{{ all.get(chart.id) ? "all values" : cut.get(chart.id) }}</button>
              <span class="latest">
                <span v-if="runsIn(chart) > mostValues">{{ runsIn(chart) }} runs</span>
                <span v-for="one in latestOf(chart)" :key="one.run" class="value">
                  <span v-if="runs.length > 1" class="dot" :style="{background: one.color}" aria-hidden="true"></span>{{ one.text }}
                  <span v-if="one.apart" class="apart" :class="one.sense" :title="one.sense && one.sense + ' than the baseline'">{{ one.apart }}<span
                        v-if="one.sense" class="sr-only"> {{ one.sense }}</span><span v-if="one.sense" aria-hidden="true"> {{ one.sense === "better" ? "✓" : "✗" }}</span></span>
                </span>
              </span>
              <button type="button" class="enlarge" :aria-pressed="String(isWide(chart))"
                      :aria-label="(isWide(chart) ? 'Make smaller: ' : 'Make larger: ') + chart.title"
                      @click="toggle(settings.wide, chart.id)">{{ isWide(chart) ? "−" : "+" }}</button>
              <button type="button" class="enlarge menu-button" aria-haspopup="menu" :aria-label="'Menu of ' + chart.title"
                      @click="openMenu(chart, $event)">⋮</button>
              ${EXTREMES}
            </figcaption>
            <div class="plot-box">
            <div class="plot" role="img" tabindex="0" :aria-label="summary(chart)" :data-plot="chart.id"
                 aria-keyshortcuts="+ - ArrowLeft ArrowRight 0" @keydown="onKey($event)" v-plot="chart"></div>
            <div class="marks" role="group" :aria-label="'Marks in ' + chart.title"></div>
            </div>
            ${EXTREMES_TABLE}
          </figure>
        </div>
      </section>
      </div>
      ${MARKS_TIP}
      ${MENU}
    </div>`,
  mixins: [paged, redrawn, marked, pinnable, exporting, withExtremes],
  components: { Compare },
  props: { empty: String, allRuns: String },
  directives: {
    plot: {
      mounted: (element, binding) => binding.instance.watchPlot(element, binding.value),
      unmounted: (element, binding) => binding.instance.dropPlot(element, binding.value),
    },
  },
  data: () => ({
    groups: [],
    runs: [],
    compare: null, // what runs can be compared by, and what is chosen of it
    hidden: {},
    // By chart. Not objects: a metric may be called toString.
    latest: new Map(),
    odd: new Map(),
    spoken: new Map(), // the newest phases, in words
    cut: new Map(), // what is beyond the edges, in words
    all: new Map(), // whether everything is shown: nothing is beyond the edges
    settings: settingsOf(location.hash),
    axes: AXES.map((axis) => ({ label: axis, value: axis })),
    mostSmoothing: MOST_SMOOTHING,
    mostValues: MOST_VALUES,
  }),
  computed: {
    home() {
      return this.allRuns && this.allRuns + (storeOf("sessionStorage")?.getItem(ALL_RUNS) || "");
    },
    shownGroups() {
      const wanted = this.settings.find.toLowerCase();
      return withPinned(this.groups, this.settings.pinned)
        .map((group) => ({ ...group, charts: group.charts.filter((one) => one.id.toLowerCase().includes(wanted)) }))
        .filter((group) => group.charts.length);
    },
  },
  watch: {
    settings: {
      deep: true,
      handler() {
        history.replaceState(history.state, "", hashOf(this.settings) || location.pathname + location.search);
      },
    },
    "settings.x"() {
      this.range = null;
      this.tell();
      this.redraw();
    },
    "settings.rank"() {
      this.tell();
    },
    "settings.smoothing"() {
      this.redraw();
    },
    "settings.log"() {
      this.redraw();
    },
  },
  created() {
    // Kept out of Vue's sight: it would follow every number.
    this.plots = new Map(); // chart -> {element, chart, kind, drawn}
    // Also of charts and axes that are out of sight: the server sends a line once, and then what is new.
    this.lines = new Map(); // axis -> Map(chart -> Map(run -> {x, y}))
    this.visible = new Map(); // chart -> width in pixels
    this.range = null; // the chosen part of the axis
    this.told = "";
  },
  mounted() {
    this.observer = new IntersectionObserver((entries) => this.onSeen(entries), { rootMargin: "150px" });
    this.sizes = new ResizeObserver((entries) => entries.forEach((entry) => this.onSize(entry.target)));
    for (const kind of ["pointerover", "focusin"]) document.addEventListener(kind, this.onList);
  },
  beforeUnmount() {
    this.observer.disconnect();
    this.sizes.disconnect();
    for (const kind of ["pointerover", "focusin"]) document.removeEventListener(kind, this.onList);
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
      if (update.compare) this.compare = update.compare;
      const touched = new Set();
      for (const line of update.lines || []) {
        this.takeLine(line);
        touched.add(line.c);
      }
      for (const [id, values] of update.latest || []) this.latest.set(id, values);
      for (const [id, ends] of update.extremes || []) this.extremes.set(id, ends);
      this.takeMarks(update.marks);
      if (isZooming(this)) {
        // It is drawn when the wheel rests.
      } else if (update.runs || update.hidden || this.isStale) this.drawAll(false);
      else {
        touched.forEach((id) => this.draw(id));
        // The others keep to the same axis.
        this.visible.forEach((_, id) => this.hasOldAxis(id) && this.draw(id));
        if (update.marks?.length) this.layAllMarks();
      }
      const seconds = (performance.now() - began) / 1000;
      return [update.number, seconds + (await painted())];
    },
    hasOldAxis(id) {
      const plot = this.plots.get(id);
      return plot?.chart && plot.end !== this.extent(plot)[1];
    },
    takeLine(line) {
      if (!this.lines.has(line.o)) this.lines.set(line.o, new Map());
      const charts = this.lines.get(line.o);
      if (!charts.has(line.c)) charts.set(line.c, new Map());
      const runs = charts.get(line.c);
      const old = runs.get(line.r);
      if (line.a && old) {
        const first = line.x[0];
        let keep = old.x.length;
        while (keep && old.x[keep - 1] >= first) keep--;
        line.x = old.x.slice(0, keep).concat(line.x);
        line.y = old.y.slice(0, keep).concat(line.y);
        line.n = old.n.filter((one) => one[0] < first).concat(line.n);
      }
      const { low, high, count } = line;
      runs.set(line.r, { x: line.x, y: line.y, n: line.n || [], p: line.p, ...(low ? { low, high, count } : {}) });
      if (line.p) this.spoken.set(line.c, latestPhases(line.p));
      this.odd.set(line.c, [...runs.values()].reduce((sum, one) => sum + one.n.length, 0));
    },
    // The runs that a chart shows, with their lines over the axis that is chosen.
    linesOf(id) {
      const plot = this.plots.get(id);
      return (plot && this.lines.get(this.axisOf(plot))?.get(id)) || new Map();
    },
    watchPlot(element, chart) {
      // One that is pinned is made anew elsewhere.
      this.release(this.plots.get(chart.id));
      this.plots.set(chart.id, { element, kind: chart.kind, scale: chart.scale, chart: null });
      this.observer.observe(element);
      this.sizes.observe(element);
    },
    dropPlot(element, chart) {
      this.observer.unobserve(element);
      this.sizes.unobserve(element);
      const plot = this.plots.get(chart.id);
      if (plot?.element === element) {
        this.release(plot);
        this.plots.delete(chart.id);
        this.visible.delete(chart.id);
        this.tell();
      }
    },
    release(plot) {
      plot?.unwheel?.();
      plot?.pointer?.leave();
      plot?.chart?.dispose();
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
        const look = { visible, range: this.range, x: this.settings.x, hidden: document.hidden, marks: this.marksOn, rank: this.settings.rank };
        const text = JSON.stringify(look);
        if (text === this.told) return;
        this.told = text;
        this.$emit("look", look);
      }, SETTLE_MS);
    },
    axisOf(plot) {
      return plot.kind === "phases" ? "batch" : this.settings.x;
    },
    zooms(plot) {
      return plot.kind !== "phases" || this.settings.x === "batch";
    },
    rankOf(chart) {
      return chart.ranks.includes(this.settings.rank) ? this.settings.rank : chart.ranks[0];
    },
    isClosed(group) {
      return this.settings.closed.includes(group.title);
    },
    isWide(chart) {
      return this.settings.wide.includes(chart.id);
    },
    toggle(list, name) {
      const place = list.indexOf(name);
      if (place < 0) list.push(name);
      else list.splice(place, 1);
    },
    // Somebody went to another link of this page. One to a place in it says nothing about settings.
    onLink() {
      if (location.hash === "#charts") history.replaceState(history.state, "", hashOf(this.settings) || "#");
      else Object.assign(this.settings, settingsOf(location.hash));
    },
    onOwnKey(key) {
      const settings = this.settings;
      const smoother = (step) => Math.min(Math.max(Number((settings.smoothing + step).toFixed(2)), 0), MOST_SMOOTHING);
      if (key === "x") settings.x = AXES[(AXES.indexOf(settings.x) + 1) % AXES.length];
      else if (key === "l") settings.log = !settings.log;
      else if (key === "s") settings.smoothing = smoother(SMOOTHING_STEP);
      else if (key === "a") settings.smoothing = smoother(-SMOOTHING_STEP);
      else if (key === "0") this.zoom(null);
      else return false;
      return true;
    },
    start(id, plot) {
      plot.chart = echarts.init(plot.element, null, { renderer: "canvas" });
      plot.element.addEventListener("pointerenter", () => (this.pointed = plot));
      zoomByWheel(this, plot);
      plot.pointer = new CrowdPointer(plot, () => (plot.kind === "metric" ? this.shownLines(id) : []), (run) => this.focusRun(run), (x) => `${this.settings.x} ${this.placeText(x)}`);
      plot.chart.on("datazoom", () => this.onZoom(plot));
      plot.chart.getZr().on("dblclick", () => (this.range ? this.zoom(null) : this.showAll(id)));
      plot.chart.on("updateAxisPointer", (event) => this.onPointer(plot, event.axesInfo[0]?.value));
      plot.chart.on("legendselectchanged", (event) => this.onLegend(plot, event.name, event.selected[event.name]));
    },
    // The other charts that can be seen and have the same axis. ECharts' own way to connect charts goes by the number of
    // a point, which is another one in each line.
    others(plot, ofZoom = false) {
      const mine = this.axisOf(plot);
      return [...this.plots]
        .filter(([id, other]) => other !== plot && other.chart && this.visible.has(id) && this.axisOf(other) === mine)
        .map(([, other]) => other)
        .filter((other) => !ofZoom || this.zooms(other));
    },
    // Whoever is at a run in a list of them sees its line.
    onList(event) {
      const run = event.target.closest?.("[data-run]")?.dataset.run;
      if (run !== undefined) this.focusRun(/^\d+$/.test(run) ? Number(run) : run);
      else if (!event.target.closest?.(".plot")) this.focusRun(null);
    },
    // The line of a run, or of none, stands out in every chart of many.
    focusRun(run) {
      if (run === (this.focused ?? null)) return;
      this.focused = run;
      cancelAnimationFrame(this.focusing);
      this.focusing = requestAnimationFrame(() => this.visible.forEach((_, id) => {
        const plot = this.plots.get(id);
        if (plot?.isCrowd) plot.chart?.setOption({ series: [{ id: "crowd" }] }, { lazyUpdate: true });
      }));
    },
    // The pointer shows its place in all charts, and the values of the one that it is over; without a value it has left.
    onPointer(plot, value) {
      for (const { chart } of this.others(plot)) {
        const place = value === undefined
          ? { currTrigger: "leave" }
          : { x: chart.convertToPixel({ xAxisIndex: 0 }, value), y: chart.getHeight() / 2 };
        chart.dispatchAction({ type: "updateAxisPointer", ...place }, { silent: true });
      }
    },
    onLegend(plot, name, isShown) {
      const type = isShown ? "legendSelect" : "legendUnSelect";
      this.others(plot).forEach(({ chart }) => chart.dispatchAction({ type, name }, { silent: true }));
    },
    onZoom(plot) {
      if (this.setting || !this.zooms(plot)) return;
      const zoom = plot.chart.getOption().dataZoom[0];
      const [low, high] = this.extent(plot);
      const range = [zoom.startValue, zoom.endValue];
      const isAll = range[0] <= low && range[1] >= high;
      zoomLightly(this, plot, isAll ? null : range);
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
    // Everything in a chart, however far beyond the rest it is; or as usual again.
    showAll(id) {
      if (!this.cut.get(id) && !this.all.get(id)) return;
      this.all.set(id, !this.all.get(id));
      this.redraw();
    },
    // The ends of the axis: of everything that was seen of the charts that share it.
    extent(plot) {
      const mine = this.axisOf(plot);
      let [low, high] = this.extents?.[mine] || [Infinity, -Infinity];
      this.lines.get(mine)?.forEach((runs, id) => {
        if (!this.plots.has(id)) return;
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
    // What somebody does on the page is drawn with the next picture, however much it is.
    redraw() {
      if (this.isStale) return;
      this.isStale = true;
      requestAnimationFrame(() => this.isStale && this.drawAll(false));
    },
    drawAll(anew) {
      this.isStale = false;
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
      const option = this.optionOf(id, plot);
      plot.chart.setOption(option, { replaceMerge: ["series"], lazyUpdate: !anew });
      this.setting = false;
      this.layMarks(plot, option);
      if (!plot.selects && window.matchMedia("(pointer: fine)").matches) {
        // Drawing with the pointer selects what to zoom to.
        plot.selects = true;
        setTimeout(() => {
          if (plot.chart.isDisposed()) return;
          plot.chart.dispatchAction({ type: "takeGlobalCursor", key: "dataZoomSelect", dataZoomSelectActive: true });
        });
      }
    },
    optionOf(id, plot) {
      return plot.kind === "phases" ? this.phasesOption(id, plot) : this.metricOption(id, plot);
    },
    baseOption(id, plot) {
      const [ink, line] = [inkOf("--ink-soft"), inkOf("--line")];
      const [low, high] = this.extent(plot);
      plot.end = high;
      const range = this.zooms(plot) && this.range ? this.range : [low, high];
      const label = { color: ink, fontSize: 11, hideOverlap: true };
      const ticks = horizontalAxis(...range, this.axisOf(plot), this.visible.get(id) - ROOM.left - ROOM.right);
      const places = { customValues: ticks.ticks };
      const right = Math.max(ROOM.right, widthOf(ticks.text(ticks.ticks.at(-1) ?? high)) / 2 + 2);
      return {
        animation: false,
        backgroundColor: "transparent",
        grid: { ...ROOM, right },
        textStyle: { fontFamily: getComputedStyle(document.body).fontFamily },
        xAxis: {
          type: "value", min: low, max: high,
          axisLabel: { ...label, ...places, formatter: ticks.text },
          axisLine: { lineStyle: { color: line } }, axisTick: { lineStyle: { color: line }, ...places },
          splitLine: { show: false }, axisPointer: { label: { show: false } },
        },
        tooltip: {
          trigger: "axis", confine: true, transitionDuration: 0, appendTo: "body",
          axisPointer: { type: "line", lineStyle: { color: ink, type: "solid", opacity: 0.6 }, animation: false },
          backgroundColor: inkOf("--card"), borderColor: line,
          textStyle: { color: inkOf("--ink"), fontSize: 12 }, padding: [6, 9],
        },
        dataZoom: [{
          id: "zoom", type: "inside", filterMode: "none", zoomOnMouseWheel: false, moveOnMouseMove: false,
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
    // The vertical axis, with room for its labels.
    setVertical(option, axis, isLog, label, line) {
      const places = { customValues: axis.ticks };
      const longest = Math.max(...axis.ticks.map((one) => widthOf(axis.text(one))), 0);
      option.grid = { ...option.grid, left: Math.max(ROOM.left, longest + LABEL_ROOM) };
      option.yAxis = [
        {
          type: isLog ? "log" : "value", min: axis.min, max: axis.max,
          axisLabel: { ...label, ...places, formatter: axis.text }, axisTick: places,
          splitLine: { lineStyle: { color: line, opacity: 0.6 } }, minorSplitLine: { show: false },
        },
        { type: "value", min: 0, max: 1, show: false },
      ];
    },
    // The line of each run that is shown, and how it is drawn.
    shownLines(id) {
      const lines = this.linesOf(id);
      const runs = toRaw(this.runs);
      return runs
        .filter((run) => lines.has(run.id) && !this.hidden[run.id])
        .map((run) => ({ run, line: lines.get(run.id), odd: lines.get(run.id).n, color: colorOf(run), dash: run.dash }));
    },
    // The least and the greatest value that an axis is made for; without outliers, but on a log scale, which has room.
    valueEnds(id, lines) {
      const isLog = this.settings.log;
      const ends = lines.map(({ line }) => endsOf(line, this.range, isLog, Boolean(this.all.get(id))));
      const [low, high] = [Math.min(...ends.map(([one]) => one)), Math.max(...ends.map(([, one]) => one))];
      return low <= high ? [low, high] : isLog ? [1, 10] : [0, 1];
    },
    crowdOption(id, plot, option, lines, axis, label, line) {
      const look = {
        range: this.range, isLog: this.settings.log, smoothing: (count) => (isSmoothed(id, this.settings.smoothing, count) ? this.settings.smoothing : 0),
        focused: () => this.focused ?? null, ends: () => this.range || this.extent(plot),
      };
      const { series, outliers } = crowdSeries(lines, axis, look);
      this.cut.set(id, outlierText(outliers, axis, plot.scale));
      this.setVertical(option, axis, this.settings.log, label, line);
      option.tooltip.showContent = false;
      option.series = series;
      return option;
    },
    metricOption(id, plot) {
      const { _label: label, _line: line, ...option } = this.baseOption(id, plot);
      const card = inkOf("--card");
      const lines = this.shownLines(id);
      const axis = verticalAxis(...this.valueEnds(id, lines), this.settings.log, plot.scale);
      plot.isCrowd = isCrowd(lines);
      if (plot.isCrowd) return this.crowdOption(id, plot, option, lines, axis, label, line);
      const mark = { type: "scatter", yAxisIndex: 1, symbol: "triangle", z: 4, clip: false };
      const series = [];
      const outliers = [];
      for (const { run, line: data, odd, color } of lines) {
        const points = data.x.map((x, place) => [x, shownValue(data.y[place], this.settings.log)]);
        const isFaint = isSmoothed(id, this.settings.smoothing, points.length);
        const common = { type: "line", color, showSymbol: points.length < 40, symbolSize: 5, connectNulls: false };
        series.push({
          ...common, id: run.id, name: run.label, data: alone(points), showAllSymbol: true, z: 2,
          ...(isFaint ? { showSymbol: false } : {}),
          lineStyle: { width: isFaint ? 1 : 1.8, opacity: isFaint ? 0.28 : 1, type: run.baseline ? "dashed" : "solid" }, emphasis: { disabled: true },
        });
        if (isFaint) {
          series.push({
            ...common, id: run.id + SMOOTHED, name: run.label, z: 3, showSymbol: false,
            data: smoothed(points, this.settings.smoothing, axis.min, axis.max), lineStyle: { width: 2 }, emphasis: { disabled: true },
          });
        }
        const [first, last] = this.range || [-Infinity, Infinity];
        const oddShown = odd.filter(([x]) => x >= first && x <= last);
        if (oddShown.length) {
          series.push({
            ...mark, id: run.id + NOT_FINITE, name: run.label, data: oddMarks(oddShown),
            itemStyle: { color: this.runs.length > 1 ? color : MARK },
          });
        }
        const beyond = points.filter(([x, y]) => y !== null && (y > axis.max || y < axis.min) && x >= first && x <= last);
        outliers.push(...beyond.map(([, y]) => y));
        if (beyond.length) {
          series.push({
            ...mark, id: run.id + " " + CUT, name: run.label, symbolSize: 9, silent: true,
            itemStyle: { color, borderColor: card, borderWidth: 1 },
            data: beyond.map(([x, y]) => ({ value: [x, y > axis.max ? 0.97 : 0.03], symbolRotate: y > axis.max ? 0 : 180 })),
          });
        }
      }
      this.cut.set(id, outlierText(outliers, axis, plot.scale));
      this.setVertical(option, axis, this.settings.log, label, line);
      const digits = axis.ticks.length > 1 ? Math.log10(Math.max(Math.abs(axis.max), Math.abs(axis.min)) / (axis.ticks[1] - axis.ticks[0])) : 0;
      option.tooltip.formatter = (shown) => this.pointed !== plot ? "" : this.tooltip(shown, plot.scale, Math.max(EXACT_DIGITS, Math.ceil(digits) + 2));
      option.series = series;
      return option;
    },
    placeText(value) {
      return this.settings.x === "time" ? clockText(value, 0.1) : grouped(Number(Number(value).toPrecision(8)));
    },
    tooltip(shown, scale, digits) {
      const place = (value) => this.placeText(value);
      const drawn = nearestOfEach(shown.filter((one) => one.data && !one.seriesId?.endsWith(CUT)));
      const at = place(drawn[0]?.value[0] ?? shown[0]?.axisValue ?? 0);
      const rows = drawn.map((one) => {
        const isSmooth = one.seriesId?.endsWith(SMOOTHED);
        const value = one.data.text || valueText(one.value[1], scale, digits);
        const name = (this.runs.length > 1 ? one.seriesName : "") + (isSmooth ? SMOOTHED : "");
        // Runs do not have points at the same places.
        const own = place(one.value[0]);
        const apart = own === at ? "" : `at ${own}`;
        return `<tr><td>${one.marker}${encode(name)}</td><td class="number">${encode(value)}</td><td class="at">${apart}</td></tr>`;
      });
      return `<div class="tip"><div>${this.settings.x} ${at}</div><table>${rows.join("")}</table></div>`;
    },
    phasesOption(id, plot) {
      const { _label: label, _line: line, ...option } = this.baseOption(id, plot);
      const shade = isDark() ? 1 : 0;
      const data = [...this.linesOf(id).values()][0];
      option.legend = {
        bottom: 0, left: "center", type: "scroll", itemWidth: 12, itemHeight: 8, textStyle: label, icon: "roundRect",
        pageTextStyle: label,
      };
      option.grid = { ...option.grid, bottom: 48 };
      const phases = Object.entries(data?.p || {});
      const steps = (data?.x || []).map((x, place) => [x, phases.reduce((sum, [, values]) => sum + values[place], 0)]);
      const [first, last] = this.zooms(plot) && this.range ? this.range : [-Infinity, Infinity];
      // A step reaches back to the one before.
      const shownSteps = steps.filter(([x], place) => x >= first && (place === 0 || steps[place - 1][0] < last));
      const wholes = shownSteps.map(([, whole]) => whole);
      const end = this.all.get(id) ? Math.max(...wholes, 0) : upperEdge(wholes);
      const axis = verticalAxis(0, end || 1, false, SECONDS);
      const beyond = shownSteps.filter(([, whole]) => whole > axis.max);
      this.cut.set(id, cutText(beyond));
      this.setVertical(option, axis, false, label, line);
      option.series = phases.map(([name, values]) => ({
        type: "line", id: name, name, stack: "step", showSymbol: false, step: "end", lineStyle: { width: 0 },
        areaStyle: { opacity: 0.9 }, color: PHASE_COLORS[name]?.[shade] || "#888", emphasis: { disabled: true },
        data: steps.map(([x], place) => [x, values[place]]),
      }));
      option.series.push({
        type: "scatter", id: CUT, yAxisIndex: 1, symbol: "triangle", symbolSize: 9, z: 4, clip: false, silent: true,
        itemStyle: { color: MARK, borderColor: inkOf("--card"), borderWidth: 1 },
        data: beyond.map(([x]) => [x, 0.97]),
      });
      option.legend.data = phases.map(([name]) => name);
      option.tooltip.formatter = (all) => {
        if (this.pointed !== plot) return "";
        const shown = all.filter((one) => one.data && one.seriesId !== CUT);
        const whole = shown.reduce((sum, one) => sum + one.value[1], 0) || 1;
        const rows = shown
          .filter((one) => one.value[1] > 0)
          .reverse()
          .map((one) => `<tr><td>${one.marker}${encode(one.seriesName)}</td><td class="number">${secondsText(one.value[1])}</td>` +
            `<td class="at">${((100 * one.value[1]) / whole).toFixed(1)} %</td></tr>`);
        const at = shown.length ? grouped(shown[0].value[0]) : "";
        const isCut = beyond.some(([x]) => x === shown[0]?.value[0]) ? ", cut off at the edge" : "";
        return `<div class="tip"><div>batch ${at}: ${secondsText(whole)}${isCut}</div><table>${rows.join("")}</table></div>`;
      };
      return option;
    },
    latestOf(chart) {
      const values = this.latest.get(chart.id) || {};
      const shown = this.runs.filter((run) => run.id in values && !this.hidden[run.id] && !run.faint);
      // Of many, the pointer names those next to it.
      return (shown.length > MOST_VALUES ? [] : shown)
        .map((run) => ({ run: run.id, text: values[run.id][0], apart: values[run.id][1], sense: values[run.id][2], color: run.color }));
    },
    runsIn(chart) {
      const values = this.latest.get(chart.id) || {};
      return this.runs.filter((run) => run.id in values && !this.hidden[run.id] && !run.faint).length;
    },
    oddText(chart) {
      const odd = this.odd.get(chart.id);
      return odd ? `${odd} not finite` : "";
    },
    summary(chart) {
      if (chart.kind === "phases") {
        const run = Number(chart.id.split("/").at(-1));
        const label = this.runs.find((known) => known.id === run)?.label;
        const cut = this.cut.get(chart.id) ? ` ${this.cut.get(chart.id)}.` : "";
        return `Where a step's time goes, run ${label}, rank ${this.rankOf(chart)}. Latest: ${this.spoken.get(chart.id) || "nothing yet"}.${cut}`;
      }
      const values = this.latestOf(chart).map((one) => {
        const run = this.runs.find((known) => known.id === one.run);
        const text = one.text + this.spokenExtremes(chart, run);
        return this.runs.length > 1 ? `${run.label}: ${text}` : text;
      });
      if (this.runsIn(chart) > MOST_VALUES) values.push(`${this.runsIn(chart)} runs`);
      const odd = this.oddText(chart) ? `, ${this.oddText(chart)}` : "";
      const cut = this.cut.get(chart.id) && !this.all.get(chart.id) ? `, ${this.cut.get(chart.id)}` : "";
      return `Chart of ${chart.id} over ${this.settings.x}${odd}${cut}. Latest: ${values.join(this.runs.length > 1 ? "; " : ", ") || "nothing yet"}.`;
    },
    // What a test or a reader of the page can ask: the points that a chart holds.
    pointsOf(id) {
      return [...this.linesOf(id).entries()].map(([run, line]) => ({ run, x: line.x, y: line.y, n: line.n }));
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

// How wide a label is drawn, near enough.
function widthOf(text) {
  return LETTER_PIXELS * text.length;
}

// What a tooltip says of each run: its nearest point, which may be a mark of what is not finite, and beside its line the
// smoothed one.
function nearestOfEach(shown) {
  const nearest = new Map();
  for (const one of shown) {
    const id = one.seriesId?.replace(NOT_FINITE, "");
    const known = nearest.get(id);
    const apart = Math.abs(one.value[0] - one.axisValue);
    const isMark = id !== one.seriesId;
    if (!known || apart < known.apart || (apart === known.apart && isMark)) nearest.set(id, { one, apart });
  }
  return [...nearest.values()].map(({ one }) => one).filter((one) => one.value[1] !== null || !one.seriesId.endsWith(SMOOTHED));
}

function outlierText(values, axis, scale) {
  if (!values.length) return "";
  const [low, high] = [Math.min(...values), Math.max(...values)];
  const [least, greatest] = [low, high].map((one) => valueText(one, scale, SHORT_DIGITS));
  if (values.length === 1) return `outlier: ${greatest}`;
  return "outliers " + (low > axis.max ? `up to ${greatest}` : high < axis.min ? `down to ${least}` : `from ${least} to ${greatest}`);
}

// Where a chart of stacked times ends, so that one long step does not make all others invisible: steps that take more
// than four times as long as nine in ten of them go beyond it.
function upperEdge(wholes) {
  const ordered = [...wholes].sort((one, other) => one - other);
  const usual = ordered[Math.floor(USUAL_SHARE * (ordered.length - 1))];
  return Math.max(...ordered.filter((whole) => whole <= FAR_BEYOND * usual), 0);
}

function cutText(steps) {
  if (!steps.length) return "";
  const longest = secondsText(Math.max(...steps.map(([, whole]) => whole)));
  return steps.length === 1 ? `1 step is cut off: ${longest}` : `${steps.length} steps are cut off: up to ${longest}`;
}

function latestPhases(phases) {
  return Object.entries(phases)
    .map(([name, values]) => [name, values[values.length - 1]])
    .filter(([, value]) => value > 0)
    .map(([name, value]) => `${name} ${secondsText(value)}`)
    .join(", ");
}
