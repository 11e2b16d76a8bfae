// All runs that are found, as a scatter plot or as parallel coordinates. The server sends columns of values, by the event
// "look" of the table; what is drawn of them and how is decided here.
import { bestOf, canBeLog, isNumber, isUsuallyLog, textOf, valueIn } from "page_explore_axes";
import { AXIS_PIXELS, paintRanges, parallelOption, scatterOption, SIDE_PIXELS } from "page_explore_options";
import { isDark } from "page_theme";

const MOST_SELECTED = 1000; // as _MOST_SELECTED in home.py
const MOST_OPTIONS = 200;
const OF_METRIC = [".best", "", ".min", ".max"];
const NO_COLOR = "-";
const NEAR = 1e-9;

// What a frame says of the runs that are found, taken out of it, in the place of what was known before.
export function takeExplored(before, update) {
  const keys = Object.keys(update).filter((name) => name.startsWith("explored"));
  if (!keys.length) return before;
  const about = update.explored || before.about;
  const columns = new Map(about.columns.map((name) => [name, update["explored:" + name] || before.columns.get(name)]));
  const runs = update.exploredRuns || before.runs;
  keys.forEach((name) => delete update[name]);
  // Frozen: Vue need not follow each number.
  return Object.freeze({ about: Object.freeze(about), columns, runs: Object.freeze(runs) });
}

export const Explore = {
  template: `
    <section class="explore" :aria-label="isScatter ? 'Scatter plot' : 'Parallel coordinates'">
      <p v-if="!settings.runs.length" class="explore-hint">{{ isScatter ? "Click a point to select its run, double click to open it." : "Draw over an axis to select the runs in that range." }}</p>
      <div class="explore-bar" role="toolbar" aria-label="What is drawn">
        <q-select v-for="one in selects" :key="one.role" :model-value="one.value" :options="options" class="explore-select" dense outlined options-dense
                  use-input fill-input hide-selected input-debounce="0" behavior="menu" :label="one.label" :aria-label="one.label"
                  :clearable="one.clearable && !!one.value" popup-content-class="home-menu explore-options" @filter="findOptions" @clear="settings[one.role] = one.none"
                  @update:model-value="(name) => name && choose(one.role, name)">
          <template #no-option><div class="soft explore-none">no run has that</div></template>
        </q-select>
        <q-toggle v-for="one in logToggles" :key="one.name" :model-value="isLog(one.name)" dense :label="one.label" @update:model-value="toggleLog(one.name)"></q-toggle>
        <q-btn v-if="!isScatter && brushed.length" flat dense no-caps class="link" label="Clear ranges" @click="clearRanges()"></q-btn>
      </div>
      <p v-if="about?.problem" class="home-error" role="alert">{{ about.problem }}</p>
      <div class="explore-main">
        <figure class="explore-card">
          <figcaption class="explore-legend">
            <template v-if="legend">
              <span class="soft">{{ legend.title }}</span>
              <template v-if="legend.swatches"><span v-for="one in legend.swatches" :key="one.text"><span class="dot" :style="{background: one.color}" aria-hidden="true"></span>{{ one.text }}</span></template>
              <span v-else>{{ legend.low }}<span class="explore-ramp" :style="{background: legend.gradient}" aria-hidden="true"></span>{{ legend.high }}</span>
            </template>
          </figcaption>
          <div class="explore-scroll">
            <div class="explore-canvas" :style="isScatter ? {} : {minWidth: parallelWidth + 'px'}">
              <div v-if="!isScatter && isReady" class="explore-heads" role="group" aria-label="Axes">
                <button v-for="(column, place) in axisColumns" :key="column.name" type="button" class="explore-head" :style="headStyle(place)" :title="column.hint"
                        aria-haspopup="dialog" :class="{brushed: settings.brush.has(column.name)}" @keydown="onHeadKey($event, column.name)"
                        >{{ column.title }}<span v-if="rangeText(column)" class="explore-range">{{ rangeText(column) }}</span>
                  <q-menu class="home-menu">
                    <div class="explore-axis" role="dialog" :aria-label="'Axis ' + column.hint">
                      <strong>{{ column.hint }}</strong>
                      <form v-if="column.kind !== 'time'" class="explore-fromto" @submit.prevent="setTyped(column, $event.target)">
                        <template v-if="column.kind === 'text'">
                          <select v-for="end in ['from', 'to']" :key="end" :name="end" :aria-label="end" :value="typedEnd(column, end)" @change="setTyped(column, $event.target.form)"><option v-for="text in column.texts" :key="text">{{ text }}</option></select>
                        </template>
                        <template v-else>
                          <input name="from" inputmode="decimal" placeholder="from" aria-label="from" :value="settings.brush.get(column.name)?.[0]">
                          <input name="to" inputmode="decimal" placeholder="to" aria-label="to" :value="settings.brush.get(column.name)?.[1]">
                          <q-btn type="submit" flat dense no-caps class="link" label="Select"></q-btn>
                        </template>
                        <q-btn v-if="settings.brush.has(column.name)" flat dense no-caps class="link" label="Clear" @click="setRange(column.name, null)"></q-btn>
                      </form>
                      <q-toggle v-if="canBeLog(column)" :model-value="isLog(column.name)" dense label="log axis" @update:model-value="toggleLog(column.name)"></q-toggle>
                      <div v-if="place < axisColumns.length - 1" class="explore-moves">
                        <q-btn flat dense no-caps class="link" label="← Move" aria-label="Move to the left" :disable="place === 0" @click="move(column.name, -1)"></q-btn>
                        <q-btn flat dense no-caps class="link" label="Move →" aria-label="Move to the right" :disable="place >= axisColumns.length - 2" @click="move(column.name, 1)"></q-btn>
                        <q-btn v-close-popup flat dense no-caps class="link" label="Remove" :disable="axisColumns.length < 3" @click="remove(column.name)"></q-btn>
                      </div>
                    </div>
                  </q-menu>
                </button>
              </div>
              <div ref="plot" class="explore-plot" role="img" tabindex="0" :aria-label="plotText" aria-describedby="explore-summary"
                   aria-keyshortcuts="ArrowLeft ArrowRight Space Enter" @keydown="onKey($event)" @blur="leave()" @pointerdown="isHeld = true"></div>
            </div>
          </div>
          <p id="explore-summary" class="explore-summary">{{ summary }}</p>
          <p v-if="emptyText" class="explore-empty">{{ emptyText }}</p>
        </figure>
        <aside v-if="about?.related.length" class="explore-related" aria-label="What goes with the metric">
          <h2>Goes with {{ metricTitle }}</h2>
          <table>
            <caption class="sr-only">Rank correlation of hyperparameters with {{ metricTitle }}</caption>
            <tr v-for="one in about.related" :key="one.name">
              <th scope="row"><button type="button" :title="one.hint + ', ' + one.runs + ' runs'" :aria-label="(isScatter ? 'Use as x axis: ' : 'Show the axis: ') + one.title" @click="show(one.name)">{{ one.title }}</button></th>
              <td class="explore-bar-cell" aria-hidden="true"><span :class="one.rho < 0 ? 'down' : 'up'" :style="{width: 50 * Math.abs(one.rho) + '%'}"></span></td>
              <td class="explore-rho">{{ signed(one.rho) }}<small class="soft">{{ " of " + one.runs }}</small></td>
            </tr>
          </table>
          <p class="soft">Spearman's rank correlation, from −1 to 1, and of how many runs. It shows what rises and falls together, not why.</p>
        </aside>
      </div>
      <span class="sr-only" aria-live="polite">{{ spoken }}</span>
    </section>`,
  props: { explored: Object, settings: Object, names: Object, linkTo: Function, emptyText: String },
  emits: ["look"],
  data: () => ({ options: [], legend: null, spoken: "", width: 0 }),
  computed: {
    isScatter() {
      return this.settings.view === "scatter";
    },
    about() {
      return this.explored.about;
    },
    isReady() {
      return !!this.about && this.about.view === this.settings.view && !!this.about.y && (!this.isScatter || !!this.about.x);
    },
    selects() {
      const about = this.about || {};
      if (!this.isScatter) return [{ role: "y", label: "metric", value: about.y }, { role: "axis", label: "add an axis", value: null }];
      return [
        { role: "x", label: "x axis", value: about.x },
        { role: "y", label: "y axis", value: about.y },
        { role: "color", label: "colour", value: about.color, clearable: true, none: NO_COLOR },
      ];
    },
    logToggles() {
      if (!this.isScatter || !this.isReady) return [];
      return ["x", "y"]
        .map((role) => ({ name: this.about[role], label: `log ${role}` }))
        .filter(({ name }, place, all) => canBeLog(this.column(name)) && all.findIndex((one) => one.name === name) === place);
    },
    axisColumns() {
      return this.isReady && !this.isScatter ? [...this.about.axes, this.about.y].map((name) => this.column(name)) : [];
    },
    parallelWidth() {
      return 2 * SIDE_PIXELS + AXIS_PIXELS * Math.max(this.axisColumns.length - 1, 1);
    },
    metricTitle() {
      return this.column(this.about?.y)?.title || "";
    },
    // The numbers of the runs that have what is drawn.
    drawn() {
      if (!this.isReady) return [];
      const needed = this.isScatter ? [this.column(this.about.x), this.column(this.about.y)] : [this.column(this.about.y)];
      return this.explored.runs.map((_, run) => run).filter((run) => needed.every((column) => column.values[run] !== null));
    },
    chosen() {
      const names = new Set(this.settings.runs);
      return this.drawn.filter((run) => names.has(this.explored.runs[run]));
    },
    best() {
      return bestOf(this.column(this.about?.y), this.drawn);
    },
    brushed() {
      return [...this.settings.brush.keys()];
    },
    // The runs that are within all ranges.
    within() {
      if (this.isScatter || !this.isReady) return [];
      const ranges = this.axisColumns.filter((column) => this.settings.brush.has(column.name)).map((column) => [column, this.placesOf(column)]);
      if (!ranges.length) return [];
      return this.drawn.filter((run) => ranges.every(([column, [low, high]]) => {
        const value = column.values[run];
        return value !== null && value >= low && value <= high;
      }));
    },
    plotText() {
      if (!this.isReady) return "Nothing is drawn yet";
      if (this.isScatter) return `Scatter plot of ${this.column(this.about.y).title} over ${this.column(this.about.x).title}`;
      return `Parallel coordinates of ${this.axisColumns.map((column) => column.title).join(", ")}`;
    },
    summary() {
      if (!this.isReady) return "";
      const many = (count) => count.toLocaleString("en");
      const drawn = this.drawn.length;
      const { found } = this.about;
      const parts = [`${many(drawn)} ${drawn === 1 ? "run" : "runs"}`];
      if (this.explored.runs.length < found) parts[0] += ` of the first ${many(this.explored.runs.length)} (${many(found)} are found)`;
      const left = this.explored.runs.length - drawn;
      if (left) parts.push(`${many(left)} more ${left === 1 ? "has" : "have"} no ${this.isScatter ? "value on both axes" : this.metricTitle}`);
      if (!this.isScatter) {
        for (const column of this.axisColumns.slice(0, -1)) {
          const missing = this.drawn.filter((run) => column.values[run] === null).length;
          if (missing) parts.push(`${many(missing)} without ${column.title}`);
        }
        if (this.brushed.length) parts.push(`${many(this.within.length)} within the ranges` + (this.within.length > MOST_SELECTED ? `, the first ${many(MOST_SELECTED)} are selected` : ""));
      }
      if (this.best !== null && drawn > 1) parts.push(`best: ${this.describe(this.best)}`);
      return parts.join("; ") + ".";
    },
  },
  watch: {
    explored() {
      this.redraw();
    },
    settings: { deep: true, handler() { this.redraw(); } },
    "settings.view"() {
      this.leave();
      this.wasDrawn = false;
      this.tellLook();
    },
    "settings.x"() { this.tellLook(); },
    "settings.y"() { this.tellLook(); },
    "settings.color"() { this.tellLook(); },
    "settings.axes": { deep: true, handler() { this.tellLook(); } },
  },
  async mounted() {
    this.current = null;
    // What is new waits while somebody draws over an axis.
    this.isHeld = false;
    this.onRelease = () => {
      this.isHeld = false;
      if (this.isLate) this.redraw();
    };
    for (const name of ["pointerup", "pointercancel"]) window.addEventListener(name, this.onRelease);
    this.sizes = new ResizeObserver(() => {
      this.width = this.$refs.plot.clientWidth;
      this.chart?.resize();
      this.redraw();
    });
    this.sizes.observe(this.$refs.plot);
    this.dark = isDark();
    this.theme = new MutationObserver(() => {
      if (isDark() === this.dark) return;
      this.dark = isDark();
      this.redraw();
    });
    this.theme.observe(document.body, { attributeFilter: ["class"] });
    this.tellLook();
    // Not before it is needed: the table is there without it.
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
    this.theme.disconnect();
    for (const name of ["pointerup", "pointercancel"]) window.removeEventListener(name, this.onRelease);
    this.chart?.dispose();
  },
  methods: {
    canBeLog,
    column(name) {
      return this.explored.columns.get(name);
    },
    tellLook() {
      this.$emit("look");
    },
    isLog(name) {
      const column = this.column(name);
      if (!column || !canBeLog(column)) return false;
      if (this.settings.log.includes(name)) return true;
      return !this.settings.linear.includes(name) && isUsuallyLog(column);
    },
    toggleLog(name) {
      const wanted = !this.isLog(name);
      for (const list of ["log", "linear"]) this.settings[list] = this.settings[list].filter((one) => one !== name);
      if (wanted !== isUsuallyLog(this.column(name))) this.settings[wanted ? "log" : "linear"].push(name);
    },
    findOptions(text, update) {
      update(() => {
        const wanted = text.toLowerCase();
        const { hyperparameters, metrics, rated, every } = this.names;
        const all = [...hyperparameters, ...metrics.flatMap((name) => OF_METRIC.filter((end) => end !== ".best" || rated.includes(name)).map((end) => name + end)), ...every, "run"];
        this.options = all.filter((name) => name.toLowerCase().includes(wanted)).slice(0, MOST_OPTIONS);
      });
    },
    choose(role, name) {
      if (role === "axis") this.show(name);
      else this.settings[role] = name;
    },
    show(name) {
      if (this.isScatter) this.settings.x = name;
      else if (!this.about.axes.includes(name)) this.settings.axes = [...this.about.axes, name];
    },
    move(name, by) {
      const axes = [...this.about.axes];
      const place = axes.indexOf(name);
      if (place < 0 || place + by < 0 || place + by >= axes.length) return;
      axes.splice(place + by, 0, ...axes.splice(place, 1));
      this.settings.axes = axes;
    },
    remove(name) {
      if (this.about.axes.length < 2 || !this.about.axes.includes(name)) return;
      this.settings.axes = this.about.axes.filter((one) => one !== name);
      if (this.settings.brush.has(name)) this.setRange(name, null);
    },
    onHeadKey(event, name) {
      const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      // What is typed in the menu of an axis bubbles up to here.
      if (event.target !== event.currentTarget) return;
      if (by && event.shiftKey) {
        const head = event.currentTarget;
        this.move(name, by);
        setTimeout(() => head.focus(), 50);
      } else if (event.key === "Delete") this.remove(name);
      else return;
      event.preventDefault();
    },
    headStyle(place) {
      const step = (Math.max(this.width, 1) - 2 * SIDE_PIXELS) / Math.max(this.axisColumns.length - 1, 1);
      return { left: `${SIDE_PIXELS + place * step}px`, maxWidth: `${Math.min(step, 2 * SIDE_PIXELS) - 6}px` };
    },
    signed(value) {
      return (value < 0 ? "−" : "+") + Math.abs(value).toFixed(2);
    },
    describe(run) {
      const columns = this.isScatter ? [this.about.x, this.about.y, this.about.color].filter(Boolean).map((name) => this.column(name)) : this.axisColumns;
      return `${this.labelOf(run)} (${columns.map((column) => `${column.title} ${valueIn(column, run)}`).join(", ")})`;
    },
    labelOf(run) {
      return this.explored.runs[run].replace(/[\p{Cc}\p{Cf}]/gu, "�");
    },
    // Ranges: in the address as the values or texts at their ends, and here as places on an axis.
    placesOf(column) {
      const [from, to] = this.settings.brush.get(column.name);
      if (!isNumber(column) && column.kind !== "time") return [column.texts.indexOf(from), column.texts.indexOf(to)].map((place, end) => (place < 0 ? (end ? -1 : Infinity) : place));
      return [from === "" ? -Infinity : Number(from), to === "" ? Infinity : Number(to)];
    },
    rangeText(column) {
      if (!this.settings.brush.has(column.name)) return "";
      const [from, to] = this.settings.brush.get(column.name);
      if (column.kind === "text") return from === to ? from : `${from} – ${to}`;
      const text = (end) => (end === "" ? "…" : textOf(column, Number(end)));
      return `${text(from)} – ${text(to)}`;
    },
    typedEnd(column, end) {
      return this.settings.brush.get(column.name)?.[end === "from" ? 0 : 1] ?? column.texts[end === "from" ? 0 : column.texts.length - 1];
    },
    setTyped(column, form) {
      let ends = [form.elements.from.value.trim(), form.elements.to.value.trim()];
      if (column.kind === "text") ends.sort((one, other) => column.texts.indexOf(one) - column.texts.indexOf(other));
      else if (ends.some((end) => end !== "" && !Number.isFinite(Number(end)))) return;
      this.setRange(column.name, ends.every((end) => end === "") ? null : ends);
    },
    setRange(name, ends) {
      const brush = new Map(this.settings.brush);
      brush.delete(name);
      if (ends) brush.set(name, ends);
      this.settings.brush = brush;
      this.selectWithin();
    },
    clearRanges() {
      this.settings.brush = new Map();
      this.selectWithin();
    },
    selectWithin() {
      this.settings.runs = this.within.slice(0, MOST_SELECTED).map((run) => this.explored.runs[run]);
    },
    // Somebody has drawn over an axis, or taken such a range away.
    onBrush() {
      if (this.setting) return;
      const brush = new Map(this.settings.brush);
      this.axisColumns.forEach((column, place) => {
        const model = this.chart.getModel().getComponent("parallelAxis", place);
        const known = this.intervalOf(column);
        const drawn = (model?.activeIntervals || []).filter((one) => !known || !near(one, known)).pop();
        if (drawn) brush.set(column.name, this.endsAt(column, drawn));
        else if (!model?.activeIntervals?.length) brush.delete(column.name);
        if (brush.get(column.name) === null) brush.delete(column.name);
      });
      this.settings.brush = brush;
      this.selectWithin();
      this.redraw();
    },
    endsAt(column, [low, high]) {
      if (column.kind === "time") return [String(low / 1000), String(high / 1000)];
      if (column.kind !== "text") return [low, high].map((end) => String(Number(end.toPrecision(6))));
      const texts = column.texts.filter((_, place) => place + 0.25 >= low && place - 0.25 <= high);
      return texts.length ? [texts[0], texts[texts.length - 1]] : null;
    },
    // Where on its axis a range is drawn.
    intervalOf(column) {
      if (!this.settings.brush.has(column.name)) return null;
      let [low, high] = this.placesOf(column);
      if (column.kind === "text") [low, high] = [low - 0.4, high + 0.4];
      const axis = this.ends?.get(column.name);
      if (column.kind === "time") [low, high] = [1000 * low, 1000 * high];
      if (axis) [low, high] = [Math.max(low, axis.min), Math.min(high, axis.max)];
      return low <= high ? [low, high] : null;
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
      // A link may have ranges, and not name the runs that are within them now.
      if (!this.wasDrawn && this.within.length && !this.settings.runs.length) this.selectWithin();
      const common = {
        runs: this.drawn, selected: this.chosen, isDark: isDark(), labelOf: this.labelOf, best: this.best,
        isLog: (column) => this.isLog(column.name), tooltip: (event) => this.tooltip(this.runAt(event)),
      };
      const found = this.isScatter
        ? scatterOption({ ...common, x: this.column(this.about.x), y: this.column(this.about.y), color: this.column(this.about.color) })
        : parallelOption({ ...common, columns: this.axisColumns });
      const colored = this.column(this.isScatter ? this.about.color : this.about.y);
      this.legend = found.legend && { ...found.legend, title: colored.title };
      this.setting = true;
      this.chart.setOption(found.option, { notMerge: true });
      if (!this.isScatter) {
        this.ends = new Map(found.option.parallelAxis.map((axis) => [axis.id, axis]));
        const intervals = this.axisColumns.map((column) => [column.name, this.intervalOf(column)]).filter(([, interval]) => interval);
        for (const [name, interval] of intervals) this.chart.dispatchAction({ type: "axisAreaSelect", parallelAxisId: name, intervals: [interval] });
        // An axis does not draw what it is told so, as if somebody had drawn it, before it is drawn anew.
        if (intervals.length) {
          this.chart.setOption({});
          paintRanges(this.chart);
        }
      }
      this.setting = false;
      this.wasDrawn = true;
    },
    // The number of the run that a point or a line stands for.
    runAt({ seriesId, dataIndex, value }) {
      if (this.isScatter) return value?.[2];
      return (seriesId === "selected" ? this.chosen : this.drawn)[dataIndex];
    },
    tooltip(run) {
      if (run === undefined) return "";
      const columns = this.isScatter ? [...new Set([this.about.x, this.about.y, this.about.color].filter(Boolean))].map((name) => this.column(name)) : this.axisColumns;
      const rows = columns.map((column) => `<tr><td>${this.encode(column.title)}</td><td class="number">${this.encode(valueIn(column, run))}</td></tr>`);
      const best = run === this.best ? " · best" : "";
      return `<div class="tip"><strong>${this.encode(this.labelOf(run) + best)}</strong><table>${rows.join("")}</table></div>`;
    },
    onClick(event) {
      const run = this.runAt(event);
      if (run !== undefined) this.select(run);
    },
    select(run) {
      const name = this.explored.runs[run];
      const isOn = !this.settings.runs.includes(name);
      this.settings.runs = isOn ? [...this.settings.runs, name] : this.settings.runs.filter((one) => one !== name);
      this.spoken = `${this.labelOf(run)} ${isOn ? "selected" : "not selected"}`;
    },
    open(run) {
      if (run !== undefined) location.href = this.linkTo([this.explored.runs[run]]);
    },
    // By keys from run to run, from the left to the right, or in parallel coordinates from the best to the worst.
    onKey(event) {
      if (event.ctrlKey || event.metaKey || event.altKey || !this.drawn.length) return;
      const by = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
      if (by) {
        const column = this.column(this.isScatter ? this.about.x : this.about.y);
        const sign = !this.isScatter && column.better === "max" ? -1 : 1;
        const ordered = [...this.drawn].sort((one, other) => sign * (column.values[one] - column.values[other]) || one - other);
        const place = ordered.indexOf(this.current);
        this.current = ordered[(place < 0 ? (by > 0 ? 0 : ordered.length - 1) : place + by + ordered.length) % ordered.length];
        this.spoken = this.describe(this.current);
        this.point();
      } else if (event.key === " " && this.current !== null) this.select(this.current);
      else if (event.key === "Enter" && this.current !== null) this.open(this.current);
      else return;
      event.preventDefault();
      event.stopPropagation();
    },
    // Shows what the keys have reached.
    point() {
      if (!this.wasDrawn) return;
      const series = this.chart.getOption().series;
      for (let seriesIndex = 0; seriesIndex < series.length; seriesIndex++) {
        if (["selected", "best"].includes(series[seriesIndex].id)) continue;
        const dataIndex = this.isScatter ? series[seriesIndex].data.findIndex((one) => one[2] === this.current) : this.drawn.indexOf(this.current);
        if (dataIndex < 0) continue;
        this.chart.dispatchAction({ type: "showTip", seriesIndex, dataIndex });
        return;
      }
    },
    leave() {
      this.current = null;
      this.chart?.dispatchAction({ type: "hideTip" });
    },
    // What a test can ask: where a run is on the scatter plot, in pixels.
    placeOf(name) {
      if (!this.wasDrawn) return null;
      const run = this.explored.runs.indexOf(name);
      const point = this.chart.getOption().series?.flatMap((one) => one.data).find((one) => one[2] === run);
      return point ? this.chart.convertToPixel({ seriesIndex: 0 }, point.slice(0, 2)) : null;
    },
    // Where a value of a column is on its axis of parallel coordinates, in pixels.
    placeOn(name, value) {
      const place = this.axisColumns.findIndex((column) => column.name === name);
      const axis = this.wasDrawn && this.chart.getModel().getComponent("parallelAxis", place)?.axis;
      if (place < 0 || !axis) return null;
      const rect = axis.model.coordinateSystem.getRect();
      return [parseFloat(this.headStyle(place).left), rect.y + rect.height - axis.dataToCoord(value)];
    },
  },
};

function near([low, high], [from, to]) {
  const size = Math.max(Math.abs(from), Math.abs(to), NEAR);
  return Math.abs(low - from) <= 1e-6 * size && Math.abs(high - to) <= 1e-6 * size;
}
