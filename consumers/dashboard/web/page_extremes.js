// What captions of charts say of metrics: the best value, or the least and the greatest, and where they stand. A component
// that mixes this in has settings, runs, hidden and latest.
import { clockText, grouped } from "page_text";

const PLACE_DIGITS = 5;

export const EXTREMES = `
  <span v-if="runs.length === 1 && extremesText(chart)" class="extremes">{{ extremesText(chart) }}</span>`;

export const EXTREMES_TABLE = `
  <template v-if="runs.length > 1 && tableRows(chart).length">
    <button type="button" class="table-button" :aria-expanded="String(hasTable(chart))" :aria-label="'Values of ' + chart.title"
            @click="toggle(settings.tables, chart.id)"><span class="arrow" aria-hidden="true">{{ hasTable(chart) ? "▾" : "▸" }}</span>values</button>
    <div v-if="hasTable(chart)" class="values-table" tabindex="0" role="region" :aria-label="'Values of ' + chart.title">
      <table>
        <thead><tr><th scope="col">run</th><th scope="col">last</th><th v-for="end in endsOf(chart)" :key="end" scope="col">{{ end }}</th></tr></thead>
        <tbody>
          <tr v-for="row in tableRows(chart)" :key="row.run">
            <th scope="row"><span class="dot" :style="{background: row.color}" aria-hidden="true"></span>{{ row.label }}</th>
            <td>{{ row.last }}</td>
            <td v-for="end in row.ends" :key="end.name">{{ end.text }} <span class="at">{{ end.at }}</span></td>
          </tr>
        </tbody>
      </table>
    </div>
  </template>`;

export const withExtremes = {
  data: () => ({ extremes: new Map() }), // by chart
  methods: {
    hasTable(chart) {
      return this.settings.tables.includes(chart.id);
    },
    // Names of what is said: of a metric with a direction the best value comes first.
    endsOf(chart) {
      const best = this.extremes.get(chart.id)?.best;
      return best ? ["best", best === "min" ? "max" : "min"] : ["min", "max"];
    },
    // The same of a run, with its values and their places.
    endsOfRun(chart, run) {
      const { best, runs = {} } = this.extremes.get(chart.id) || {};
      const values = runs[run.id];
      if (!values) return [];
      return this.endsOf(chart).map((name) => {
        const [text, at] = values[name === "best" ? best : name];
        return { name, text, at: `@ ${this.atText(at)}`, spoken: `${name} ${text} at ${this.settings.x} ${this.atText(at)}` };
      });
    },
    atText(at) {
      if (this.settings.x === "time") return clockText(at, at < 60 ? 0.1 : 1);
      return grouped(this.settings.x === "epoch" ? Number(at.toPrecision(PLACE_DIGITS)) : Math.round(at));
    },
    extremesText(chart) {
      if (!this.runs.length || chart.kind === "phases") return "";
      const ends = this.endsOfRun(chart, this.runs[0]);
      const shown = this.extremes.get(chart.id)?.best ? ends.slice(0, 1) : ends;
      return shown.map((end) => `${end.name} ${end.text} ${end.at}`).join("  ");
    },
    tableRows(chart) {
      return this.runs
        .filter((run) => !this.hidden[run.id] && this.extremes.get(chart.id)?.runs[run.id])
        .map((run) => ({
          run: run.id, label: run.label, color: run.color,
          last: this.latest.get(chart.id)?.[run.id]?.[0] ?? "", ends: this.endsOfRun(chart, run),
        }));
    },
    // For the text that screen readers are given of a chart.
    spokenExtremes(chart, run) {
      const ends = this.endsOfRun(chart, run);
      const shown = this.extremes.get(chart.id)?.best ? ends.slice(0, 1) : ends;
      return shown.map((end) => `, ${end.spoken}`).join("");
    },
  },
};
