// Marks in the charts of metrics: commands, checkpoints, evaluations, and where an attempt begins. They lie above a chart
// and not in it, so that a pointer reaches each. A component that mixes this in has settings, runs, hidden,
// plots and visible.
import { clockText, grouped } from "page_text";

const MOST_RUNS = 4; // of more the marks are off, unless somebody wants them
const APART = 16; // pixels between two symbols, and between two lines of one kind
const MOST_ROWS = 8;
const TIP_WIDTH = 320;
const [KIND, BATCH, SAMPLE, EPOCH, SECONDS, TIME, TEXT] = [0, 1, 2, 3, 4, 5, 6];
const COLUMNS = { batch: BATCH, sample: SAMPLE, epoch: EPOCH, time: SECONDS };
// In a box of 10 by 10; where there is no room for all, that which comes first here keeps its place.
const SYMBOLS = {
  __proto__: null,
  attempt: "M5 1.5a3.5 3.5 0 1 0 3.5 3.5h-1.4a2.1 2.1 0 1 1-2.1-2.1v1.6l2.6-2.3-2.6-2.2z",
  stop: "M2.2 2.2h5.6v5.6h-5.6z",
  pause: "M2.5 2h1.8v6h-1.8zM5.7 2h1.8v6h-1.8z",
  resume: "M3 1.8l5 3.2-5 3.2z",
  set: "M1.5 2.6h7v1.3h-7zM1.5 6.1h7v1.3h-7zM5.6 1.6h1.6v3.3h-1.6zM2.6 5.1h1.6v3.3h-1.6z",
  command: "M2 1.6l3.4 3.4-3.4 3.4-1-1 2.4-2.4-2.4-2.4zM5.2 7.2h3.8v1.3h-3.8z",
  checkpoint: "M4.3 1h1.4v3.6h1.8l-2.5 2.7-2.5-2.7h1.8zM2 8h6v1.3h-6z",
  evaluation: "M1.4 5.2l1-1 1.8 1.8 3.6-4 1 1-4.6 5z",
};
const KINDS = Object.keys(SYMBOLS);
export const FAINT = ["evaluation", "checkpoint"]; // what comes again and again

export const MARKS_SWITCH = `<q-toggle v-model="marksOn" label="marks" title="Commands, checkpoints, evaluations, attempts"></q-toggle>`;

export const MARKS_TIP = `
  <div v-if="markTip" id="mark-tip" class="mark-tip" role="tooltip" :style="{left: markTip.left + 'px', top: markTip.top + 'px'}">
    <div v-for="(row, place) in markTip.rows" :key="place">
      <div class="what"><span v-if="row.run" class="dot" :style="{background: row.color}" aria-hidden="true"></span>{{ row.run }}{{ row.text }}</div>
      <div class="when">{{ row.when }}</div>
    </div>
    <div v-if="markTip.more" class="when">and {{ markTip.more }} more</div>
  </div>`;

export const marked = {
  data: () => ({ markTip: null }),
  computed: {
    marksOn: {
      get() {
        const shown = this.runs.filter((run) => !this.hidden[run.id]);
        return this.settings.marks ?? (shown.length <= MOST_RUNS && !shown.some((run) => run.isGroup));
      },
      set(isOn) {
        this.settings.marks = isOn;
      },
    },
  },
  watch: {
    marksOn() {
      this.tell();
      this.layAllMarks();
    },
  },
  created() {
    this.marks = new Map(); // run -> [kind, its place on each axis, when, text]
  },
  methods: {
    takeMarks(news) {
      for (const { r, a, m } of news || []) this.marks.set(r, a ? (this.marks.get(r) || []).concat(m) : m);
    },
    // Where the horizontal axis of a chart is, and which part of it is shown.
    layMarks(plot, option) {
      const { startValue: low, endValue: high } = option.dataZoom[0];
      const { left, right } = option.grid;
      plot.area = { left, width: plot.element.clientWidth - left - right, low, high };
      this.showMarks(plot);
    },
    // While somebody zooms, another part is shown of the same axis.
    moveMarks(plot, [low, high]) {
      if (!plot.area) return;
      plot.area = { ...plot.area, low, high };
      this.showMarks(plot);
    },
    layAllMarks() {
      this.plots.forEach((plot, id) => plot.area && this.visible.has(id) && this.showMarks(plot));
    },
    // The marks in the part of a chart that is shown, by their place in pixels.
    marksIn(plot) {
      if (!this.marksOn || plot.kind === "phases") return [];
      const { left, width, low, high } = plot.area;
      const column = COLUMNS[this.settings.x];
      const found = [];
      for (const run of this.runs) {
        if (this.hidden[run.id]) continue;
        for (const mark of this.marks.get(run.id) || []) {
          const at = mark[column];
          if (at >= low && at <= high) found.push({ run, mark, at, pixel: left + ((at - low) / (high - low || 1)) * width });
        }
      }
      return found.sort((one, other) => one.pixel - other.pixel);
    },
    showMarks(plot) {
      const box = plot.element.parentElement.querySelector(".marks");
      const found = this.marksIn(plot);
      box.querySelectorAll(".mark-line").forEach((line) => line.remove());
      const lines = new Map();
      for (const one of withoutCrowds(found)) {
        const pixel = one.pixel.toFixed(0);
        if (!lines.has(pixel)) lines.set(pixel, []);
        lines.get(pixel).push(one);
      }
      for (const [pixel, marks] of lines) {
        const line = box.appendChild(document.createElement("span"));
        line.className = marks.every(({ mark }) => FAINT.includes(mark[KIND])) ? "mark-line faint" : "mark-line";
        line.style.cssText = `left: ${pixel}px; --run: ${this.markColor(marks)}`;
      }
      const known = new Map([...box.querySelectorAll(".chart-mark")].map((symbol) => [symbol.dataset.key, symbol]));
      const groups = together(found);
      groups.forEach((group, place) => {
        const [{ run, mark, pixel }] = group;
        const key = `${run.id}/${mark[KIND]}/${mark[BATCH]}/${mark[TIME]}`;
        const symbol = known.get(key) || this.markSymbol(key);
        known.delete(key);
        const said = `${group.length}/${group.at(-1).mark[TIME]}/${this.markColor(group)}`;
        if (symbol.dataset.said !== said) {
          symbol.dataset.said = said;
          symbol.innerHTML = `<svg viewBox="0 0 10 10" aria-hidden="true"><path d="${SYMBOLS[mark[KIND]] || SYMBOLS.command}"></path></svg>`;
          symbol.style.setProperty("--run", this.markColor(group));
          symbol.ariaLabel = this.rowsOf(group).map((row) => `${row.run}${row.text}, ${row.when}`).join("; ");
        }
        symbol.marked = group;
        symbol.style.left = `${pixel.toFixed(1)}px`;
        if (box.children[place] !== symbol) box.insertBefore(symbol, box.children[place] || null);
      });
      known.forEach((symbol) => {
        if (symbol === this.tipOf) this.hideTip();
        symbol.remove();
      });
    },
    // What is of several runs has no run's colour.
    markColor(marks) {
      const [{ run }] = marks;
      return marks.every((one) => one.run === run) ? run.color : "var(--ink-soft)";
    },
    markSymbol(key) {
      const symbol = document.createElement("span");
      symbol.role = "img";
      symbol.className = "chart-mark";
      symbol.dataset.key = key;
      for (const name of ["pointerenter", "click"]) symbol.addEventListener(name, () => this.showTip(symbol));
      symbol.addEventListener("pointerleave", () => this.hideTip());
      return symbol;
    },
    rowsOf(group) {
      return group.slice(0, MOST_ROWS).map(({ run, mark }) => ({
        run: this.runs.length > 1 ? `${run.label}: ` : "",
        color: run.color,
        text: mark[TEXT],
        when: `${this.markPlace(mark)} · ${timeText(mark[TIME])}`,
      }));
    },
    markPlace(mark) {
      const axis = this.settings.x;
      if (axis === "time") return `batch ${grouped(mark[BATCH])} · ${clockText(mark[SECONDS], 0.1)}`;
      const own = axis === "batch" ? "" : ` · ${axis} ${grouped(Number(mark[COLUMNS[axis]].toPrecision(6)))}`;
      return `batch ${grouped(mark[BATCH])}${own}`;
    },
    showTip(symbol) {
      const rect = symbol.getBoundingClientRect();
      const left = Math.max(Math.min(rect.left - 8, window.innerWidth - TIP_WIDTH - 12), 8);
      this.tipOf = symbol;
      this.markTip = {
        rows: this.rowsOf(symbol.marked), more: Math.max(symbol.marked.length - MOST_ROWS, 0), left, top: rect.bottom + 6,
      };
    },
    hideTip() {
      this.tipOf = this.markTip = null;
    },
    // What a test or a reader of the page can ask: kind, place on the axis and pixels of each mark of a chart.
    marksOf(id) {
      const plot = this.plots.get(id);
      return plot?.area ? this.marksIn(plot).map(({ run, mark, at, pixel }) => ({ run: run.id, kind: mark[KIND], at, pixel })) : [];
    },
  },
};

// Of marks of one kind those that are far enough from one another; `found` is in order.
export function withoutCrowds(found) {
  const last = new Map();
  return found.filter(({ run, mark, pixel }) => {
    const kind = `${run.id} ${mark[KIND]}`;
    if (pixel - (last.get(kind) ?? -APART) < APART) return false;
    last.set(kind, pixel);
    return true;
  });
}

// The marks that share a symbol, each time with that first whose place and kind it has.
function together(found) {
  const groups = [];
  for (const kind of KINDS) {
    for (const one of found) {
      if ((SYMBOLS[one.mark[KIND]] ? one.mark[KIND] : "command") !== kind) continue;
      const near = groups.find(([first]) => Math.abs(first.pixel - one.pixel) < APART);
      if (near) near.push(one);
      else groups.push([one]);
    }
  }
  return groups.sort(([one], [other]) => one.pixel - other.pixel);
}

function timeText(seconds) {
  const time = new Date(1000 * seconds);
  const day = time.toDateString() === new Date().toDateString() ? {} : { month: "short", day: "numeric" };
  return time.toLocaleString("en-GB", { ...day, hour: "2-digit", minute: "2-digit", second: "2-digit" });
}
