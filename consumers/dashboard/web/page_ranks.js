// The ranks of a run: a heat map with a block of cells for each host, the slowest in a table, and what is known of one
// of them. The server sends them only while the panel can be seen.
import { keep, keptOf } from "page_settings";
import { grouped, valueText } from "page_text";
import { inkOf, painted, redrawn } from "page_theme";
import { markRaw } from "vue";

const USUAL = "arrival";
const SETTLE_MS = 60;
const LARGEST = 20;
const SMALLEST = 3;
const WITH_GAPS = 5; // cells of so many pixels have a gap between them
const WITH_NAMES = 11; // and of so many each host has its name beside it
const MOST_NAME = 130;
const HEAD = 15;
const LEAST_HEIGHT = 260;
const MOST_HEIGHT = 560;
const SHADES = 256;
const OPAQUE = 0xff000000;
const FAINT = 0x4d000000;

export default {
  template: `
    <div class="ranks">
      <div class="ranks-controls" v-if="quantities.length">
        <label v-if="runs.length > 1"><span>run</span>
          <select :value="run" @change="choose({run: Number($event.target.value), cell: null})">
            <option v-for="[number, label] in runs" :key="number" :value="number">{{ label }}</option>
          </select></label>
        <label v-if="map || rows.length > 1"><span>ranks by</span>
          <select :value="quantity" @change="chooseQuantity($event.target.value)">
            <option v-for="[name, text] in quantities" :key="name" :value="name">{{ text }}</option>
          </select></label>
        <span class="ranks-count" v-if="map">{{ countText }}</span>
        <span class="ranks-legend" v-if="map" role="img" :aria-label="legendText">
          <span>{{ map.lowText }}</span>
          <span class="ranks-scale" aria-hidden="true"><i v-if="map.median !== null" :style="{left: medianPlace}" :title="'median ' + map.medianText"></i></span>
          <span>{{ map.highText }}</span>
          <span class="soft" v-if="map.medianText">median {{ map.medianText }}</span>
        </span>
      </div>
      <ul class="ranks-facts" v-if="facts.length" aria-label="What stands out">
        <li v-for="[kind, text] in facts" :key="kind" :class="kind">{{ text }}</li>
      </ul>
      <div class="ranks-map" ref="map" v-show="map" role="img" :aria-label="summary" @pointermove="onPointer" @pointerleave="tip = null" @click="onClick">
        <canvas ref="canvas" aria-hidden="true"></canvas>
        <div v-if="tip" class="ranks-cursor" :style="tip.box" aria-hidden="true"></div>
        <div v-if="tip" class="ranks-tip" :style="tip.style"><b>{{ tip.value }}</b> {{ tip.text }}</div>
      </div>
      <div v-if="rows.length" class="ranks-scroll" tabindex="0" role="region" aria-label="Table of ranks">
        <h3 v-if="title">{{ title }}</h3>
        <table aria-label="Ranks">
          <thead><tr><th v-for="label in columns" :key="label" scope="col">{{ label }}</th></tr></thead>
          <tbody><tr v-for="[cell, values] in rows" :key="cell" :class="{'rank-chosen': cell === cellChosen}">
            <td v-for="(value, place) in values" :key="place">
              <button v-if="place === 0" type="button" class="rank-link" :aria-label="'Rank ' + value" :aria-pressed="String(cell === cellChosen)"
                      @click="open(cell)">{{ value }}</button>
              <template v-else>{{ value }}</template></td>
          </tr></tbody>
        </table>
      </div>
    </div>`,
  mixins: [redrawn],
  data: () => ({
    runs: [], run: 0, quantities: [], quantity: null, hosts: [], silent: [], late: [], waiting: null, facts: [], map: null,
    columns: [], rows: [], title: "",
    asked: { run: 0, quantity: keptOf("ranks")[0] || USUAL, cell: null },
    tip: null,
  }),
  computed: {
    cellChosen() {
      return this.asked.cell;
    },
    countText() {
      const named = this.hosts.filter(([name]) => name).length;
      const ranks = this.hosts.reduce((sum, [, count]) => sum + count, 0);
      return `${grouped(ranks)} ranks` + (named ? ` on ${grouped(named)} ${named === 1 ? "host" : "hosts"}` : "");
    },
    medianPlace() {
      const { low, high, median } = this.map;
      return `${100 * Math.min(Math.max((median - low) / (high - low), 0), 1)}%`;
    },
    quantityText() {
      return this.quantities.find(([name]) => name === this.quantity)?.[1] || "";
    },
    legendText() {
      const { lowText, highText, medianText } = this.map;
      return `Colours: ${this.quantityText} from ${lowText} to ${highText}, median ${medianText}`;
    },
    summary() {
      if (!this.map) return "";
      const facts = this.facts.map(([, text]) => text).join("; ");
      return `Heat map of ${this.countText} by ${this.quantityText}. ${facts ? facts + ". " : ""}Arrow keys move from rank to rank, Enter opens one; the table below has the slowest.`;
    },
  },
  created() {
    // Kept out of Vue's sight: it would follow every number.
    this.cells = new Float32Array();
    this.starts = []; // of each host its first cell
    this.plan = null; // where cells are drawn
    this.pointed = null; // the cell under the pointer
    this.seen = false;
  },
  mounted() {
    this.observer = new IntersectionObserver((entries) => this.onSeen(entries.at(-1).isIntersecting), { rootMargin: "100px" });
    this.observer.observe(this.$el);
    this.sizes = new ResizeObserver(() => this.draw());
    this.sizes.observe(this.$el);
    this.onVisibility = () => this.tell();
    document.addEventListener("visibilitychange", this.onVisibility);
    this.tell(true);
  },
  beforeUnmount() {
    this.observer.disconnect();
    this.sizes.disconnect();
    document.removeEventListener("visibilitychange", this.onVisibility);
  },
  methods: {
    onTheme() {
      this.draw();
    },
    // What the server calls: all that has changed. The answer, once it is drawn, lets it send the next.
    async frame(update) {
      const began = performance.now();
      const { number, map, ...rest } = update;
      Object.assign(this, rest);
      if (map !== undefined) {
        this.cells = map ? new Float32Array(Uint8Array.from(atob(map.cells), (letter) => letter.charCodeAt(0)).buffer) : new Float32Array();
        this.map = map && { ...map, cells: null };
      }
      if (rest.hosts) {
        this.hosts = markRaw(rest.hosts);
        this.starts = [];
        rest.hosts.reduce((sum, [, count]) => (this.starts.push(sum), sum + count), 0);
        this.plan = null;
      }
      await this.$nextTick();
      this.draw();
      if (this.tip) this.point(this.pointed);
      await painted();
      return [number, (performance.now() - began) / 1000];
    },
    onSeen(seen) {
      this.seen = seen;
      this.tell();
    },
    tell(fresh = false) {
      this.fresh ||= fresh;
      clearTimeout(this.telling);
      this.telling = setTimeout(() => {
        this.$emit("look", { ...this.asked, seen: this.seen && !document.hidden, fresh: this.fresh });
        this.fresh = false;
      }, SETTLE_MS);
    },
    choose(change) {
      Object.assign(this.asked, change);
      this.tell();
      this.draw();
    },
    chooseQuantity(name) {
      this.choose({ quantity: name });
      keep("ranks", name === USUAL ? [] : [name]);
    },
    open(cell) {
      this.choose({ cell: this.asked.cell === cell ? null : cell });
    },
    rankOf(cell) {
      const host = this.hostOf(cell);
      const [, , ranks] = this.hosts[host];
      const place = cell - this.starts[host];
      return Array.isArray(ranks) ? ranks[place] : ranks + place;
    },
    hostOf(cell) {
      return this.starts.findLastIndex((start) => start <= cell);
    },
    textOf(cell) {
      const [name] = this.hosts[this.hostOf(cell)];
      const notes = [
        this.silent.includes(this.hostOf(cell)) ? "silent" : "",
        this.late.includes(cell) ? "behind the others" : "",
        cell === this.waiting ? "the others wait for it" : "",
      ];
      return [`rank ${this.rankOf(cell)}`, name ? `on ${name}` : "", ...notes.filter(Boolean).map((note) => `· ${note}`)].filter(Boolean).join(" ");
    },
    draw() {
      const canvas = this.$refs.canvas;
      const width = this.$refs.map?.clientWidth;
      if (!canvas || !this.map || !width || !this.hosts.length) return;
      if (!this.plan || this.plan.width !== width) this.plan = planOf(this.hosts, width, canvas);
      const { size, gap, height } = this.plan;
      const ratio = window.devicePixelRatio || 1;
      canvas.style.width = `${width}px`;
      canvas.style.height = `${height}px`;
      canvas.width = Math.round(width * ratio);
      canvas.height = Math.round(height * ratio);
      const pen = canvas.getContext("2d");
      pen.scale(ratio, ratio);
      const [ink, soft, accent] = ["--ink", "--ink-soft", "--accent"].map(inkOf);
      const shades = shadesOf(inkOf("--heat"));
      const silent = new Set(this.silent);
      const side = size - gap;
      const unknown = this.paint(pen, canvas, ratio, shades, silent);
      pen.strokeStyle = soft;
      pen.lineWidth = 1;
      for (const [x, y] of side > 3 ? unknown : []) pen.strokeRect(x + 0.5, y + 0.5, side - 1, side - 1);
      for (const host of silent) this.strike(pen, host, soft);
      this.drawNames(pen, ink, soft, silent);
      pen.fillStyle = ink;
      for (const cell of this.late) {
        const [x, y] = this.placeOf(cell);
        pen.beginPath();
        pen.arc(x + side / 2, y + side / 2, Math.max(side / 4, 1), 0, 2 * Math.PI);
        pen.fill();
      }
      for (const [cell, color, width] of [[this.waiting, ink, 1.5], [this.asked.cell, accent, 2.5]]) {
        if (cell === null || cell >= this.cells.length) continue;
        const [x, y] = this.placeOf(cell);
        pen.lineWidth = width;
        pen.strokeStyle = color;
        pen.strokeRect(x - 2, y - 2, side + 4, side + 4);
      }
    },
    // The cells, pixel by pixel: a pen takes far longer for thousands. Returns where those without a value are.
    paint(pen, canvas, ratio, shades, silent) {
      const { size, gap, across, labelWidth } = this.plan;
      const { low, high, fewer } = this.map;
      const { hosts, starts, cells } = this;
      const { width } = canvas;
      const image = pen.createImageData(width, canvas.height);
      const pixels = new Uint32Array(image.data.buffer);
      const unknown = [];
      for (let host = 0; host < hosts.length; host++) {
        const [left, top] = this.cornerOf(host);
        const alpha = silent.has(host) ? FAINT : OPAQUE;
        for (let place = 0; place < hosts[host][1]; place++) {
          const x = left + labelWidth + (place % across) * size;
          const y = top + Math.floor(place / across) * size;
          const value = cells[starts[host] + place];
          if (!Number.isFinite(value)) {
            unknown.push([x, y]);
            continue;
          }
          const share = Math.min(Math.max((value - low) / (high - low), 0), 1);
          const color = (shades[Math.round((fewer ? 1 - share : share) * (SHADES - 1))] | alpha) >>> 0;
          const [from, until] = [Math.round(x * ratio), Math.round((x + size - gap) * ratio)];
          const bottom = Math.min(Math.round((y + size - gap) * ratio), canvas.height);
          for (let row = Math.round(y * ratio); row < bottom; row++) pixels.fill(color, row * width + from, row * width + until);
        }
      }
      pen.putImageData(image, 0, 0);
      return unknown;
    },
    drawNames(pen, ink, soft, silent) {
      const { names, rows, size, blockWidth, labelWidth, head, rowHeight } = this.plan;
      pen.font = `11px ${getComputedStyle(document.body).fontFamily}`;
      pen.textBaseline = "middle";
      if (names) {
        this.hosts.forEach(([name], host) => {
          const [x, y] = this.cornerOf(host);
          pen.fillStyle = silent.has(host) ? soft : ink;
          pen.fillText(fitted(pen, name, labelWidth - 8), x, y + Math.min(size, rowHeight) / 2);
        });
      } else if (head) {
        // What does not fit above one column is left out.
        let end = -1;
        pen.fillStyle = soft;
        this.hosts.forEach(([name], host) => {
          if (host % rows || !name) return;
          const [x] = this.cornerOf(host);
          if (x < end) return;
          const wide = pen.measureText(name).width;
          if (x + wide > this.plan.width && host) return;
          pen.fillText(name, x, HEAD / 2);
          end = x + Math.max(wide + 10, blockWidth);
        });
      }
    },
    // Where a host's block is; labels are at its left.
    cornerOf(host) {
      const { rows, blockWidth, rowHeight, head } = this.plan;
      return [Math.floor(host / rows) * blockWidth, head + (host % rows) * rowHeight];
    },
    placeOf(cell) {
      const { across, size, labelWidth } = this.plan;
      const host = this.hostOf(cell);
      const [x, y] = this.cornerOf(host);
      const place = cell - this.starts[host];
      return [x + labelWidth + (place % across) * size, y + Math.floor(place / across) * size];
    },
    strike(pen, host, color) {
      const { across, size, labelWidth, gap } = this.plan;
      const [x, y] = this.cornerOf(host);
      const wide = Math.min(this.hosts[host][1], across) * size - gap;
      const tall = Math.ceil(this.hosts[host][1] / across) * size - gap;
      pen.strokeStyle = color;
      pen.lineWidth = 1.5;
      pen.beginPath();
      pen.moveTo(x + labelWidth, y + tall / 2);
      pen.lineTo(x + labelWidth + wide, y + tall / 2);
      pen.stroke();
    },
    cellAt(event) {
      const box = this.$refs.canvas.getBoundingClientRect();
      const [x, y] = [event.clientX - box.left, event.clientY - box.top];
      const { rows, columns, blockWidth, rowHeight, head, labelWidth, across, size } = this.plan;
      const [column, row] = [Math.floor(x / blockWidth), Math.floor((y - head) / rowHeight)];
      if (row < 0 || row >= rows || column < 0 || column >= columns) return null;
      const host = column * rows + row;
      if (host >= this.hosts.length) return null;
      const [inX, inY] = [x - column * blockWidth - labelWidth, y - head - row * rowHeight];
      const [left, top] = [Math.floor(inX / size), Math.floor(inY / size)];
      const place = top * across + left;
      return inX < 0 || left >= across || place < 0 || place >= this.hosts[host][1] ? null : this.starts[host] + place;
    },
    point(cell) {
      this.pointed = cell;
      if (cell === null || cell >= this.cells.length) return (this.tip = null);
      const [x, y] = this.placeOf(cell);
      const { size, gap, width } = this.plan;
      const side = `${size - gap}px`;
      const value = this.cells[cell];
      this.tip = {
        box: { left: `${x}px`, top: `${y}px`, width: side, height: side },
        style: { top: `${y + size + 6}px`, ...(x > width / 2 ? { right: `${width - x - size}px` } : { left: `${x}px` }) },
        value: Number.isFinite(value) ? valueText(value, this.map.scale, 4) : "no value", text: this.textOf(cell),
      };
    },
    onPointer(event) {
      if (this.plan && event.pointerType !== "touch") this.point(this.cellAt(event));
    },
    onClick(event) {
      const cell = this.plan && this.cellAt(event);
      if (cell !== null) this.open(cell);
    },
    // What a test or a reader of the page can ask.
    told() {
      return { cells: this.cells.length, plan: this.plan && { ...this.plan }, quantity: this.quantity };
    },
    boxOf(cell) {
      const [x, y] = this.placeOf(cell);
      return { x, y, size: this.plan.size };
    },
  },
};

// How blocks of hosts are laid out: hosts run down the columns, with cells as large as there is room for.
function planOf(hosts, width, canvas) {
  const most = Math.max(...hosts.map(([, count]) => count));
  const hasNames = hosts.some(([name]) => name);
  const pen = canvas.getContext("2d");
  pen.font = `11px ${getComputedStyle(document.body).fontFamily}`;
  const longest = hasNames ? Math.min(hosts.reduce((wide, [name]) => Math.max(wide, pen.measureText(name).width), 0), MOST_NAME) : 0;
  const highest = Math.min(Math.max(LEAST_HEIGHT, 0.5 * window.innerHeight), MOST_HEIGHT);
  for (let size = LARGEST; ; size--) {
    const names = hasNames && size >= WITH_NAMES;
    const labelWidth = names ? Math.ceil(longest) + 10 : 0;
    const head = hasNames && !names ? HEAD : 0;
    const gap = size >= WITH_GAPS ? 1 : 0;
    const between = Math.max(Math.round(size * 0.8), 4);
    const across = Math.max(Math.min(most, Math.floor((width - labelWidth) / size)), 1);
    const down = Math.ceil(most / across);
    const blockWidth = labelWidth + across * size + between;
    const fitting = Math.max(Math.floor((width + between) / blockWidth), 1);
    const rows = Math.ceil(hosts.length / fitting);
    const columns = Math.ceil(hosts.length / rows);
    const rowHeight = down * size + (down > 1 ? 4 : 0);
    const height = head + rows * rowHeight;
    if (height <= highest || size === SMALLEST) return { width, size, gap, names, labelWidth, head, across, blockWidth, rows, columns, rowHeight, height };
  }
}

function shadesOf(stops) {
  const colors = stops.split(",").map((one) => [1, 3, 5].map((at) => parseInt(one.trim().slice(at, at + 2), 16)));
  return Array.from({ length: SHADES }, (_, shade) => {
    const at = (shade / (SHADES - 1)) * (colors.length - 1);
    const first = Math.min(Math.floor(at), colors.length - 2);
    const mixed = colors[first].map((one, part) => Math.round(one + (at - first) * (colors[first + 1][part] - one)));
    return (mixed[2] << 16) | (mixed[1] << 8) | mixed[0];
  });
}

function fitted(pen, text, width) {
  if (pen.measureText(text).width <= width) return text;
  let end = text.length;
  while (end && pen.measureText("…" + text.slice(text.length - end)).width > width) end--;
  return "…" + text.slice(text.length - end);
}
