// Runs of the table under heads: the menu that chooses by which column, and the head of a group.

const USUAL = ["folder", "status", "tags", "attempts"];
const MOST_LISTED = 100;

export const GroupMenu = {
  template: `
    <q-btn flat dense no-caps class="link" icon="workspaces" :label="group ? 'Group: ' + titleOf(group) : 'Group'" aria-haspopup="dialog">
      <q-menu ref="menu" class="home-menu" @show="$refs.find?.focus()">
        <div class="column-menu" role="dialog" aria-label="Group runs by a column">
          <q-input v-model="find" ref="find" dense outlined clearable placeholder="find columns" aria-label="Find columns to group by" @clear="find = ''"></q-input>
          <div v-if="group" class="group-buttons">
            <q-btn flat dense no-caps class="link" label="No groups" @click="choose('')"></q-btn>
            <q-btn flat dense no-caps class="link" label="Open all" @click="$emit('fold', false)"></q-btn>
            <q-btn flat dense no-caps class="link" label="Close all" @click="$emit('fold', true)"></q-btn>
          </div>
          <div class="column-list" role="radiogroup" aria-label="Group by">
            <div v-for="name in listed" :key="name" class="column-row">
              <label><input type="radio" name="group" :checked="name === group" @change="choose(name)"> {{ clean(name) }}</label>
            </div>
            <p v-if="!listed.length" class="soft">no run has that</p>
            <p v-if="matching.length > listed.length" class="soft">and {{ matching.length - listed.length }} more: find them by name</p>
          </div>
        </div>
      </q-menu>
    </q-btn>`,
  props: { group: String, names: Object, clean: Function },
  emits: ["choose", "fold"],
  data: () => ({ find: "" }),
  computed: {
    // What runs differ in comes first: among the usual columns are those hyperparameters.
    matching() {
      const hyperparameters = this.names.hyperparameters;
      const differing = this.names.usual.filter((name) => hyperparameters.includes(name));
      const usual = USUAL.filter((name) => this.names.every.includes(name));
      const wanted = (this.find || "").toLowerCase();
      return [...new Set([...differing, ...usual, ...hyperparameters])].filter((name) => name.toLowerCase().includes(wanted));
    },
    listed() {
      return this.matching.slice(0, MOST_LISTED);
    },
  },
  methods: {
    choose(name) {
      this.$refs.menu.hide();
      this.$emit("choose", name);
    },
    titleOf(name) {
      return this.clean(name.slice(name.lastIndexOf("/") + 1));
    },
  },
};

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
      <td v-if="hasMore" class="more"></td>
    </tr>`,
  props: { row: Object, columns: Array, column: String, hasMore: Boolean, clean: Function },
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
