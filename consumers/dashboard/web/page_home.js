// The table of all runs. The event "look" reports the visible rows, the columns, the order and the filter; the server sends
// those rows.
import { Explore } from "page_explore";
import { ALL_RUNS, homeHashOf, homeSettingsOf, storeOf, toggled, VIEWS } from "page_settings";
import { paged, THEME_BUTTON } from "page_theme";

const ROW_PIXELS = 40; // as --row in home.css
const OVERSCAN = 12;
const TYPING_MS = 60;
const SCROLLING_MS = 40;
const MOST_LISTED = 150;
const OF_METRIC = ["last", "best", "min", "max"];
const WIDTHS = { status: 104, time: 124, number: 118, progress: 196, tags: 190, note: 230, text: 132 };
const WIDTHS_KEY = "widths of columns";
const LEAST_WIDTH = 60;
const KEY_PIXELS = 20;
const NAME_WIDTH = 250;
const LONGEST_NAME = 28;
const NAME_END = 12;
const LETTER_PIXELS = 7.5;
const HEAD_ROOM = 44;
const WIDEST_HEAD = 200;
const GROUPABLE = ["folder", "status", "tags", "attempts"];
const GOING_ON = ["live", "paused"];

export default /** @type {Component} */ ({
  template: `
    <div class="home">
      ${THEME_BUTTON}
      <div class="home-bar" role="toolbar" aria-label="Search and columns">
        <q-input v-model="settings.find" ref="find" class="home-find" dense outlined clearable
                 placeholder="search, or filter: lr > 0.01 and status == finished" aria-label="Search or filter runs"
                 :error="!!error" hide-bottom-space no-error-icon @clear="settings.find = ''">
          <template #prepend><q-icon name="search" size="20px" aria-hidden="true"></q-icon></template>
        </q-input>
        <span class="home-count" role="status">{{ countText }}</span>
        <span v-if="baseline" class="chip"><span>baseline: {{ baseline.label }}{{ baseline.isThere ? "" : ", which is gone" }}</span
          ><button type="button" aria-label="Compare with no baseline" @click="settings.baseline = ''">×</button></span>
        <div class="spread"></div>
        <q-btn-toggle v-model="settings.view" :options="views" class="view-switch" dense no-caps unelevated toggle-color="primary" role="group" aria-label="View"></q-btn-toggle>
        <q-toggle v-if="settings.archived || archived" v-model="settings.archived" label="archived" dense></q-toggle>
        <span class="group-by">group by
          <select :value="settings.group" aria-label="Group by" @change="groupBy($event.target.value)">
            <option value="">nothing</option>
            <option v-for="name in groupable" :key="name" :value="name">{{ clean(name) }}</option>
          </select>
        </span>
        <q-btn v-if="settings.group" flat dense no-caps class="link" :label="settings.folded ? 'Open all' : 'Close all'" @click="fold(!settings.folded)"></q-btn>
        <q-btn flat dense no-caps class="link" icon="view_column" label="Columns" aria-haspopup="dialog">
          <q-menu class="home-menu" role="dialog" aria-label="Columns" @show="$refs.findColumn?.focus()">
            <div class="column-menu">
              <q-input v-model="findColumn" ref="findColumn" dense outlined clearable placeholder="find columns"
                       aria-label="Find columns by name" @clear="findColumn = ''"></q-input>
              <q-btn flat dense no-caps class="link" label="The usual ones" :disable="!settings.columns" @click="settings.columns = null"></q-btn>
              <div class="column-list">
                <section v-for="group in columnGroups" :key="group.title" :aria-label="group.title">
                  <h2>{{ group.title }}</h2>
                  <div v-for="name in group.names" :key="name" class="column-row">
                    <label v-if="!group.ofMetric"><input type="checkbox" :checked="isColumn(name)" @change="toggleColumn(name)"> {{ clean(name) }}</label>
                    <template v-else>
                      <span class="column-name">{{ clean(name) }}</span>
                      <span role="group" :aria-label="clean(name)">
                        <button v-for="which in whichOf(name)" :key="which" type="button" class="which"
                                :aria-pressed="String(isColumn(columnOf(name, which)))" @click="toggleColumn(columnOf(name, which))">{{ which }}</button>
                      </span>
                    </template>
                  </div>
                </section>
                <p v-if="!columnGroups.length" class="soft">no such column</p>
                <p v-if="unlisted" class="soft">and {{ unlisted }} more: find them by name</p>
              </div>
            </div>
          </q-menu>
        </q-btn>
      </div>
      <p v-if="error" class="home-error" role="alert">{{ error }}</p>
      <p v-for="problem in problems" :key="problem" class="notice" role="alert">{{ problem }}</p>
      <div v-if="selected.length" class="home-chosen" role="toolbar" aria-label="Selected runs">
        <strong>{{ selected.length.toLocaleString("en") }} selected</strong>
        <a class="button-link" :href="linkTo(selected.slice(0, mostCompared))">{{ selected.length > 1 ? "Compare" : "Open" }}</a>
        <template v-if="mayChange">
          <form class="tag-form" @submit.prevent="tagSelected()">
            <q-input v-model="newTag" dense outlined placeholder="add a tag" aria-label="Tag to add to the selected runs"></q-input>
          </form>
          <q-btn flat dense no-caps class="link" label="Pin" @click="annotate(selected, { pinned: true })"></q-btn>
          <q-btn flat dense no-caps class="link" label="Archive" @click="annotate(selected, { archived: true })"></q-btn>
          <q-btn flat dense no-caps color="negative" label="Delete…" @click="$emit('remove', selected)"></q-btn>
        </template>
        <div class="spread"></div>
        <q-btn flat dense no-caps class="link" label="Select none" @click="settings.runs = []"></q-btn>
      </div>
      <explore v-if="settings.view !== 'table'" ref="explore" :explored="explored" :settings="settings" :names="names" :link-to="linkTo" :empty-text="emptyText"></explore>
      <div v-show="settings.view === 'table'" class="table-box" ref="box" id="table" tabindex="0" role="region" aria-label="All runs" @scroll.passive="onScroll()">
        <table v-if="columns.length || rows.length" :aria-rowcount="lines + 1" :style="{width: tableWidth + 'px'}">
          <colgroup>
            <col :style="{width: checkWidth + 'px'}"><col :style="{width: nameWidth + 'px'}">
            <col v-for="column in columns" :key="column.name" :style="{width: widthOf(column) + 'px'}">
            <col style="width: 44px">
          </colgroup>
          <thead>
            <tr aria-rowindex="1">
              <th class="check"><input type="checkbox" :checked="allSelected" :indeterminate.prop="!allSelected && selected.length > 0"
                  aria-label="Select all runs that are found" @change="toggleAll()"></th>
              <th class="name" :aria-sort="ariaSort('run')"><button type="button" @click="sortBy('run', false)">name<span class="arrow" aria-hidden="true">{{ arrow("run") }}</span></button></th>
              <th v-for="column in columns" :key="column.name" :class="'of-' + column.kind" :aria-sort="ariaSort(column.name)" draggable="true"
                  @dragstart="dragged = column.name" @dragend="dragged = null" @dragover="dragged && $event.preventDefault()" @drop.prevent="moveColumn(dragged, column.name)">
                <button type="button" :title="column.which ? column.which + ' of ' + column.hint : column.hint" @click="sortBy(column.name, column.downwards)"
                  aria-keyshortcuts="Shift+ArrowLeft Shift+ArrowRight + -" @keydown="onHeadKey(column, $event)"><small v-if="column.which">{{ column.which }}</small><span class="title">{{ column.title }}</span><span class="arrow" aria-hidden="true">{{ arrow(column.name) }}</span></button
                ><span class="resize" draggable="true" aria-hidden="true" @dragstart.prevent.stop @pointerdown="resize(column, $event)"></span>
              </th>
              <th class="more"><span class="sr-only">actions</span></th>
            </tr>
          </thead>
          <tbody>
            <tr class="pad" aria-hidden="true" :style="{height: first * rowPixels + 'px'}"></tr>
            <template v-for="(row, place) in rows" :key="first + place">
            <tr v-if="row.group !== undefined" class="group-head" :aria-rowindex="first + place + 2">
              <td class="check"></td>
              <th scope="row" class="name"><button type="button" class="group-toggle" :aria-expanded="String(!row.isClosed)" :aria-label="groupTitle(row) + ', ' + runsText(row.count)"
                  :title="groupTitle(row)" @click="settings.toggled = toggled(settings.toggled, row.group)"
                ><q-icon :name="row.isClosed ? 'chevron_right' : 'expand_more'" size="18px" aria-hidden="true"></q-icon><span class="text"><span class="group-column">{{ groupColumn }}: </span>{{ clean(row.group || "none") }}</span><small>{{ runsText(row.count) }}</small></button></th>
              <td v-for="(column, number) in columns" :key="column.name" :class="'of-' + column.kind">
                <template v-if="row.cells[number]">
                  <span class="text" :title="row.cells[number].range ? 'mean ' + row.cells[number].text + ', from ' + row.cells[number].range : row.cells[number].text"
                    ><span v-if="row.cells[number].range" class="sr-only">mean </span>{{ row.cells[number].text }}</span>
                  <small v-if="row.cells[number].range" class="below">{{ row.cells[number].range }}</small>
                </template>
              </td>
            </tr>
            <tr v-else :aria-rowindex="first + place + 2" :data-run="row.run"
                :class="{selected: isSelected(row), archived: row.archived, baseline: row.isBaseline}">
              <td class="check"><input type="checkbox" :checked="isSelected(row)" :aria-label="'Select ' + row.label" @click="select(row, place, $event)"></td>
              <th scope="row" class="name">
                <span class="text"><span v-if="row.pinned" class="pin" title="pinned"><q-icon name="push_pin" size="15px" aria-hidden="true"></q-icon><span class="sr-only">pinned </span></span
                ><a v-if="row.name.length > longestName" class="cut" :href="linkTo([row.run])" :title="row.label" :aria-label="row.name"><span>{{ row.name.slice(0, -nameEnd) }}</span><span>{{ row.name.slice(-nameEnd) }}</span></a
                ><a v-else :href="linkTo([row.run])" :title="row.label">{{ row.name }}</a><span v-if="row.isBaseline" class="pill">baseline</span><span v-if="row.archived" class="pill">archived</span></span>
              </th>
              <td v-for="(column, number) in columns" :key="column.name" :class="'of-' + column.kind">
                <span v-if="column.kind === 'status'" class="status" :class="'status-' + row.status" :title="row.why">{{ row.status }}</span>
                <span v-else-if="column.kind === 'time'" class="text" :title="wholeTime(row.cells[number].time)">{{ timeText(row.cells[number].time) }}</span>
                <template v-else-if="column.kind === 'progress'">
                  <span class="text">{{ row.cells[number].text }}</span>
                  <span v-if="row.cells[number].part != null" class="part" aria-hidden="true"><span :style="{width: 100 * row.cells[number].part + '%'}"></span></span>
                </template>
                <div v-else-if="column.kind === 'tags'" class="tags">
                  <span v-for="tag in row.tags" :key="tag" class="tag" :style="{'--hue': hueOf(tag)}">
                    <button type="button" class="tag-find" :title="'find runs with this tag: ' + clean(tag)" @click="findTag(tag)">{{ clean(tag) }}</button
                    ><button v-if="mayChange" type="button" class="tag-remove" :aria-label="'Remove the tag ' + clean(tag) + ' from ' + row.label"
                            @click="annotate([row.run], { remove: [tag] })">×</button>
                  </span>
                  <template v-if="mayChange">
                    <input v-if="isEdited(row, 'tag')" v-model="edited.text" v-focus class="tag-input" placeholder="tag"
                           :aria-label="'New tag of ' + row.label" @keydown.enter.prevent="save()" @keydown.esc.stop="leave()" @blur="save()">
                    <button v-else type="button" class="tag-add" :aria-label="'Add a tag to ' + row.label" @click="edit(row, 'tag', '')">+</button>
                  </template>
                </div>
                <template v-else-if="column.kind === 'note'">
                  <textarea v-if="isEdited(row, 'note')" v-model="edited.text" v-focus class="note-input" rows="4" maxlength="10000"
                            :aria-label="'Note of ' + row.label" @keydown.enter.exact.prevent="save()" @keydown.esc.stop="leave()" @blur="save()"></textarea>
                  <button v-else-if="mayChange" type="button" class="note text" :class="{soft: !row.note}" :title="clean(row.note) || 'write a note'"
                          :aria-label="'Note of ' + row.label + ': ' + (clean(row.note) || 'none')" @click="edit(row, 'note', row.note)">{{ clean(row.note) || "–" }}</button>
                  <span v-else class="text" :title="clean(row.note)">{{ clean(row.note) }}</span>
                </template>
                <template v-else>
                  <span class="text" :class="{best: row.cells[number].best, differs: row.cells[number].differs}"
                        :title="row.cells[number].best ? 'the best of these runs' : row.cells[number].whole ?? row.cells[number].text"
                    ><template v-if="row.cells[number].differs"><span aria-hidden="true">≠ </span><span class="sr-only">not as the baseline: </span></template
                    >{{ row.cells[number].text }}<span v-if="row.cells[number].best" class="sr-only"> (best)</span></span>
                  <small v-if="row.cells[number].difference" class="below" :class="row.cells[number].judged" title="than the baseline">{{ row.cells[number].difference }} {{ row.cells[number].judged }}</small>
                </template>
              </td>
              <td class="more"><button type="button" :aria-label="'Actions for ' + row.label" aria-haspopup="menu" @click="openMenu(row, $event)">⋮</button></td>
            </tr>
            </template>
            <tr class="pad" aria-hidden="true" :style="{height: Math.max(lines - first - rows.length, 0) * rowPixels + 'px'}"></tr>
          </tbody>
        </table>
        <div v-if="emptyText" class="empty"><p>{{ emptyText }}</p>
          <q-btn v-if="settings.find && total" flat dense no-caps class="link" label="Show all runs" @click="settings.find = ''"></q-btn>
        </div>
      </div>
      <q-menu v-model="menu.isOpen" :target="menu.target" no-parent-event class="home-menu"
              :aria-label="'Actions for ' + menu.row?.label">
        <q-list v-if="menu.row" role="none" dense>
          <q-item clickable v-close-popup tag="a" role="menuitem" :href="linkTo([menu.row.run])"><q-item-section>Open</q-item-section></q-item>
          <q-item clickable v-close-popup role="menuitem" @click="settings.baseline = menu.row.isBaseline ? '' : menu.row.run"><q-item-section>{{ menu.row.isBaseline ? "Compare with no baseline" : "Use as the baseline" }}</q-item-section></q-item>
          <template v-if="mayChange">
          <q-item clickable v-close-popup role="menuitem" @click="annotate([menu.row.run], { pinned: !menu.row.pinned })"><q-item-section>{{ menu.row.pinned ? "Unpin" : "Pin" }}</q-item-section></q-item>
          <q-item clickable v-close-popup role="menuitem" @click="annotate([menu.row.run], { archived: !menu.row.archived })"><q-item-section>{{ menu.row.archived ? "Take out of the archive" : "Archive" }}</q-item-section></q-item>
          <template v-if="!isGoingOn(menu.row)">
            <q-item clickable v-close-popup role="menuitem" class="negative" @click="$emit('remove', [menu.row.run])"><q-item-section>Delete…</q-item-section></q-item>
          </template>
          </template>
        </q-list>
      </q-menu>
    </div>`,
  mixins: [paged],
  components: { Explore },
  props: { runsPage: String, mayChange: Boolean, folder: String, mostCompared: Number },
  directives: { focus: { mounted: (element) => element.focus() } },
  data: () => ({
    settings: homeSettingsOf(location.hash),
    rows: [],
    columns: [],
    first: 0,
    found: 0,
    lines: 0,
    baseline: null,
    total: 0,
    archived: 0,
    waiting: null,
    error: null,
    problems: [],
    explored: {},
    views: VIEWS.map((view) => ({ label: view[0].toUpperCase() + view.slice(1), value: view })),
    names: { usual: [], every: [], hyperparameters: [], metrics: [], more: 0, rated: [] },
    widths: JSON.parse(storeOf("localStorage")?.getItem(WIDTHS_KEY) || "{}"),
    findColumn: "",
    newTag: "",
    edited: { run: null, what: "", text: "", before: "" },
    menu: { isOpen: false, target: false, row: null },
    dragged: null, // the column that is being moved
    now: Date.now() / 1000,
    isNarrow: false,
    rowPixels: ROW_PIXELS,
    longestName: LONGEST_NAME,
    nameEnd: NAME_END,
  }),
  computed: {
    selected() {
      return this.settings.runs;
    },
    allSelected() {
      return this.found > 0 && this.rows.length > 0 && this.selected.length >= this.found && this.rows.every((row) => row.group !== undefined || this.isSelected(row));
    },
    countText() {
      if (this.waiting === null) return "looking …";
      const many = (count) => count.toLocaleString("en");
      const shown = this.found === this.total ? this.runsText(this.total) : `${many(this.found)} of ${many(this.total)} runs`;
      const archived = this.archived ? ` · ${many(this.archived)} archived` : "";
      return shown + archived + (this.waiting ? ` · reading ${many(this.waiting)} more …` : "");
    },
    emptyText() {
      if (this.rows.length || this.waiting === null || this.error) return "";
      if (!this.total) return this.waiting ? "" : `There is no run in ${this.folder} yet. Runs appear here as they begin.`;
      if (this.archived && !this.settings.find) return "All runs are archived.";
      return this.settings.find ? "No run is found by that." : "";
    },
    groupColumn() {
      return this.clean(this.settings.group.slice(this.settings.group.lastIndexOf("/") + 1));
    },
    checkWidth() {
      return this.isNarrow ? 38 : 44;
    },
    nameWidth() {
      return this.isNarrow ? 150 : NAME_WIDTH;
    },
    tableWidth() {
      return this.columns.reduce((sum, column) => sum + this.widthOf(column), this.checkWidth + this.nameWidth + 44);
    },
    groupable() {
      return groupable(this.names, this.settings.group);
    },
    asked() {
      const { sort, columns, archived, group, folded, toggled, baseline, view, x, y, color, axes } = this.settings;
      return { sort, columns, archived, compare: { group, folded, toggled, baseline }, explore: view === "table" ? null : { view, x, y, color, axes } };
    },
    shownColumns() {
      return this.settings.columns || this.names.usual;
    },
    matchingNames() {
      const wanted = (this.findColumn || "").toLowerCase();
      const matches = (names) => names.filter((name) => name.toLowerCase().includes(wanted));
      return [
        { title: "of every run", names: matches(this.names.every) },
        { title: "metrics", names: matches(this.names.metrics), ofMetric: true },
        { title: "hyperparameters", names: matches(this.names.hyperparameters) },
      ];
    },
    columnGroups() {
      return this.matchingNames.map((group) => ({ ...group, names: group.names.slice(0, MOST_LISTED) })).filter((group) => group.names.length);
    },
    unlisted() {
      const more = this.findColumn ? 0 : this.names.more; // those that match come first
      return this.matchingNames.reduce((sum, group) => sum + Math.max(group.names.length - MOST_LISTED, 0), more);
    },
  },
  watch: {
    settings: {
      deep: true,
      immediate: true,
      handler() {
        const hash = homeHashOf(this.settings);
        history.replaceState(history.state, "", hash || location.pathname + location.search);
        storeOf("sessionStorage")?.setItem(ALL_RUNS, hash);
      },
    },
    widths: { deep: true, handler() { storeOf("localStorage")?.setItem(WIDTHS_KEY, JSON.stringify(this.widths)); } },
    "settings.find"() {
      this.toTop();
      this.tell(TYPING_MS);
    },
    "settings.sort"() {
      this.toTop();
    },
    findColumn() {
      if (this.names.more) this.tell(TYPING_MS);
    },
    asked: { deep: true, handler() { this.tell(); } },
  },
  mounted() {
    this.sizes = new ResizeObserver(() => {
      this.isNarrow = this.$refs.box.clientWidth < 600;
      this.tell();
    });
    this.sizes.observe(this.$refs.box);
    this.clock = setInterval(() => (this.now = Date.now() / 1000), 1000);
    this.tell();
  },
  beforeUnmount() {
    this.sizes.disconnect();
    clearInterval(this.clock);
  },
  methods: {
    // Called by the server with changes. The answer lets the server send the next.
    async frame({ number, ...update }) {
      const began = performance.now();
      const focused = /** @type {HTMLElement} */ (document.activeElement);
      // Frozen: Vue need not follow each number.
      for (const name of Object.keys(update)) this[name] = Object.freeze(update[name]);
      await this.$nextTick();
      // A moved head keeps the focus.
      if (document.activeElement === document.body && focused.isConnected) focused.focus();
      return [number, (performance.now() - began) / 1000];
    },
    // Called by the server with the names of all found runs.
    selectAll(runs) {
      this.settings.runs = runs;
    },
    groupBy(name) {
      Object.assign(this.settings, { group: name, toggled: [] });
      this.toTop();
    },
    fold(folded) {
      Object.assign(this.settings, { folded, toggled: [] });
      this.toTop();
    },
    toggled,
    groupTitle(row) {
      return `${this.groupColumn}: ${this.clean(row.group || "none")}`;
    },
    runsText(count) {
      return `${count.toLocaleString("en")} ${count === 1 ? "run" : "runs"}`;
    },
    // Called by the server with removed runs.
    deselect(runs) {
      this.settings.runs = this.settings.runs.filter((run) => !runs.includes(run));
    },
    select(row, place, event) {
      const isOn = !this.isSelected(row);
      const last = this.rows.findIndex((one) => one.run === this.lastSelected);
      const range = event.shiftKey && last >= 0 ? this.rows.slice(Math.min(last, place), Math.max(last, place) + 1).filter((one) => one.run) : [row];
      const names = new Set(range.map((one) => one.run));
      const others = this.settings.runs.filter((run) => !names.has(run));
      this.settings.runs = isOn ? [...others, ...names] : others;
      this.lastSelected = row.run;
    },
    isSelected(row) {
      return this.selected.includes(row.run);
    },
    toggleAll() {
      if (this.allSelected) this.settings.runs = [];
      else this.$emit("all");
    },
    look() {
      const box = this.$refs.box;
      if (!box) return null;
      const first = Math.max(Math.floor(box.scrollTop / ROW_PIXELS) - OVERSCAN, 0);
      const count = Math.ceil(box.clientHeight / ROW_PIXELS) + 2 * OVERSCAN;
      return { ...this.asked, find: this.settings.find || "", first, count, hidden: document.hidden, names: this.names.more ? this.findColumn || "" : "" };
    },
    onScroll() {
      // Also during scrolling.
      if (this.scrolling) return;
      this.scrolling = setTimeout(() => {
        this.scrolling = null;
        this.tell();
      }, SCROLLING_MS);
    },
    toTop() {
      if (this.$refs.box) this.$refs.box.scrollTop = 0;
    },
    widthOf(column) {
      const head = LETTER_PIXELS * (column.title.length + column.which.length) + HEAD_ROOM;
      return this.widths[column.name] ?? Math.max(WIDTHS[column.kind] || WIDTHS.text, Math.min(head, WIDEST_HEAD));
    },
    resize(column, begin) {
      const before = this.widthOf(column);
      const move = (event) => {
        this.widths[column.name] = Math.max(before + event.clientX - begin.clientX, LEAST_WIDTH);
      };
      window.addEventListener("pointermove", move);
      window.addEventListener("pointerup", () => window.removeEventListener("pointermove", move), { once: true });
    },
    onHeadKey(column, event) {
      const names = this.columns.map(({ name }) => name);
      const step = event.shiftKey && { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      const wider = { "+": KEY_PIXELS, "-": -KEY_PIXELS }[event.key];
      if (step) this.moveColumn(column.name, names[names.indexOf(column.name) + step]);
      else if (wider) this.widths[column.name] = Math.max(this.widthOf(column) + wider, LEAST_WIDTH);
      else return;
      event.preventDefault();
    },
    moveColumn(name, target) {
      if (!target) return;
      const names = this.columns.map((column) => column.name);
      const others = names.filter((one) => one !== name);
      others.splice(names.indexOf(target), 0, name);
      this.settings.columns = others;
    },
    // Cycles through the natural order, its reverse, and the default.
    sortBy(name, downwards) {
      const [one, other] = downwards ? ["-" + name, name] : [name, "-" + name];
      const now = this.settings.sort;
      this.settings.sort = now === one ? other : now === other && name !== "started" ? "-started" : one;
    },
    ariaSort(name) {
      const now = this.settings.sort;
      return now === name ? "ascending" : now === "-" + name ? "descending" : null;
    },
    arrow(name) {
      return { ascending: " ↑", descending: " ↓" }[this.ariaSort(name)] || "";
    },
    isColumn(name) {
      return this.shownColumns.includes(name);
    },
    whichOf(metric) {
      return OF_METRIC.filter((which) => which !== "best" || this.names.rated.includes(metric));
    },
    columnOf(metric, which) {
      return which === "last" ? metric : `${metric}.${which}`;
    },
    toggleColumn(name) {
      const columns = [...this.shownColumns];
      const place = columns.indexOf(name);
      // A new column is visible at once.
      if (place < 0) columns.unshift(name);
      else columns.splice(place, 1);
      this.settings.columns = columns;
      if (place < 0) this.$refs.box.scrollLeft = 0;
    },
    linkTo(runs) {
      const asked = new URLSearchParams();
      runs.forEach((run) => asked.append("run", run));
      if (runs.length > 1) {
        for (const name of ["group", "baseline"]) if (this.settings[name]) asked.set(name, this.settings[name]);
      }
      return `${this.runsPage}?${asked.toString().replaceAll("%2F", "/")}`;
    },
    annotate(runs, changes) {
      this.$emit("annotate", { runs: [...runs], ...changes });
    },
    tagSelected() {
      const add = tagsIn(this.newTag);
      if (add.length) this.annotate(this.selected, { add });
      this.newTag = "";
    },
    findTag(tag) {
      this.settings.find = `tags == ${JSON.stringify(tag)}`;
    },
    edit(row, what, text) {
      this.edited = { run: row.run, what, text, before: text };
    },
    isEdited(row, what) {
      return this.edited.run === row.run && this.edited.what === what;
    },
    leave() {
      this.edited = { run: null, what: "", text: "", before: "" };
    },
    save() {
      const { run, what, text, before } = this.edited;
      if (run === null) return;
      this.leave();
      if (what === "note" && text !== before) this.annotate([run], { note: text });
      const add = what === "tag" ? tagsIn(text) : [];
      if (add.length) this.annotate([run], { add });
    },
    openMenu(row, event) {
      this.menu = { isOpen: false, target: event.currentTarget, row };
      this.$nextTick(() => (this.menu.isOpen = true));
    },
    isGoingOn(row) {
      return GOING_ON.includes(row.status);
    },
    hueOf(tag) {
      let hash = 0;
      for (const letter of tag) hash = (hash * 31 + letter.codePointAt(0)) % 360;
      return hash;
    },
    // Escapes invisible and direction characters.
    clean(text) {
      return String(text ?? "").replace(/\s+/g, " ").replace(/[\p{Cc}\p{Cf}]/gu, (one) => "\\u" + one.codePointAt(0).toString(16).padStart(4, "0"));
    },
    timeText(seconds) {
      if (typeof seconds !== "number") return "";
      const ago = this.now - seconds;
      if (ago >= 0 && ago < 60) return "just now";
      if (ago >= 0 && ago < 3600) return `${Math.floor(ago / 60)} min ago`;
      if (ago >= 0 && ago < 86400) return `${Math.floor(ago / 3600)} h ago`;
      const [at, now] = [new Date(seconds * 1000), new Date(this.now * 1000)];
      const day = /** @type {const} */ ({ month: "short", day: "numeric" });
      if (at.getFullYear() !== now.getFullYear()) return at.toLocaleDateString("en", { ...day, year: "numeric" });
      return at.toLocaleString("en", { ...day, hour: "2-digit", minute: "2-digit", hourCycle: "h23" });
    },
    wholeTime(seconds) {
      return typeof seconds === "number" ? new Date(seconds * 1000).toLocaleString() : "";
    },
    onLink() {
      if (location.hash === "#table") history.replaceState(history.state, "", homeHashOf(this.settings) || "#");
      else Object.assign(this.settings, homeSettingsOf(location.hash));
    },
  },
});

function tagsIn(text) {
  return text.split(",").map((one) => one.trim()).filter(Boolean);
}

// Columns to group by: differing hyperparameters first.
function groupable({ usual, every, hyperparameters }, chosen) {
  const differing = usual.filter((name) => hyperparameters.includes(name));
  const known = GROUPABLE.filter((name) => every.includes(name));
  return [...new Set([...differing, ...known, ...hyperparameters, ...(chosen ? [chosen] : [])])];
}
