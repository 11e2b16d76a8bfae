// The tables of runs. Rows come in windows, from the addresses of the server, while the panel is on the screen.
import { grouped, valueText } from "page_text";
import { watched } from "page_theme";
import { markRaw } from "vue";

const LOOK_MS = 1000;
const REST_MS = 4000;
const SETTLE_MS = 250;
const ROW = 30; // pixels
const ROW_WITH_IMAGE = 58;
const PAGE = 100; // rows asked for at once
const MOST_PAGES = 60;
const AT_ONCE = 2; // requests of pages
const SPARE = 8; // rows beyond each edge
const SHORT = 30; // characters of a text that needs no line of its own
const IMAGE = 4; // kinds of cells, as bits
const [NUMBER, TEXT] = [1, 2];
const FIXED = 5; // columns that all tables have, and the first of these that an opened row has below its own
const BELOW = 2;

export default /** @type {Component} */ ({
  template: `
    <div class="tables">
      <p v-if="!table" class="soft tables-note">{{ problem || (isBehind ? "Reading the tables" : "No table has rows.") }}</p>
      <template v-else>
      <div class="tables-bar">
        <div class="tables-names" role="group" aria-label="Table">
          <button v-for="one in tables" :key="one.name" type="button" :aria-pressed="String(one.name === table.name)" @click="choose(one.name)">
            {{ one.name }} <span class="soft">{{ grouped(one.rows) }}</span></button>
        </div>
        <input v-model="find" type="search" class="tables-find" placeholder="search all texts" aria-label="Search all texts" @input="searchSoon()">
        <div v-if="hasSteps" class="tables-steps" role="group" aria-label="Steps"><span>steps</span>
          <span class="tables-range"><i :style="rangeStyle"></i>
            <input v-for="end in ['min', 'max']" :key="end" v-model.number="steps[end]" type="range" :min="table.steps[0]" :max="table.steps[1]"
                   :aria-label="end === 'min' ? 'First step' : 'Last step'" @change="search()"></span>
          <span class="tables-ends">{{ grouped(range[0]) }} – {{ grouped(range[1]) }}</span></div>
        <button type="button" class="tables-plain" aria-haspopup="menu">columns<q-menu class="chart-menu">
          <div class="tables-menu" role="group" aria-label="Shown columns">
            <label v-for="[key, name] in columns" :key="key"><input type="checkbox" :checked="isShown(key)" @change="toggle(key)"> {{ name }}</label>
          </div></q-menu></button>
      </div>
      <div class="tables-chips" v-if="filters.length || newer || notes">
        <span v-for="(one, place) in filters" :key="place" class="tables-chip">{{ textOf(one) }}
          <button type="button" :aria-label="'Remove the filter ' + textOf(one)" @click="unfilter(place)">✕</button></span>
        <button v-if="newer" type="button" class="tables-newer" @click="showNew()">{{ grouped(newer) }} new rows</button>
        <span class="soft">{{ notes }}</span>
      </div>
      <div :class="['tables-split', {open: opened}]">
        <div class="tables-list">
          <div class="tables-scroll" ref="scroll" tabindex="0" role="table" :aria-label="'Table ' + table.name" :aria-rowcount="total + 1"
               @scroll.passive="onScroll()" @keydown="onKey($event)">
            <div class="tables-head" role="row" :style="layout">
              <div v-for="[key, name, kinds] in shownColumns" :key="key" role="columnheader" :class="{number: isNumber(key, kinds)}" :aria-sort="sortOf(key)">
                <button type="button" aria-haspopup="dialog" :title="name">{{ name }}<span v-if="sort === key" aria-hidden="true">{{ descending ? " ↓" : " ↑" }}</span>
                <q-menu class="chart-menu" @before-show="measure(key)"><div class="tables-column">
                  <div class="tables-line">
                    <button type="button" class="tables-plain" v-close-popup @click="order(key, false)">↑ ascending</button>
                    <button type="button" class="tables-plain" v-close-popup @click="order(key, true)">↓ descending</button>
                    <button type="button" class="tables-plain" v-close-popup @click="toggle(key)">hide</button>
                  </div>
                  <div v-if="key === 'run'" class="tables-line">
                    <button v-for="(run, number) in runs" :key="number" type="button" class="tables-plain" v-close-popup
                            @click="filter({column: key, low: number, high: number})"><span class="dot" :style="{background: run[1]}" aria-hidden="true"></span>{{ run[0] }}</button>
                  </div>
                  <form v-else class="tables-line" @submit.prevent="filterBy(key, kinds, $event.target)">
                    <template v-if="kinds & 1"><input name="low" type="number" step="any" placeholder="from" :aria-label="name + ' from'">
                      <input name="high" type="number" step="any" placeholder="to" :aria-label="name + ' to'"></template>
                    <input v-if="kinds & 2" name="contains" placeholder="contains" :aria-label="name + ' contains'">
                    <button v-if="kinds & 3" type="submit" class="tables-plain" v-close-popup>filter</button>
                  </form>
                  <p v-if="!values" class="soft">Counting</p>
                  <template v-else-if="key !== 'run'">
                    <figure v-if="values.numbers" class="tables-bars">
                      <div role="img" :aria-label="'Distribution of ' + name + ' from ' + number(values.low) + ' to ' + number(values.high)">
                        <i v-for="(count, bar) in values.bars" :key="bar" :style="{height: share(count, values.bars)}" :title="barText(bar)"></i></div>
                      <figcaption><span>{{ number(values.low) }}</span><span class="soft">mean {{ number(values.mean) }}</span><span>{{ number(values.high) }}</span></figcaption>
                    </figure>
                    <ol v-if="values.texts.length" class="tables-texts" :aria-label="'Most frequent of ' + grouped(values.distinct) + ' texts'">
                      <li v-for="[row, text, count] in values.texts" :key="row">
                        <button type="button" v-close-popup @click="same(key, row, text)"><i :style="{width: share(count, [values.texts[0][2]])}"></i>
                          <span>{{ text }}</span><b>{{ grouped(count) }}</b></button></li>
                    </ol>
                  </template>
                </div></q-menu></button>
              </div>
            </div>
            <div class="tables-space" :style="{height: total * rowHeight + 'px'}">
              <div class="tables-rows" :style="{transform: 'translateY(' + first * rowHeight + 'px)'}" role="rowgroup">
                <div v-for="(row, place) in shown" :key="place" role="row" :aria-rowindex="first + place + 2" :style="[layout, {height: rowHeight + 'px'}]"
                     :class="['tables-row', {chosen: opened && row && row[0] === opened.id}]" @click="row && open(row[0], first + place)">
                  <div v-for="(column, at) in shownColumns" :key="column[0]" role="cell" :class="{number: isNumber(column[0], column[2])}">
                    <template v-if="!row">…</template>
                    <template v-else-if="Array.isArray(row[at + 1])"><img v-for="hash in row[at + 1].slice(0, 4)" :key="hash" :src="imageAt(row.run, hash)" loading="lazy" alt=""></template>
                    <template v-else-if="column[0] === 'run'"><span class="dot" :style="{background: runs[row[at + 1]]?.[1]}" aria-hidden="true"></span>{{ runs[row[at + 1]]?.[0] }}</template>
                    <template v-else>{{ cellText(column[0], row[at + 1], row.run) }}</template>
                  </div>
                </div>
              </div>
            </div>
          </div>
          <p class="soft tables-count" role="status">{{ countText }}</p>
        </div>
        <section v-if="opened" class="tables-detail" ref="detail" :aria-label="'Row of step ' + opened.cells[1]">
          <header>
            <b>step {{ grouped(opened.cells[1]) }}</b>
            <label v-if="runs.length > 1" class="tables-other">beside
              <select :value="otherRun ?? ''" @change="compare($event.target.value)"><option value="">no other run</option>
                <option v-for="[number, label] in otherRuns" :key="number" :value="number">{{ label }}</option></select></label>
            <span class="spread"></span>
            <button type="button" class="tables-plain" :disabled="!opened.place" @click="step(-1)" aria-label="Row above">↑</button>
            <button type="button" class="tables-plain" :disabled="opened.place + 1 >= total" @click="step(1)" aria-label="Row below">↓</button>
            <button type="button" class="tables-plain" @click="opened = null" aria-label="Close the row">✕</button>
          </header>
          <div v-if="opened.isCompared" class="tables-pair tables-sides">
            <span><span class="dot" :style="{background: runs[opened.cells[0]]?.[1]}" aria-hidden="true"></span>{{ runs[opened.cells[0]]?.[0] }}</span>
            <span v-if="opened.other"><span class="dot" :style="{background: runs[opened.other[0]]?.[1]}" aria-hidden="true"></span>{{ runs[opened.other[0]]?.[0] }}, step {{ grouped(opened.other[1]) }}</span>
            <span v-else class="soft">{{ runs[otherRun]?.[0] }} has no row with this {{ nameOf(byColumn) }}</span>
          </div>
          <div class="tables-cells"><div v-for="[key, name, kinds, , place] in ownColumns" :key="key" :class="['tables-cell', {short: isShort(place)}]">
            <h4>{{ name }}<button v-if="kinds & 2 && opened.cells[place] !== null" type="button" class="tables-same" @click="same(key, opened.id, opened.cells[place])"
                :title="'All rows with this ' + name">over steps</button></h4>
            <div :class="{'tables-pair': opened.isCompared}">
              <template v-for="(cells, side) in sidesOf(opened)" :key="side">
                <div v-if="cells && Array.isArray(cells[place])" class="tables-images"><img v-for="hash in cells[place]" :key="hash" :src="imageAt(cells[0], hash)" :alt="'Image of ' + name"></div>
                <pre v-else-if="cells && cells[place] !== null" :title="isShort(place) ? String(cells[place]) : null">{{ cellText(key, cells[place], cells[0], 6) }}</pre>
                <span v-else class="soft">–</span>
              </template>
            </div>
          </div></div>
        </section>
      </div>
      </template>
    </div>`,
  mixins: [watched],
  props: { runs: { type: Array, default: () => [] } },
  data: () => ({
    tables: [], isBehind: true, problem: "", leftOut: 0,
    name: "",
    find: "",
    steps: { min: 0, max: 0 },
    filters: [],
    sort: "", descending: false,
    until: 0, // the newest of the searched rows
    chosen: new Map(), // table and column -> shown or not
    total: 0,
    first: 0, shown: [],
    opened: null, // {id, place, cells, isCompared, other}
    otherRun: null,
    values: null, // distribution of the column whose menu is open
  }),
  computed: {
    table() {
      return this.tables.find((one) => one.name === this.name) || this.tables[0];
    },
    columns() {
      return this.table?.columns.filter(([key]) => key !== "run" || this.runs.length > 1) || [];
    },
    shownColumns() {
      return this.columns.filter(([key]) => this.isShown(key));
    },
    // With the places of cells in a whole row.
    ownColumns() {
      const columns = this.table.columns.map((column, place) => [...column, place]);
      return [...columns.slice(FIXED), ...columns.slice(BELOW, FIXED)];
    },
    layout() {
      // The head and the rows are grids of their own: the same widths, whatever is in them.
      const widths = this.shownColumns.map(([key, , kinds, longest]) => (key === "step" ? [72, 0] : key === "run" || key === "time" ? [150, 0] : kinds & TEXT && longest >= SHORT ? [170, 4] : [kinds & IMAGE ? 120 : 96, 1]));
      const columns = widths.map(([least, share]) => (share ? `minmax(${least}px, ${share}fr)` : `${least}px`));
      return { gridTemplateColumns: columns.join(" "), minWidth: `${widths.reduce((sum, [least]) => sum + least, 0)}px` };
    },
    rowHeight() {
      return this.shownColumns.some(([, , kinds]) => kinds & IMAGE) ? ROW_WITH_IMAGE : ROW;
    },
    hasSteps() {
      return this.table.steps && this.table.steps[0] < this.table.steps[1];
    },
    // The ends may have been moved past each other.
    range() {
      return [Math.min(this.steps.min, this.steps.max), Math.max(this.steps.min, this.steps.max)];
    },
    rangeStyle() {
      const [low, high] = this.table.steps;
      const [left, right] = this.range.map((step) => (100 * (step - low)) / (high - low));
      return { left: `${left}%`, right: `${100 - right}%` };
    },
    newer() {
      return this.table.rows - this.until;
    },
    notes() {
      return [this.problem, this.leftOut && `${grouped(this.leftOut)} rows are left out: beyond the limits`].filter(Boolean).join(" · ");
    },
    countText() {
      const all = grouped(this.until);
      return `${this.total === this.until ? all : `${grouped(this.total)} of ${all}`} rows${this.isBehind ? " so far" : ""}`;
    },
    otherRuns() {
      return this.runs.map(([label], number) => [number, label]).filter(([number]) => number !== this.opened.cells[0]);
    },
    // The column that a row of another run has in common.
    byColumn() {
      const chosen = this.filters.find((one) => one.row !== undefined)?.column;
      return chosen || this.ownColumns.find(([, , kinds]) => kinds & TEXT)?.[0] || "step";
    },
  },
  watch: {
    layout() {
      this.$nextTick(() => this.restart());
    },
    runs() {
      this.look();
    },
  },
  created() {
    this.pages = new Map(); // page -> rows; not reactive
    this.asked = new Set();
    this.searches = 0;
  },
  beforeUnmount() {
    clearTimeout(this.settling);
  },
  methods: {
    grouped,
    number,
    ask(question) {
      return this.answerOf(`${this.runs[0]?.[2]}tables?ask=${encodeURIComponent(JSON.stringify(question))}`);
    },
    // While it is on the screen: the server reads so long.
    async look() {
      const answer = await this.ask({});
      if (answer) this.take(answer.state);
      this.lookAgain(this.isBehind ? LOOK_MS : REST_MS);
    },
    take(state) {
      const had = this.table?.steps;
      Object.assign(this, { tables: state.tables, isBehind: state.isBehind, problem: state.problem, leftOut: state.leftOut });
      if (!this.table) return;
      const { steps } = this.table;
      if (!had) this.steps = { min: steps[0], max: steps[1] };
      else this.steps = { min: this.steps.min === had[0] ? steps[0] : this.steps.min, max: this.steps.max === had[1] ? steps[1] : this.steps.max };
      // Rows do not move while somebody reads further down.
      if (this.newer && !this.opened && !(this.$refs.scroll?.scrollTop > 0)) this.showNew();
    },
    choose(name) {
      Object.assign(this, { name, filters: [], sort: "", find: "", opened: null });
      this.steps = { min: this.table.steps[0], max: this.table.steps[1] };
      this.showNew();
    },
    showNew() {
      this.until = this.table.rows;
      this.search();
    },
    searchSoon() {
      clearTimeout(this.settling);
      this.settling = setTimeout(() => this.search(), SETTLE_MS);
    },
    search() {
      if (this.$refs.scroll) this.$refs.scroll.scrollTop = 0;
      this.restart();
    },
    restart() {
      if (!this.table) return;
      this.searches++;
      this.asked.clear();
      this.isFresh = true; // old rows stay until new ones are there
      this.load(Math.floor(this.firstSeen() / PAGE));
    },
    searched() {
      const { find, sort, descending, until } = this;
      const filters = this.filters.map(({ text, ...one }) => one);
      const { steps } = this.table;
      const [low, high] = this.range;
      if (low > steps[0] || high < steps[1]) filters.push({ column: "step", low, high });
      return { table: this.table.name, find, filters, sort, descending, until };
    },
    async load(page) {
      if (this.asked.has(page) || this.asked.size - this.pages.size >= AT_ONCE) return;
      const own = this.searches;
      this.asked.add(page);
      const columns = this.shownColumns.map(([key]) => key);
      const answer = await this.ask({ search: this.searched(), first: page * PAGE, count: PAGE, columns: ["run", ...columns] });
      if (own !== this.searches) return;
      if (this.isFresh) this.pages.clear();
      this.isFresh = false;
      if (!answer) {
        this.asked.delete(page);
        return;
      }
      // The run of a row is kept beside its id.
      this.pages.set(page, answer.rows.map(([id, run, ...cells]) => Object.assign([id, ...cells], { run })));
      if (this.pages.size > MOST_PAGES) {
        const oldest = this.pages.keys().next().value;
        this.pages.delete(oldest);
        this.asked.delete(oldest);
      }
      this.total = answer.total;
      this.paint();
    },
    firstSeen() {
      return Math.max(Math.floor((this.$refs.scroll?.scrollTop || 0) / this.rowHeight) - SPARE, 0);
    },
    onScroll() {
      if (this.firstSeen() !== this.first) this.paint();
    },
    paint() {
      const height = this.$refs.scroll?.clientHeight || 0;
      const first = Math.max(Math.min(this.firstSeen(), this.total - 1), 0);
      const last = Math.min(first + Math.ceil(height / this.rowHeight) + 2 * SPARE, this.total);
      const rows = [];
      for (let place = first; place < last; place++) rows.push(this.pages.get(Math.floor(place / PAGE))?.[place % PAGE] || null);
      this.first = first;
      this.shown = markRaw(rows);
      // The middle first: the edges may be on other pages.
      for (const place of [(first + last) >> 1, first, last - 1]) if (place >= 0 && place < this.total) this.load(Math.floor(place / PAGE));
    },
    isShown(key) {
      return this.chosen.get(`${this.table.name} ${key}`) ?? !["time", "rank", "attempt"].includes(key);
    },
    toggle(key) {
      this.chosen.set(`${this.table.name} ${key}`, !this.isShown(key));
    },
    isNumber: (key, kinds) => kinds === NUMBER && key !== "run",
    sortOf(key) {
      return this.sort !== key ? "none" : this.descending ? "descending" : "ascending";
    },
    order(sort, descending) {
      Object.assign(this, { sort, descending });
      this.search();
    },
    filter(one) {
      this.filters = [...this.filters.filter(({ column }) => column !== one.column), one];
      this.search();
    },
    filterBy(column, kinds, form) {
      const given = Object.fromEntries(new FormData(form));
      const one = { column };
      for (const end of ["low", "high"]) if (given[end]) one[end] = Number(given[end]);
      if (given.contains) one.contains = given.contains;
      if (Object.keys(one).length > 1) this.filter(one);
    },
    // All rows with the value of one, over the steps.
    same(column, row, text) {
      Object.assign(this, { sort: "step", descending: false });
      this.filter({ column, row, text: String(text) });
    },
    unfilter(place) {
      this.filters = this.filters.filter((_, at) => at !== place);
      this.search();
    },
    nameOf(key) {
      return this.table.columns.find((one) => one[0] === key)?.[1];
    },
    textOf({ column, low, high, contains, text }) {
      if (column === "run") return `run ${this.runs[low]?.[0]}`;
      const parts = [text, contains && `contains ${contains}`, low !== undefined && `from ${number(low)}`, high !== undefined && `to ${number(high)}`];
      return `${this.nameOf(column)}: ${parts.filter(Boolean).join(", ").slice(0, 80)}`;
    },
    async measure(column) {
      this.values = null;
      const answer = await this.ask({ search: this.searched(), distribution: column });
      this.values = answer && markRaw(answer.distribution);
    },
    share: (count, of) => `${(100 * count) / Math.max(...of)}%`,
    barText(bar) {
      const { low, high, bars } = this.values;
      const [from, to] = [bar, bar + 1].map((end) => number(low + ((high - low) * end) / bars.length));
      return `${from} to ${to}: ${grouped(bars[bar])} rows`;
    },
    cellText(key, value, run, digits) {
      if (typeof value !== "number") return value;
      // An actor has a name.
      if (key === "rank") return this.runs[run]?.[3][value] ?? value;
      return key === "time" ? new Date(1000 * value).toLocaleString("en-GB", { dateStyle: "short", timeStyle: "medium" }) : number(value, digits);
    },
    imageAt(run, hash) {
      return `${this.runs[0][2]}cell?run=${run}&image=${hash}`;
    },
    async open(id, place) {
      this.opening = id;
      const run = this.otherRun;
      const beside = run === null ? null : [run, this.byColumn];
      const answer = await this.ask({ table: this.table.name, row: id, beside });
      if (!answer?.row.length || this.opening !== id) return;
      this.opened = markRaw({ id, place, cells: answer.row, isCompared: run !== null && run !== answer.row[0], other: answer.beside });
      this.$nextTick(() => this.paint());
    },
    sidesOf({ cells, other, isCompared }) {
      return isCompared ? [cells, other] : [cells];
    },
    isShort(place) {
      return this.sidesOf(this.opened).every((cells) => !cells || (!Array.isArray(cells[place]) && String(cells[place]).length < SHORT));
    },
    compare(number) {
      this.otherRun = number === "" ? null : Number(number);
      this.open(this.opened.id, this.opened.place);
    },
    onKey(event) {
      const by = { ArrowDown: 1, ArrowUp: -1 }[event.key];
      if (by && this.opened) this.step(by);
      else if (event.key === "Enter" && !this.opened && this.total) this.step(1, -1);
      else if (event.key === "Escape") this.opened = null;
      else return;
      event.preventDefault();
    },
    step(by, from = this.opened.place) {
      const place = from + by;
      const row = this.pages.get(Math.floor(place / PAGE))?.[place % PAGE];
      const { scroll } = this.$refs;
      if (place < 0 || place >= this.total) return;
      // Below the head, and not behind the edge.
      const top = place * this.rowHeight;
      if (top < scroll.scrollTop) scroll.scrollTop = top;
      else if (top + 2 * this.rowHeight > scroll.scrollTop + scroll.clientHeight) scroll.scrollTop = top + 2 * this.rowHeight - scroll.clientHeight;
      if (row) this.open(row[0], place);
    },
  },
});

function number(value, digits = 4) {
  return Number.isInteger(value) ? grouped(value) : valueText(value, null, digits);
}
