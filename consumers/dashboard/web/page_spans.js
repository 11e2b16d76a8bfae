// The spans of a run's own: lanes for each rank, inner spans below outer ones. Asked for while on the screen.
import { grouped, secondsText } from "page_text";
import { watched } from "page_theme";
import { markRaw } from "vue";

const LOOK_MS = 1000;
const MOST = 20000; // spans of a run
const MOST_DRAWN = 3000;
const LANE = 19; // pixels
const GAP = 24; // above the lanes of a process, for its name
const SECONDS = 30; // shown at first
const [SHORTEST, LONGEST] = [1e-4, 1e6];
const COLORS = 8;
const CLOCKS = 1e-3; // spans are timed by another clock than events: one may seem to begin before the last ended

export default /** @type {Component} */ ({
  template: `
    <div class="spans">
      <div class="tables-bar">
        <label v-if="runs.length > 1">run <select v-model="run" @change="restart()"><option v-for="[label], number in runs" :key="number" :value="number">{{ label }}</option></select></label>
        <span class="soft" role="status">{{ summary }}</span>
        <button v-if="end !== null" type="button" class="tables-plain" @click="end = null">newest</button>
        <span class="spread"></span><span v-if="spans.length" class="soft">{{ secondsText(width) }} across · drag to move, Ctrl and the wheel to zoom</span>
      </div>
      <div v-if="spans.length" class="spans-plot" ref="plot" role="img" :aria-label="summary" tabindex="0" @keydown="onKey($event)" @wheel="onWheel($event)"
           @pointerdown="held = [$event.clientX, end ?? plan.last]" @pointermove="onMove($event)" @pointerup="held = null" @pointerleave="held = null">
        <div :style="{height: plan.height + 'px'}">
          <b v-for="[rank, top] in plan.tops" :key="rank" :style="{top: top + 'px'}">{{ runs[run][3][rank] ?? "rank " + rank }}</b>
          <i v-for="span in drawn" :key="span.number" :style="styleOf(span)" :title="[span.name + '  ' + secondsText(span.seconds), span.text].join('\\n')">{{ span.name }} {{ secondsText(span.seconds) }}</i>
        </div>
      </div>
      <table v-if="names.length" aria-label="Spans by name">
        <thead><tr><th v-for="head in ['span', 'count', 'mean', 'longest', 'together']" :key="head" scope="col">{{ head }}</th></tr></thead>
        <tbody><tr v-for="one in names" :key="one.name"><td><span class="dot" :style="{background: colorOf(one.name)}"></span>{{ one.name }}</td>
          <td>{{ grouped(one.count) }}</td><td>{{ secondsText(one.sum / one.count) }}</td><td>{{ secondsText(one.longest) }}</td><td>{{ secondsText(one.sum) }}</td></tr></tbody>
      </table>
    </div>`,
  mixins: [watched],
  props: { runs: { type: Array, default: () => [] } },
  data: () => ({ run: 0, spans: markRaw([]), names: [], plan: null, problem: "", chosen: null, end: null, held: null }),
  computed: {
    summary() {
      if (!this.spans.length) return this.problem || "Spans of the training appear here while this is open; its events are in the list above.";
      return [`${grouped(this.spans.length)} spans`, this.problem].filter(Boolean).join(", ");
    },
    width() {
      return this.chosen ?? Math.min(Math.max(this.plan.last - this.plan.first, SHORTEST), SECONDS);
    },
    from() {
      return (this.end ?? this.plan.last) - this.width;
    },
    drawn() {
      return this.spans.filter(({ began, seconds }) => began < this.from + this.width && began + seconds > this.from).slice(-MOST_DRAWN);
    },
  },
  created() {
    this.colors = new Map(); // by the name, in the order of coming
  },
  methods: {
    grouped,
    secondsText,
    restart() {
      Object.assign(this, { spans: markRaw([]), names: [], end: null, chosen: null });
      this.look();
    },
    async look() {
      const before = this.spans;
      const found = await this.answerOf(`${this.runs[this.run]?.[2]}spans?after=${before.at(-1)?.number || 0}`);
      if (before !== this.spans) return;
      this.problem = found?.problem || "";
      if (found?.spans.length) this.take(found.spans);
      this.lookAgain(found?.spans.length > 1000 ? 0 : LOOK_MS);
    },
    take(rows) {
      const added = rows.map(([number, rank, began, seconds, id, parent, name, text]) => ({ number, rank, began, seconds, id, parent, name, text }));
      const spans = this.spans.concat(added).slice(-MOST);
      const names = new Map();
      for (const { name, seconds } of spans) {
        const one = names.get(name) || { name, count: 0, sum: 0, longest: 0 };
        names.set(name, Object.assign(one, { count: one.count + 1, sum: one.sum + seconds, longest: Math.max(one.longest, seconds) }));
      }
      this.names = [...names.values()].sort((one, other) => other.sum - one.sum).slice(0, 20);
      this.plan = markRaw(lanesOf(spans));
      this.spans = markRaw(spans);
    },
    colorOf(name) {
      if (!this.colors.has(name)) this.colors.set(name, this.colors.size % COLORS);
      return `var(--run-${this.colors.get(name)})`;
    },
    styleOf({ began, seconds, top, name }) {
      const left = Math.max(began, this.from);
      const share = (length) => `${(100 * length) / this.width}%`;
      return { left: share(left - this.from), width: share(began + seconds - left), top: `${top}px`, background: this.colorOf(name) };
    },
    move(end, width = this.width) {
      this.chosen = Math.min(Math.max(width, SHORTEST), LONGEST);
      this.end = end >= this.plan.last ? null : Math.max(end, this.plan.first);
    },
    zoom(factor, at = 0.5) {
      this.move(this.from + at * this.width + (1 - at) * this.width * factor, this.width * factor);
    },
    onWheel(event) {
      if (!event.ctrlKey) return;
      event.preventDefault();
      const box = this.$refs.plot.getBoundingClientRect();
      this.zoom(event.deltaY > 0 ? 1.25 : 0.8, (event.clientX - box.left) / box.width);
    },
    onKey(event) {
      const by = { ArrowLeft: -0.25, ArrowRight: 0.25 }[event.key];
      const factor = { "+": 0.5, "-": 2 }[event.key];
      if (by) this.move((this.end ?? this.plan.last) + by * this.width);
      else if (factor) this.zoom(factor);
      else return;
      event.preventDefault();
    },
    onMove(event) {
      if (this.held) this.move(this.held[1] - ((event.clientX - this.held[0]) / this.$refs.plot.clientWidth) * this.width);
    },
    // For tests.
    told() {
      return this.spans.map(({ name, rank, top }) => [name, rank, top]);
    },
  },
});

// Gives each span its `top`. One within another is below it; those at the same time, of threads, are in further lanes.
function lanesOf(spans) {
  const tops = [];
  let height = 0;
  let [first, last] = [Infinity, -Infinity];
  for (const rank of [...new Set(spans.map((span) => span.rank))].sort((one, other) => one - other)) {
    const lanes = new Map(); // id of a span -> its lane
    const free = []; // by lane, the end of its last span
    tops.push([rank, height]);
    for (const span of spans.filter((one) => one.rank === rank).sort((one, other) => one.id - other.id)) {
      let lane = lanes.has(span.parent) ? lanes.get(span.parent) + 1 : 0;
      while (free[lane] > span.began + CLOCKS) lane++;
      lanes.set(span.id, lane);
      free[lane] = span.began + span.seconds;
      span.top = height + GAP + lane * LANE;
      [first, last] = [Math.min(first, span.began), Math.max(last, free[lane])];
    }
    height += GAP + free.length * LANE + 6;
  }
  return { tops, height, first, last };
}
