// The ranks of a run: a heat map with a block of cells for each host, and a table of the slowest. Sent while visible.
import { keep, keptOf } from "page_settings";
import { grouped, valueText } from "page_text";
import { inkOf, painted, redrawn, watched } from "page_theme";
import { markRaw } from "vue";

const USUAL = "arrival";
const SETTLE_MS = 60;
const SIZES = [16, 12, 8, 6, 4, 3]; // pixels of a cell
const MOST_HEIGHT = 480;
const MOST_MARKED = 200;
const SHADES = 256;

export default /** @type {Component} */ ({
  template: `
    <div class="ranks">
      <div class="ranks-controls" v-if="quantities.length">
        <label v-if="runs.length > 1"><span>run</span>
          <select :value="run" @change="choose({run: Number($event.target.value)})">
            <option v-for="[number, label] in runs" :key="number" :value="number">{{ label }}</option>
          </select></label>
        <label v-if="map || rows.length > 1"><span>ranks by</span>
          <select :value="quantity" @change="chooseQuantity($event.target.value)">
            <option v-for="[name, text] in quantities" :key="name" :value="name">{{ text }}</option>
          </select></label>
        <template v-if="map">
          <span>{{ countText }}</span>
          <span class="ranks-legend"><span>{{ map.lowText }}</span><span class="ranks-scale" aria-hidden="true"></span><span>{{ map.highText }}</span>
            <span class="soft" v-if="map.medianText">median {{ map.medianText }}</span></span>
        </template>
      </div>
      <ul class="ranks-facts" v-if="facts.length" aria-label="What stands out">
        <li v-for="[kind, text] in facts" :key="kind" :class="kind">{{ text }}</li>
      </ul>
      <div class="ranks-map" ref="map" v-show="map" role="img" :aria-label="summary" @pointermove="onPointer" @pointerleave="pointed = null">
        <canvas ref="canvas" aria-hidden="true"></canvas>
        <i v-for="[kind, cell] in marks" :key="kind + cell" :class="kind" :style="styleOf(cell)"></i>
        <div v-if="tip" class="ranks-tip" :style="tip.style"><b>{{ tip.value }}</b> {{ tip.text }}</div>
      </div>
      <div v-if="rows.length" class="ranks-scroll" tabindex="0" role="region" aria-label="Table of ranks">
        <h3 v-if="title">{{ title }}</h3>
        <table aria-label="Ranks">
          <thead><tr><th v-for="label in columns" :key="label" scope="col">{{ label }}</th></tr></thead>
          <tbody><tr v-for="values in rows" :key="values[0]"><td v-for="(value, place) in values" :key="place">{{ value }}</td></tr></tbody>
        </table>
      </div>
    </div>`,
  mixins: [redrawn, watched],
  margin: "100px", // drawn a little before it is on the screen
  data: () => ({
    runs: [], run: 0, quantities: [], quantity: null, hosts: [], silent: [], late: [], waiting: null, facts: [], map: null,
    columns: [], rows: [], title: "",
    asked: { run: 0, quantity: keptOf("ranks")[0] || USUAL },
    cells: markRaw(new Float32Array()),
    plan: null, // layout of the cells
    pointed: null, // the cell under the pointer
  }),
  computed: {
    // The host of each cell, and the first cell of each host.
    hostOf() {
      return markRaw(this.hosts.flatMap(([, count], host) => Array(count).fill(host)));
    },
    starts() {
      let sum = 0;
      return markRaw(this.hosts.map(([, count]) => {
        sum += count;
        return sum - count;
      }));
    },
    countText() {
      const named = this.hosts.filter(([name]) => name).length;
      return `${grouped(this.hostOf.length)} ranks` + (named ? ` on ${grouped(named)} ${named === 1 ? "host" : "hosts"}` : "");
    },
    summary() {
      const by = this.quantities.find(([name]) => name === this.quantity)?.[1] || "";
      return `Heat map of ${this.countText} by ${by}. ${this.facts.map(([, text]) => text + ". ").join("")}The table below has the slowest.`;
    },
    marks() {
      const marks = this.late.slice(0, MOST_MARKED).map((cell) => ["late", cell]);
      if (this.waiting !== null) marks.push(["waiting", this.waiting]);
      if (this.pointed !== null) marks.push(["pointed", this.pointed]);
      return this.map && this.plan ? marks.filter(([, cell]) => cell < this.hostOf.length) : [];
    },
    tip() {
      const cell = this.pointed;
      if (cell === null || !this.map || cell >= this.cells.length) return null;
      const { x, y, size } = this.boxOf(cell);
      const host = this.hostOf[cell];
      const [name, , ranks] = this.hosts[host];
      const place = cell - this.starts[host];
      const notes = [
        `rank ${Array.isArray(ranks) ? ranks[place] : ranks + place}`, name && `on ${name}`, this.silent.includes(host) && "· silent",
        this.late.includes(cell) && "· behind the others", cell === this.waiting && "· the others wait for it",
      ];
      const value = this.cells[cell];
      return {
        value: Number.isFinite(value) ? valueText(value, this.map.scale, 4) : "no value", text: notes.filter(Boolean).join(" "),
        style: { top: `${y + size + 6}px`, ...(x > this.plan.room / 2 ? { right: `${this.plan.room - x - size}px` } : { left: `${x}px` }) },
      };
    },
  },
  mounted() {
    this.sizes = new ResizeObserver(() => this.draw());
    this.sizes.observe(this.$el);
  },
  beforeUnmount() {
    this.sizes.disconnect();
  },
  methods: {
    onTheme() {
      this.draw();
    },
    // Called by the server with changes. The answer, once drawn, lets the server send the next.
    async frame({ number, map, ...rest }) {
      const began = performance.now();
      Object.assign(this, rest);
      if (map !== undefined) {
        this.cells = markRaw(map ? new Float32Array(Uint8Array.from(atob(map.cells), (letter) => letter.charCodeAt(0)).buffer) : new Float32Array());
        this.map = map && { ...map, cells: null };
      }
      await this.$nextTick();
      this.draw();
      await painted();
      return [number, (performance.now() - began) / 1000];
    },
    look() {
      clearTimeout(this.looking);
      this.looking = setTimeout(() => this.$emit("look", { ...this.asked, seen: this.isOnScreen && !document.hidden }), SETTLE_MS);
    },
    choose(change) {
      Object.assign(this.asked, change);
      this.look();
    },
    chooseQuantity(quantity) {
      this.choose({ quantity });
      keep("ranks", quantity === USUAL ? [] : [quantity]);
    },
    // A pixel for each cell, enlarged by the style.
    draw() {
      const { map, hosts, hostOf, cells } = this;
      const room = this.$refs.map?.clientWidth;
      if (!map || !room || !hosts.length) return;
      const plan = planOf(hosts, room);
      this.plan = plan;
      const { canvas } = this.$refs;
      Object.assign(canvas, { width: plan.width, height: plan.height });
      Object.assign(canvas.style, { width: `${plan.width * plan.size}px`, height: `${plan.height * plan.size}px` });
      const pen = canvas.getContext("2d");
      const image = pen.createImageData(plan.width, plan.height);
      const pixels = new Uint32Array(image.data.buffer);
      const shades = shadesOf(inkOf("--heat"));
      const silent = new Set(this.silent);
      cells.forEach((value, cell) => {
        if (!Number.isFinite(value)) return;
        const share = Math.min(Math.max((value - map.low) / (map.high - map.low), 0), 1);
        const shade = shades[Math.round((map.fewer ? 1 - share : share) * (SHADES - 1))];
        const [x, y] = this.placeOf(cell);
        pixels[y * plan.width + x] = (shade | (silent.has(hostOf[cell]) ? 0x4d000000 : 0xff000000)) >>> 0;
      });
      pen.putImageData(image, 0, 0);
    },
    placeOf(cell) {
      const { across, perLine, down } = this.plan;
      const host = this.hostOf[cell];
      const place = cell - this.starts[host];
      return [(host % perLine) * (across + 1) + (place % across), Math.floor(host / perLine) * down + Math.floor(place / across)];
    },
    boxOf(cell) {
      const { size } = this.plan;
      const [x, y] = this.placeOf(cell).map((place) => place * size);
      return { x, y, size };
    },
    styleOf(cell) {
      const { x, y, size } = this.boxOf(cell);
      return { left: `${x}px`, top: `${y}px`, width: `${size}px`, height: `${size}px` };
    },
    onPointer({ clientX, clientY }) {
      const box = this.$refs.canvas.getBoundingClientRect();
      const { size, across, perLine, down } = this.plan;
      const [x, y] = [clientX - box.left, clientY - box.top].map((pixels) => Math.floor(pixels / size));
      const [column, inX] = [Math.floor(x / (across + 1)), x % (across + 1)];
      const [line, inY] = [Math.floor(y / down), y % down];
      const host = line * perLine + column;
      const place = inY * across + inX;
      const isCell = column < perLine && inX < across && x >= 0 && y >= 0 && host < this.hosts.length && place < this.hosts[host][1];
      this.pointed = isCell ? this.starts[host] + place : null;
    },
    // For tests.
    told() {
      return { cells: this.cells.length };
    },
  },
});

// Lays out blocks of hosts in lines, with the largest cells that fit.
function planOf(hosts, room) {
  const most = Math.max(...hosts.map(([, count]) => count));
  for (const size of SIZES) {
    const across = Math.max(Math.min(most, Math.floor(room / size) - 1), 1);
    const perLine = Math.max(Math.floor(room / size / (across + 1)), 1);
    const rows = Math.ceil(most / across);
    const down = rows > 1 ? rows + 1 : 1;
    const height = Math.ceil(hosts.length / perLine) * down;
    if (height * size <= MOST_HEIGHT || size === SIZES.at(-1)) return { room, size, across, perLine, down, width: perLine * (across + 1), height };
  }
}

function shadesOf(stops) {
  const colors = stops.split(",").map((one) => [1, 3, 5].map((at) => parseInt(one.trim().slice(at, at + 2), 16)));
  return Array.from({ length: SHADES }, (_, shade) => {
    const at = (shade / (SHADES - 1)) * (colors.length - 1);
    const first = Math.min(Math.floor(at), colors.length - 2);
    const [red, green, blue] = colors[first].map((one, part) => Math.round(one + (at - first) * (colors[first + 1][part] - one)));
    return (blue << 16) | (green << 8) | red;
  });
}
