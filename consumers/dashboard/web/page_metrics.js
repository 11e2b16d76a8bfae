// The list of very many metrics: found by a part of the name, or in groups by prefix. The chosen ones are drawn.
import { toggled } from "page_settings";

/** @type {Component} */
export const MetricList = {
  template: `
    <section v-if="told" class="metric-list" aria-label="Metrics">
      <p class="metric-facts" role="status">{{ facts }}
        <button v-if="drawable.length" type="button" class="cut" @click="$emit('choose', [...chosen, ...drawable])">draw {{ drawable.length }} of them</button>
        <button v-if="chosen.length" type="button" class="cut" @click="$emit('choose', [])">draw none</button></p>
      <ul>
        <li v-for="row in told.rows" :key="JSON.stringify([row.group, row.id, row.more, row.depth])" :style="{paddingLeft: 18 * row.depth + 'px'}">
          <button v-if="row.group !== undefined" type="button" class="group-title" :aria-expanded="String(row.isOpen)" :title="row.group" @click="$emit('open', row.group)"
            ><span class="arrow" aria-hidden="true">▾</span>{{ row.title }} <span class="count">{{ row.count.toLocaleString("en") }}</span></button>
          <label v-else-if="row.id !== undefined" :title="row.id"><input type="checkbox" :checked="chosen.includes(row.id)" @change="$emit('choose', toggled(chosen, row.id))"> {{ row.title }}</label>
          <span v-else class="count">and {{ row.more.toLocaleString("en") }} more: find them by name</span>
        </li>
      </ul>
    </section>`,
  props: { told: Object, chosen: Array },
  emits: ["choose", "open"],
  computed: {
    facts() {
      const { count, find, found } = this.told;
      if (!find) return `${count.toLocaleString("en")} metrics: choose those to draw, or find them by name`;
      return `${found.toLocaleString("en")} of ${count.toLocaleString("en")} metrics have '${find}' in their names`;
    },
    drawable() {
      return this.told.find ? this.told.rows.map((row) => row.id).filter((id) => !this.chosen.includes(id)) : [];
    },
  },
  methods: { toggled },
};
