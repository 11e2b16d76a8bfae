// The menu of saved views: parts of addresses of this page, by name. The server keeps them beside the runs.

const MOST_LETTERS = 64;

export const SavedViews = {
  template: `
    <q-btn flat dense no-caps class="link" icon="bookmark_border" label="Views" aria-haspopup="dialog">
      <q-menu ref="menu" class="home-menu views-box" role="dialog" aria-label="Saved views" @before-show="onShow()" @show="$refs.name?.focus()">
        <div class="views-menu">
          <p v-if="saved?.problem" class="home-error" role="alert">{{ saved.problem }}</p>
          <p v-else-if="saved && !saved.list.length" class="soft">No view is saved yet.</p>
          <ul v-if="saved?.list.length" class="views-list">
            <li v-for="view in saved.list" :key="view.name">
              <template v-if="asked.name === view.name">
                <span class="view-question">{{ asked.isDeleted ? "Delete" : "Replace" }} “{{ clean(view.name) }}”{{ asked.isDeleted ? "" : " by what is shown now" }}?</span>
                <q-btn flat dense no-caps :color="asked.isDeleted ? 'negative' : 'primary'" :label="asked.isDeleted ? 'Delete' : 'Replace'" @click="answer()"></q-btn>
                <q-btn flat dense no-caps label="Keep" @click="ask('')"></q-btn>
              </template>
              <template v-else>
                <button type="button" class="view-open" :aria-current="isShown(view) ? 'true' : null" :title="decoded(view.address)" @click="open(view)"
                  ><span class="view-mark" aria-hidden="true">{{ isShown(view) ? "✓" : "" }}</span>{{ clean(view.name) }}</button>
                <template v-if="mayChange">
                  <q-btn flat round dense size="sm" class="flat-ink" icon="save" title="replace by what is shown now" :disable="isShown(view)"
                         :aria-label="'Replace the view ' + clean(view.name)" @click="ask(view.name, false)"></q-btn>
                  <q-btn flat round dense size="sm" class="flat-ink" icon="close" title="delete" :aria-label="'Delete the view ' + clean(view.name)" @click="ask(view.name, true)"></q-btn>
                </template>
              </template>
            </li>
          </ul>
          <form v-if="mayChange && saved && !saved.problem" class="views-form" @submit.prevent="save(name)">
            <q-input v-model="name" ref="name" dense outlined :maxlength="${MOST_LETTERS}" placeholder="name of what is shown now" aria-label="Name of the new view"></q-input>
            <q-btn type="submit" unelevated dense no-caps color="primary" :label="isKnown ? 'Replace' : 'Save'" :disable="!name.trim()"></q-btn>
            <label v-if="hasRuns"><input type="checkbox" v-model="withRuns"> with the selected runs</label>
          </form>
        </div>
      </q-menu>
    </q-btn>`,
  props: { saved: Object, address: String, mayChange: Boolean, clean: Function },
  emits: ["ask", "save", "drop", "open"],
  data: () => ({ name: "", withRuns: false, asked: { name: "", isDeleted: false } }),
  computed: {
    isKnown() {
      return this.saved.list.some((view) => view.name === this.name.trim());
    },
    hasRuns() {
      return new URLSearchParams(this.address).has("run");
    },
  },
  methods: {
    onShow() {
      this.ask("");
      this.$emit("ask");
    },
    open(view) {
      this.$refs.menu.hide();
      this.$emit("open", view.address);
    },
    save(name) {
      if (!name.trim()) return;
      this.$emit("save", { name: name.trim(), address: part(this.address, this.withRuns) });
      this.name = "";
    },
    ask(name, isDeleted = false) {
      this.asked = { name, isDeleted };
    },
    answer() {
      const { name, isDeleted } = this.asked;
      this.ask("");
      if (isDeleted) this.$emit("drop", name);
      else this.save(name);
    },
    isShown(view) {
      const withRuns = new URLSearchParams(view.address).has("run");
      return part(view.address, withRuns) === part(this.address, withRuns);
    },
    decoded(address) {
      return this.clean([...new URLSearchParams(address)].map(([name, value]) => `${name}=${value}`).join("  ")) || "everything as usual";
    },
  },
};

// What of an address is saved: not the theme, which is of the one who looks.
function part(address, withRuns) {
  const told = new URLSearchParams(address);
  told.delete("theme");
  if (!withRuns) told.delete("run");
  return told.toString().replaceAll("%2F", "/");
}
