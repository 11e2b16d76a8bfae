// What the ranks of runs have printed: the newest part, older ones on request. Asked for while on the screen.
import { grouped } from "page_text";
import { watched } from "page_theme";

const LOOK_MS = 1000;
const MOST = 1 << 21; // characters that are kept while it grows
const AT_END = 8; // pixels

export default /** @type {Component} */ ({
  template: `
    <div class="console">
      <div class="tables-bar">
        <label v-if="runs.length > 1">run <select v-model="run" @change="restart()"><option v-for="([label], number) in runs" :key="number" :value="number">{{ label }}</option></select></label>
        <label v-if="ranks.length > 1">rank <select v-model="rank" @change="restart()"><option v-for="one in ranks" :key="one" :value="one">{{ one }}</option></select></label>
        <input v-model="find" type="search" class="tables-find" placeholder="find lines" aria-label="Find lines">
        <span v-if="find" class="soft" role="status">{{ grouped(found.length) }} lines</span>
        <span class="spread"></span>
        <button v-if="!isFirst" type="button" class="tables-plain" @click="older()">earlier output</button>
      </div>
      <pre ref="text" class="console-text" tabindex="0" aria-label="Console output" @scroll.passive="onScroll($event.target)">{{ shown }}</pre>
    </div>`,
  mixins: [watched],
  props: { runs: { type: Array, default: () => [] } },
  data: () => ({ run: 0, rank: null, settled: "", rest: "", begin: 0, end: 0, isFirst: true, find: "", isAtEnd: true }),
  computed: {
    ranks() {
      return this.runs[this.run]?.[2] || [];
    },
    text() {
      return this.settled + this.rest;
    },
    found() {
      const words = this.find.toLowerCase();
      return this.text.split("\n").filter((line) => line.toLowerCase().includes(words));
    },
    shown() {
      return this.find ? this.found.join("\n") : this.text;
    },
    address() {
      return `${this.runs[this.run]?.[1]}?rank=${this.rank ?? this.ranks[0]}`;
    },
  },
  watch: {
    shown() {
      this.$nextTick(() => {
        if (this.isAtEnd && this.$refs.text) this.$refs.text.scrollTop = this.$refs.text.scrollHeight;
      });
    },
  },
  methods: {
    grouped,
    restart() {
      if (!this.ranks.includes(this.rank)) this.rank = this.ranks[0];
      Object.assign(this, { settled: "", rest: "", begin: 0, end: 0, isFirst: true, isAtEnd: true });
      this.look();
    },
    async look() {
      const { address, end } = this;
      this.rank ??= this.ranks[0] ?? null;
      const part = await this.answerOf(`${address}&after=${end}`);
      if (address !== this.address || end !== this.end) return;
      if (part) {
        // Also if too much has come since then.
        if (!end || part.begin !== end) Object.assign(this, { settled: "", begin: part.begin, isFirst: part.is_first });
        Object.assign(this, { settled: this.settled + part.settled, rest: part.rest, end: part.end });
        if (this.isAtEnd && this.settled.length > MOST) this.end = 0; // begins anew
      }
      this.lookAgain(LOOK_MS);
    },
    async older() {
      const { address, begin } = this;
      const part = await this.answerOf(`${address}&before=${begin}`);
      if (!part || address !== this.address || begin !== this.begin) return;
      const box = this.$refs.text;
      const below = box.scrollHeight - box.scrollTop;
      Object.assign(this, { settled: part.settled + this.settled, begin: part.begin, isFirst: part.is_first, isAtEnd: false });
      this.$nextTick(() => {
        box.scrollTop = box.scrollHeight - below;
      });
    },
    onScroll(box) {
      this.isAtEnd = box.scrollHeight - box.scrollTop - box.clientHeight < AT_END;
    },
  },
});
