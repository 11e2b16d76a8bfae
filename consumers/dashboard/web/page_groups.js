// Runs of the table under heads: the columns to group by, and the head of a group.

const OF_EVERY_RUN = ["folder", "status", "tags", "attempts"];

// Columns to group by: first hyperparameters in which runs differ, which are among the usual columns.
export function groupable({ usual, every, hyperparameters }, chosen) {
  const differing = usual.filter((name) => hyperparameters.includes(name));
  const known = OF_EVERY_RUN.filter((name) => every.includes(name));
  return [...new Set([...differing, ...known, ...hyperparameters, ...(chosen ? [chosen] : [])])];
}

/** @type {Component} */
export const GroupHead = {
  template: `
    <tr class="group-head">
      <td class="check"><button type="button" class="group-select" :aria-label="'Select, or leave out, the ' + runs + ' of ' + title" :title="'select the ' + runs" @click="$emit('select')"
        ><q-icon name="checklist" size="18px" aria-hidden="true"></q-icon></button></td>
      <th scope="row" class="name"><button type="button" class="group-toggle" :aria-expanded="String(!row.isClosed)" :aria-label="title + ', ' + runs" :title="title" @click="$emit('toggle')"
        ><q-icon :name="row.isClosed ? 'chevron_right' : 'expand_more'" size="18px" aria-hidden="true"></q-icon><span class="text"><span class="group-column">{{ columnTitle }}: </span>{{ value }}</span><small>{{ runs }}</small></button></th>
      <td v-for="(column, number) in columns" :key="column.name" :class="'of-' + column.kind">
        <template v-if="row.cells[number]">
          <span class="text" :title="hintOf(row.cells[number])"><span v-if="row.cells[number].range" class="sr-only">mean </span>{{ row.cells[number].text }}</span>
          <small v-if="row.cells[number].range" class="below">{{ row.cells[number].range }}</small>
        </template>
      </td>
    </tr>`,
  props: { row: Object, columns: Array, column: String, clean: Function },
  emits: ["select", "toggle"],
  computed: {
    columnTitle() {
      return this.clean(this.column.slice(this.column.lastIndexOf("/") + 1));
    },
    value() {
      return this.row.group ? this.clean(this.row.group) : "none";
    },
    title() {
      return `${this.columnTitle}: ${this.value}`;
    },
    runs() {
      return `${this.row.count.toLocaleString("en")} ${this.row.count === 1 ? "run" : "runs"}`;
    },
  },
  methods: {
    hintOf(cell) {
      return cell.range ? `mean ${cell.text}, from ${cell.range}` : cell.text;
    },
  },
};

// Which groups are closed: all and not these, or these and not the others.
export function toggledOf(settings, text) {
  const others = settings.toggled.filter((one) => one !== text);
  return others.length === settings.toggled.length ? [...others, text] : others;
}
