// The charts of the page of runs. The event "look" reports what is visible: charts, their width, the part of the axis.
// The server sends lines thinned to that.
import { LineChart } from "page_chart";
import { axisEnds, colorOfPhase, cutOf, endsOf, latestPhases, metricSpec, phasesSpec } from "page_lines";
import { marksOn } from "page_marks";
import { MetricList } from "page_metrics";
import { Compare, RunList } from "page_runs";
import { ALL_RUNS, AXES, hashOf, MOST_SMOOTHING, settingsOf, storeOf, toggled } from "page_settings";
import { colorOf, paged, painted, redrawn, THEME_BUTTON } from "page_theme";
import { toRaw } from "vue";

const MOST_VALUES = 12;
const MOST_SPOKEN = 20;
const MOST_MARKED = 4; // default limit of runs with marks
const SMOOTHING_STEP = 0.1;
const SETTLE_MS = 60;
const DRAWN_AT_ONCE = 2;

export default /** @type {Component} */ ({
  template: `
    <div :class="['board', {beside: cards.length > 1}]">
      ${THEME_BUTTON}
      <Teleport v-if="home" to="#home" defer><a class="home-link" :href="home"><q-icon name="arrow_back" aria-hidden="true"></q-icon>all runs</a></Teleport>
      <run-list :runs="cards" :hidden="hidden" @toggle="toggleRun" @command="$emit('command', $event)"></run-list>
      <div class="board-main">
      <div class="controls" role="toolbar" aria-label="Options of charts">
        <div class="named" role="group" aria-label="X axis">
          <span>x axis</span>
          <q-btn-toggle v-model="settings.x" :options="axes" dense no-caps unelevated toggle-color="primary"></q-btn-toggle>
        </div>
        <div class="named">
          <span>smoothing</span>
          <q-slider v-model="settings.smoothing" :min="0" :max="mostSmoothing" :step="0.01" label aria-label="Smoothing"></q-slider>
        </div>
        <q-toggle v-model="settings.log" label="log scale"></q-toggle>
        <q-toggle v-model="marksOn" label="marks" title="Commands, checkpoints, evaluations, attempts"></q-toggle>
        <q-input v-model="settings.find" ref="find" placeholder="find charts" dense outlined clearable
                 aria-label="Find charts by name" @clear="settings.find = ''"></q-input>
        <q-btn flat dense no-caps class="link" label="Reset zoom" @click="zoom(null)"></q-btn>
      </div>
      <Compare :told="compare" :runs="runs" @compare="$emit('compare', $event)"></Compare>
      <metric-list :told="metrics" :chosen="settings.pinned" @choose="settings.pinned = $event" @open="opened = toggled(opened, $event)"></metric-list>
      <span id="charts" tabindex="-1"></span>
      <div class="groups">
      <p v-if="!groups.length && !metrics" class="empty">{{ empty }}</p>
      <p v-else-if="!shownGroups.length && !metrics" class="empty">no chart is called '{{ settings.find }}'</p>
      <section v-for="group in shownGroups" :key="group.isPinned ? '' : group.charts[0].kind + group.title" :aria-label="group.title"
               :class="['group', {closed: isClosed(group), whole: group.charts.some((one) => isWide(one)) && !isClosed(group)}]"
               :style="{'--charts': Math.min(group.charts.length, 3)}">
        <h2>
          <button type="button" class="group-title" :aria-expanded="String(!isClosed(group))"
                  @click="settings.closed = toggled(settings.closed, group.title)">
            <span class="arrow" aria-hidden="true">▾</span>{{ group.title }}
            <span class="count">{{ group.charts.length }}</span>
          </button>
        </h2>
        <div class="grid" v-if="!isClosed(group)">
          <figure v-for="chart in group.charts" :key="chart.id" :class="['chart', {wide: isWide(chart), many: runs.length > 1}]" :data-chart="chart.id">
            <figcaption>
              <span class="title" :title="chart.id">{{ chart.title }}</span>
              <label v-if="chart.ranks.length > 1" class="of-rank">rank
                <select :value="rankOf(chart)" @change="settings.rank = Number($event.target.value)">
                  <option v-for="rank in chart.ranks" :key="rank" :value="rank">{{ rank }}</option>
                </select></label>
              <span v-if="oddText(chart)" class="odd">{{ oddText(chart) }}</span>
              <button v-if="cut.get(chart.id) || all.get(chart.id)" type="button" class="cut" @click="showAll(chart.id)"
                      :title="all.get(chart.id) ? 'Cut off outliers' : 'Show all values (or double click)'"
                      >{{ all.get(chart.id) ? "all values" : cut.get(chart.id) }}</button>
              <button type="button" class="enlarge" :aria-pressed="String(isWide(chart))"
                      :aria-label="(isWide(chart) ? 'Make smaller: ' : 'Make larger: ') + chart.title"
                      @click="settings.wide = toggled(settings.wide, chart.id)">{{ isWide(chart) ? "−" : "+" }}</button>
              <button type="button" class="enlarge" aria-haspopup="menu" :aria-label="'Menu of ' + chart.title">⋮<q-menu auto-close class="chart-menu">
                <q-list dense>
                  <q-item clickable @click="settings.pinned = toggled(settings.pinned, chart.id)">{{ group.isPinned ? "Unpin" : "Pin to the top" }}</q-item>
                </q-list>
              </q-menu></button>
              <span class="latest">
                <span v-if="valuesOf(chart).length > mostValues">{{ valuesOf(chart).length }} runs</span>
                <span v-else v-for="one in valuesOf(chart)" :key="one.run.id" class="value">
                  <span v-if="runs.length > 1" class="dot" :style="{background: one.run.color}" aria-hidden="true"></span>{{ one.text }}
                  <span v-if="one.apart" :class="['apart', one.sense]" :title="one.sense && one.sense + ' than the baseline'">{{ one.apart }}<span
                        v-if="one.sense" class="sr-only"> {{ one.sense }}</span><span v-if="one.sense" aria-hidden="true"> {{ one.sense === "better" ? "✓" : "✗" }}</span></span>
                </span>
                <span v-for="color, name in phasesOf(chart)" :key="name" class="value"><span class="dot" :style="{background: color}" aria-hidden="true"></span>{{ name }}</span>
              </span>
            </figcaption>
            <div class="plot" role="img" tabindex="0" :aria-label="summary(chart)" :data-plot="chart.id"
                 aria-keyshortcuts="+ - ArrowLeft ArrowRight 0" @keydown="onKey($event)" v-plot="chart"></div>
          </figure>
        </div>
      </section>
      </div>
      </div>
      <span class="sr-only" role="status">{{ title }}</span>
    </div>`,
  mixins: [paged, redrawn],
  components: { Compare, MetricList, RunList },
  props: { empty: String, allRuns: String },
  directives: {
    plot: {
      mounted: (element, binding) => binding.instance.watchPlot(element, binding.value),
      unmounted: (element, binding) => binding.instance.dropPlot(element, binding.value),
    },
  },
  data: () => ({
    groups: [],
    metrics: null, // the list of very many metrics; then only the pinned ones are drawn
    opened: [], // groups of that list
    runs: [], // runs and groups with lines
    cards: [], // the state of each run
    compare: null, // possible and chosen comparisons
    hidden: {}, // runs without lines
    // By chart. Not objects: a metric may be called toString.
    values: new Map(), // run -> {last, apart, sense}
    odd: new Map(),
    phases: new Map(), // the newest ones, in words, and all names
    cut: new Map(), // outliers beyond the edges, in words
    all: new Map(), // true: all values are shown, without a cut
    marksVersion: 0,
    settings: settingsOf(location.hash),
    axes: AXES.map((axis) => ({ label: axis, value: axis })),
    mostSmoothing: MOST_SMOOTHING,
    mostValues: MOST_VALUES,
  }),
  computed: {
    home() {
      return this.allRuns && this.allRuns + (storeOf("sessionStorage")?.getItem(ALL_RUNS) || "");
    },
    title() {
      if (!this.cards.length) return "";
      return this.cards.length === 1 ? `${this.cards[0].status}: ${this.cards[0].label}` : `${this.cards.length} runs`;
    },
    shownGroups() {
      const { pinned } = this.settings;
      const find = this.metrics ? "" : this.settings.find; // of very many, the server finds them
      const charts = new Map(this.groups.flatMap((group) => group.charts).map((chart) => [chart.id, chart]));
      const chosen = { title: "pinned", isPinned: true, charts: pinned.filter((id) => charts.has(id)).map((id) => charts.get(id)) };
      const rest = this.groups.map((group) => ({ ...group, charts: group.charts.filter((chart) => !pinned.includes(chart.id)) }));
      return [chosen, ...rest]
        .map((group) => ({ ...group, charts: group.charts.filter((chart) => chart.id.toLowerCase().includes(find.toLowerCase())) }))
        .filter((group) => group.charts.length);
    },
    asked() {
      const { find, pinned, rank } = this.settings;
      return { find, chosen: [...pinned], opened: [...this.opened], rank };
    },
    marksOn: {
      get() {
        const shown = this.runs.filter((run) => !this.hidden[run.id]);
        return this.settings.marks ?? (shown.length <= MOST_MARKED && !shown.some((run) => run.isGroup));
      },
      set(isOn) {
        this.settings.marks = isOn;
      },
    },
    shownMarks() {
      this.marksVersion;
      return this.marksOn ? marksOn(this.settings.x, this.runs.filter((run) => !this.hidden[run.id]), this.marks, colorOf) : [];
    },
  },
  watch: {
    settings: {
      deep: true,
      handler() {
        history.replaceState(history.state, "", hashOf(this.settings) || location.pathname + location.search);
      },
    },
    title(title) {
      document.title = `${title} · offloop`;
    },
    "settings.x"() {
      this.range = null;
      this.tell();
      this.redraw();
    },
    asked() {
      this.tell();
    },
    "settings.smoothing"() {
      this.redraw();
    },
    "settings.log"() {
      this.redraw();
    },
    marksOn() {
      this.tell();
      this.redraw();
    },
  },
  created() {
    // Not reactive: Vue would follow every number.
    this.plots = new Map(); // chart -> {element, kind, scale, chart, lines, look}
    // Also invisible charts and axes: the server sends a line once, and then its new points.
    this.lines = new Map(); // axis -> Map(chart -> Map(run -> {x, y}))
    this.extents = new Map(); // axis -> ends of all its data
    this.marks = new Map(); // run -> its marks
    this.visible = new Map(); // chart -> width in pixels
    this.stale = new Map(); // charts to draw: from new lines (true), or another part of them
    this.range = null; // the chosen part of the axis
    this.settleMs = SETTLE_MS;
  },
  mounted() {
    this.observer = new IntersectionObserver((entries) => this.onSeen(entries), { rootMargin: "150px" });
    this.sizes = new ResizeObserver((entries) => entries.forEach((entry) => this.onSize(entry.target)));
    for (const kind of ["pointerover", "focusin"]) document.addEventListener(kind, this.onList);
    this.tell(); // what the address says
  },
  beforeUnmount() {
    this.observer.disconnect();
    this.sizes.disconnect();
    for (const kind of ["pointerover", "focusin"]) document.removeEventListener(kind, this.onList);
    this.plots.forEach((plot) => plot.chart?.destroy());
  },
  methods: {
    // Called by the server with changes. The answer, once drawn, lets the server send the next: its seconds set the pause.
    async frame(update) {
      const began = performance.now();
      for (const name of ["runs", "cards", "groups", "metrics", "compare"]) if (update[name]) this[name] = update[name];
      const before = JSON.stringify([...this.extents]);
      for (const line of update.lines || []) {
        this.takeLine(line);
        this.stale.set(line.c, true);
      }
      for (const [id, values] of update.values || []) this.values.set(id, values);
      for (const { r, a, m } of update.marks || []) this.marks.set(r, a ? (this.marks.get(r) || []).concat(m) : m);
      if (update.marks?.length) this.marksVersion++;
      if (update.runs || update.marks?.length) this.redraw();
      else if (JSON.stringify([...this.extents]) !== before) this.redraw(false);
      this.drawStale(Infinity);
      const seconds = (performance.now() - began) / 1000;
      return [update.number, seconds + (await painted())];
    },
    takeLine(line) {
      if (!this.lines.has(line.o)) this.lines.set(line.o, new Map());
      const charts = this.lines.get(line.o);
      if (!charts.has(line.c)) charts.set(line.c, new Map());
      const runs = charts.get(line.c);
      const old = runs.get(line.r);
      if (line.a && old) {
        const first = line.x[0];
        const keep = old.x.findLastIndex((x) => x < first) + 1;
        line.x = old.x.slice(0, keep).concat(line.x);
        line.y = old.y.slice(0, keep).concat(line.y);
        line.n = old.n.filter((one) => one[0] < first).concat(line.n);
      }
      runs.set(line.r, line);
      if (line.x.length) {
        const [low, high] = this.extents.get(line.o) || [Infinity, -Infinity];
        this.extents.set(line.o, [Math.min(low, line.x[0]), Math.max(high, line.x.at(-1))]);
      }
      if (line.p) this.phases.set(line.c, { text: latestPhases(line.p), names: Object.keys(line.p) });
      this.odd.set(line.c, [...runs.values()].reduce((sum, one) => sum + one.n.length, 0));
    },
    watchPlot(element, chart) {
      // A pinned chart is made again in another place.
      this.plots.get(chart.id)?.chart?.destroy();
      this.plots.set(chart.id, { element, kind: chart.kind, scale: chart.scale, chart: null });
      this.observer.observe(element);
      this.sizes.observe(element);
    },
    dropPlot(element, chart) {
      this.observer.unobserve(element);
      this.sizes.unobserve(element);
      const plot = this.plots.get(chart.id);
      if (plot?.element !== element) return;
      plot.chart?.destroy();
      this.plots.delete(chart.id);
      this.visible.delete(chart.id);
      this.tell();
    },
    onSeen(entries) {
      for (const { target, isIntersecting } of entries) {
        const id = target.dataset.plot;
        if (isIntersecting) this.visible.set(id, Math.round(target.clientWidth));
        else this.visible.delete(id);
        if (isIntersecting) this.stale.set(id, true);
      }
      this.drawSoon();
      this.tell();
    },
    onTheme() {
      this.redraw();
    },
    onSize(element) {
      const id = element.dataset.plot;
      this.plots.get(id)?.chart?.resize();
      if (!this.visible.has(id)) return;
      this.visible.set(id, Math.round(element.clientWidth));
      this.tell();
    },
    look() {
      const visible = document.hidden ? {} : Object.fromEntries(this.visible);
      return { visible, range: this.range, x: this.settings.x, hidden: document.hidden, marks: this.marksOn, left_out: Object.keys(this.hidden).map(Number), ...this.asked };
    },
    axisOf(plot) {
      return plot.kind === "phases" ? "batch" : this.settings.x;
    },
    extentOf(plot) {
      return this.extents.get(this.axisOf(plot)) || [0, 1];
    },
    rangeOf(plot) {
      return this.axisOf(plot) === this.settings.x && this.range ? this.range : this.extentOf(plot);
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
    toggleRun(run) {
      const { [run]: was, ...others } = this.hidden;
      this.hidden = was ? others : { ...others, [run]: true };
      this.tell();
      this.redraw();
    },
    toggled,
    // The address has a new hash. A place in the page is not a setting.
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
    // The pointer or the focus in a list of runs highlights a line.
    onList(event) {
      const run = event.target.closest?.("[data-run]")?.dataset.run;
      if (run !== undefined) this.focusRun(/^\d+$/.test(run) ? Number(run) : run);
      else if (!event.target.closest?.(".plot")) this.focusRun(null);
    },
    focusRun(run) {
      if (run === (this.focused ?? null)) return;
      this.focused = run;
      this.visible.forEach((_, id) => {
        const chart = this.plots.get(id)?.chart;
        if (chart && chart.focused !== run) chart.setFocus(run);
      });
    },
    // Shows a part of the axis, first in the user's chart, and requests its points.
    zoom(range, first) {
      if (JSON.stringify(range) === JSON.stringify(this.range)) return;
      this.range = range;
      if (first) this.stale = new Map([[first, this.stale.get(first) || false], ...this.stale]);
      this.redraw(false);
      this.tell();
    },
    onKey(event) {
      const plot = this.plots.get(event.currentTarget.dataset.plot);
      if (!plot?.chart || this.axisOf(plot) !== this.settings.x || event.ctrlKey || event.metaKey || event.altKey) return;
      const [low, high] = this.extentOf(plot);
      let [from, to] = this.rangeOf(plot);
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
    // Shows all values of a chart, or cuts outliers again.
    showAll(id) {
      if (!this.cut.get(id) && !this.all.get(id)) return;
      this.all.set(id, !this.all.get(id));
      this.stale.set(id, true);
      this.drawSoon();
    },
    // Draws visible charts with the next frames: from new lines, or another part of them.
    redraw(isNew = true) {
      this.visible.forEach((_, id) => this.stale.set(id, isNew || this.stale.get(id) || false));
      this.drawSoon();
    },
    drawSoon() {
      this.drawing ||= requestAnimationFrame(() => {
        this.drawing = null;
        this.drawStale(DRAWN_AT_ONCE);
      });
    },
    // At most this number of charts; the others follow with the next frames.
    drawStale(most) {
      for (const [id, isNew] of [...this.stale].slice(0, most)) {
        this.stale.delete(id);
        this.draw(id, isNew);
      }
      if (this.stale.size) this.drawSoon();
    },
    draw(id, isNew) {
      const plot = this.plots.get(id);
      if (!plot || !this.visible.has(id)) return;
      if (isNew || !plot.chart || plot.kind === "phases") return this.drawLines(id, plot);
      plot.chart.zoom(this.rangeOf(plot), this.extentOf(plot), this.endsIn(id, plot, plot.chart.spec));
    },
    drawLines(id, plot) {
      plot.chart ||= new LineChart(plot.element, {
        zoom: (range) => this.axisOf(plot) === this.settings.x && this.zoom(range, id),
        focus: (run) => this.focusRun(run),
        reset: () => (this.range ? this.zoom(null) : this.showAll(id)),
      });
      const lines = this.lines.get(this.axisOf(plot))?.get(id) || new Map();
      const common = { axis: this.axisOf(plot), extent: this.extentOf(plot), range: this.rangeOf(plot) };
      if (plot.kind === "phases") {
        const { text, ...spec } = phasesSpec([...lines.values()][0], common.range, Boolean(this.all.get(id)));
        this.cut.set(id, text);
        return plot.chart.show({ ...common, ...spec, marks: [] });
      }
      plot.lines = toRaw(this.runs).filter((run) => lines.has(run.id) && !this.hidden[run.id]).map((run) => ({ run, line: lines.get(run.id) }));
      plot.look = { id, scale: plot.scale, isLog: this.settings.log, isAll: Boolean(this.all.get(id)), smoothing: this.settings.smoothing };
      const spec = { ...common, ...metricSpec(plot.lines, plot.look), marks: this.shownMarks, ends: null };
      spec.ends = this.endsIn(id, plot, spec);
      plot.chart.show(spec);
    },
    // The ends of the vertical axis in the visible part; values beyond them are marked.
    endsIn(id, plot, spec) {
      const range = this.rangeOf(plot);
      const ends = axisEnds(endsOf(plot.lines, range, plot.look), plot.look.isLog);
      const { cut, text } = cutOf(plot.lines, range, ends, plot.look);
      spec.cut = cut;
      if (this.cut.get(id) !== text) this.cut.set(id, text);
      return ends;
    },
    valuesOf(chart) {
      const values = this.values.get(chart.id) || {};
      return this.runs
        .filter((run) => run.id in values && !this.hidden[run.id] && !run.faint)
        .map((run) => ({ run, text: values[run.id].last, apart: values[run.id].apart, sense: values[run.id].sense }));
    },
    phasesOf(chart) {
      return Object.fromEntries((this.phases.get(chart.id)?.names || []).map((name) => [name, colorOfPhase(name)]));
    },
    oddText(chart) {
      const odd = this.odd.get(chart.id);
      return odd ? `${odd} not finite` : "";
    },
    summary(chart) {
      const cut = this.cut.get(chart.id) && !this.all.get(chart.id) ? `, ${this.cut.get(chart.id)}` : "";
      if (chart.kind === "phases") {
        const label = this.runs.find((run) => run.id === Number(chart.id.split("/").at(-1)))?.label;
        return `Time of a step by phase, run ${label}, rank ${this.rankOf(chart)}${cut}. Latest: ${this.phases.get(chart.id)?.text || "nothing yet"}.`;
      }
      const found = this.valuesOf(chart);
      const values = found.length > MOST_VALUES ? [`${found.length} runs`] : found.map(({ run, text }) => (this.runs.length > 1 ? `${run.label}: ${text}` : text));
      const odd = this.oddText(chart) ? `, ${this.oddText(chart)}` : "";
      const marks = this.shownMarks.slice(-MOST_SPOKEN).map(({ text, when }) => `${text}, ${when}`);
      return `Chart of ${chart.id} over ${this.settings.x}${odd}${cut}. Latest: ${values.join("; ") || "nothing yet"}.${marks.length ? ` Marks: ${marks.join("; ")}.` : ""}`;
    },
    // For tests: the points that a chart holds, and what it shows of them.
    pointsOf(id) {
      const plot = this.plots.get(id);
      const lines = (plot && this.lines.get(this.axisOf(plot))?.get(id)) || new Map();
      return [...lines].map(([run, line]) => ({ run, x: line.x, y: line.y, n: line.n }));
    },
    drawnOf(id) {
      const chart = this.plots.get(id)?.chart;
      if (!chart?.uplot) return null;
      const { spec, uplot } = chart;
      const lines = spec.lines.map(({ id: line, label, color, xs, ys }) => ({ id: line, label, color, xs, ys }));
      const texts = uplot.axes.map((axis) => axis._values);
      return { range: spec.range, ends: spec.ends, lines, cut: spec.cut, odd: spec.odd, marks: spec.marks, texts };
    },
    pixelsOf(id, x, y) {
      const { uplot } = this.plots.get(id).chart;
      const [over, element] = [uplot.over, uplot.root].map((one) => one.getBoundingClientRect());
      return [over.left - element.left + uplot.valToPos(x, "x"), over.top - element.top + uplot.valToPos(y, "y")];
    },
  },
});
