// What runs of a page are compared by: a column that groups them, and a run that is the baseline of the others. It is in
// the address, beside the runs.

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
