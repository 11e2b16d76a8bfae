// The runs of the page: state, commands, and visibility of lines. Several are a list beside the charts.
const MOST_LARGE = 6; // more runs have a line each
const ICONS = { pause: "pause", resume: "play_arrow", checkpoint: "save", stop: "stop" };

/** @type {Component} */
export const RunList = {
  template: `
    <section :class="['runs', {many: runs.length > mostLarge}]" aria-label="Runs">
      <article v-for="run in runs" :key="run.id" :class="['run', {off: hidden[run.id]}]" :data-run="run.id" :aria-label="'Run ' + run.label">
        <div class="run-head">
          <button v-if="runs.length > 1" type="button" :class="'run-dot dash-' + run.dash" :style="{'--swatch': run.color}" :aria-label="'Lines of ' + run.label"
                  :aria-pressed="String(!hidden[run.id])" @click="$emit('toggle', run.id)"></button>
          <h2 class="run-name" :title="run.label" @click="runs.length > 1 && $emit('toggle', run.id)">{{ run.label }}</h2>
          <span :class="'status status-' + run.status">{{ run.status }}</span>
          <span v-if="run.alerts" :class="['pill mark', {firing: run.isFiring}]">{{ run.alerts }}</span>
        </div>
        <div v-if="run.percent !== null" class="bar" role="progressbar" aria-valuemin="0" aria-valuemax="100" :aria-valuenow="run.percent" :aria-label="'Progress of ' + run.label">
          <div :style="{width: run.percent + '%'}"></div></div>
        <div class="run-facts">{{ run.facts }}</div>
        <div v-if="run.problem" class="run-problem">{{ run.problem }}</div>
        <pre v-if="run.traceback" class="console-text run-traceback" tabindex="0" aria-label="Traceback">{{ run.traceback }}</pre>
        <div v-if="run.commands.length" class="run-buttons" role="group" :aria-label="'Commands to ' + run.label">
          <q-btn v-for="name in run.commands" :key="name" outline dense no-caps padding="2px 12px" :icon="icons[name]" :label="name"
                 :color="name === 'stop' ? 'negative' : 'primary'" @click="$emit('command', { run: run.id, name })"></q-btn>
          <form class="run-set" @submit.prevent="set(run, $event.target)">
            <input name="rate" required inputmode="decimal" placeholder="0.01" :aria-label="'Learning rate of ' + run.label">
            <q-btn outline dense no-caps padding="2px 12px" type="submit" label="set lr" color="primary"></q-btn>
          </form>
        </div>
        <div v-if="run.answer" class="run-answer" role="status">{{ run.answer }}</div>
      </article>
    </section>`,
  props: { runs: Array, hidden: Object },
  emits: ["toggle", "command"],
  data: () => ({ mostLarge: MOST_LARGE, icons: ICONS }),
  methods: {
    set(run, form) {
      this.$emit("command", { run: run.id, name: "set", rate: form.elements.rate.value });
      form.reset();
    },
  },
};

// The comparison: a grouping column and a baseline run, which are in the address.
/** @type {Component} */
export const Compare = {
  template: `
    <div v-if="told && told.baselines.length > 1" class="compare" role="group" aria-label="Compare runs">
      <label class="named">group by
        <select :value="told.group ?? ''" @change="choose({ group: $event.target.value || null })">
          <option value="">nothing</option>
          <option v-for="[name, title] in told.columns" :key="name" :value="name">{{ title }}</option>
        </select>
      </label>
      <label v-if="told.group" class="named">
        <input type="checkbox" :checked="told.singles" @change="choose({ singles: $event.target.checked })"> single runs too
      </label>
      <label class="named">baseline
        <select :value="told.baseline ?? ''" @change="choose({ baseline: $event.target.value || null })">
          <option value="">none</option>
          <option v-for="[name, title] in told.baselines" :key="name" :value="name">{{ title }}</option>
        </select>
      </label>
      <ul v-if="legend.length" class="legend" aria-label="Groups">
        <li v-for="one in legend" :key="one.id" :data-run="one.id" tabindex="0">
          <span :class="'run-dot dash-' + one.dash" :style="{'--swatch': one.color}" aria-hidden="true"></span>{{ one.label }}
        </li>
      </ul>
    </div>`,
  props: { told: Object, runs: Array },
  emits: ["compare"],
  computed: {
    legend() {
      return this.runs.filter((run) => run.isGroup);
    },
  },
  methods: {
    choose(change) {
      const { group, singles, baseline } = { ...this.told, ...change };
      const address = new URL(location.href);
      const query = { group, singles: group && singles ? "1" : null, baseline };
      for (const [name, value] of Object.entries(query)) {
        if (value) address.searchParams.set(name, value);
        else address.searchParams.delete(name);
      }
      history.replaceState(history.state, "", address);
      this.$emit("compare", { group, singles: Boolean(query.singles), baseline });
    },
  },
};
