// The menu of a chart, and the charts that are pinned: a group at the top, in the order in which people put them. A
// component that mixes this in has settings and shownGroups.

const MENU_WIDTH = 200;
const EDGE = 8;
const OUTSIDE = ["pointerdown", "scroll"];

export const MENU = `
  <div v-if="menu" ref="menu" class="chart-menu" role="menu" :aria-label="'Menu of ' + menu.chart.title"
       :style="{left: menu.left + 'px', top: menu.top + 'px'}" @keydown="onMenuKey($event)">
    <template v-for="item in menuItems" :key="item.label">
      <hr v-if="item.begins">
      <button type="button" role="menuitem" tabindex="-1" @click="doMenu(item)">{{ item.label }}</button>
    </template>
  </div>
  <span class="sr-only" role="status">{{ said }}</span>`;

// The groups with the pinned charts taken out of theirs.
export function withPinned(groups, pinned) {
  const known = new Map(groups.flatMap((group) => group.charts).map((chart) => [chart.id, chart]));
  const chosen = pinned.filter((id) => known.has(id)).map((id) => known.get(id));
  if (!chosen.length) return groups;
  const rest = groups
    .map((group) => ({ ...group, charts: group.charts.filter((chart) => !pinned.includes(chart.id)) }))
    .filter((group) => group.charts.length);
  return [{ title: "pinned", isPinned: true, charts: chosen }, ...rest];
}

export const pinnable = {
  data: () => ({ menu: null, drag: null, said: "" }),
  computed: {
    pinnedShown() {
      return this.shownGroups.find((group) => group.isPinned)?.charts.map((chart) => chart.id) || [];
    },
    menuItems() {
      const { chart } = this.menu;
      const place = this.pinnedShown.indexOf(chart.id);
      const isPinned = this.settings.pinned.includes(chart.id);
      const items = [{ label: isPinned ? "Unpin" : "Pin to the top", do: () => this.pin(chart) }];
      if (place > 0) items.push({ label: "Move left", do: () => this.move(chart, place - 1, false) });
      if (place >= 0 && place + 1 < this.pinnedShown.length) {
        items.push({ label: "Move right", do: () => this.move(chart, place + 1, true) });
      }
      items.push({ label: this.isWide(chart) ? "Make smaller" : "Make larger", do: () => this.toggle(this.settings.wide, chart.id) });
      if (this.cut.get(chart.id) || this.all.get(chart.id)) {
        items.push({ label: this.all.get(chart.id) ? "Cut off outliers" : "Show all values", do: () => this.showAll(chart.id) });
      }
      return [...items, ...this.exportItems(chart)];
    },
  },
  mounted() {
    this.onOutside = (event) => this.menu && !this.$refs.menu?.contains(event.target) && this.closeMenu(false);
    for (const kind of OUTSIDE) document.addEventListener(kind, this.onOutside, { capture: true, passive: true });
  },
  beforeUnmount() {
    for (const kind of OUTSIDE) document.removeEventListener(kind, this.onOutside, { capture: true });
  },
  methods: {
    async openMenu(chart, event) {
      const button = event.currentTarget.getBoundingClientRect();
      this.menu = { chart, left: Math.max(button.right - MENU_WIDTH, EDGE), top: button.bottom + 2 };
      await this.$nextTick();
      const height = this.$refs.menu.offsetHeight;
      if (button.bottom + height > window.innerHeight) this.menu.top = Math.max(button.top - height - 2, EDGE);
      this.$refs.menu.querySelector("[role=menuitem]").focus({ preventScroll: true });
    },
    doMenu(item) {
      item.do();
      this.closeMenu(true);
    },
    async closeMenu(isLeft) {
      const id = this.menu?.chart.id;
      this.menu = null;
      if (!isLeft) return;
      // The chart may be elsewhere by then.
      await this.$nextTick();
      const figure = [...this.$el.querySelectorAll(".chart")].find((one) => one.dataset.chart === id);
      figure?.querySelector(".menu-button").focus();
    },
    onMenuKey(event) {
      const items = [...event.currentTarget.querySelectorAll("[role=menuitem]")];
      const place = items.indexOf(document.activeElement);
      const next = { ArrowDown: place + 1, ArrowUp: place - 1, Home: 0, End: items.length - 1 }[event.key];
      if (next !== undefined) items.at(next % items.length).focus();
      else if (event.key === "Escape" || event.key === "Tab") this.closeMenu(true);
      else return;
      event.preventDefault();
      event.stopPropagation();
    },
    pin(chart) {
      this.toggle(this.settings.pinned, chart.id);
      this.said = `${chart.title} is ${this.settings.pinned.includes(chart.id) ? "pinned" : "no longer pinned"}`;
    },
    move(chart, place, behind) {
      this.putBeside(chart.id, this.pinnedShown[place], behind);
      this.said = `${chart.title} is pinned chart ${place + 1} of ${this.pinnedShown.length}`;
    },
    // Others that are pinned may not be here: no run on the page has them.
    putBeside(id, other, behind) {
      const rest = this.settings.pinned.filter((one) => one !== id);
      rest.splice(rest.indexOf(other) + (behind ? 1 : 0), 0, id);
      this.settings.pinned = rest;
    },
    // What the figure of a pinned chart listens to.
    dragOf(group, chart) {
      if (!group.isPinned) return {};
      return {
        dragstart: (event) => {
          this.drag = { id: chart.id };
          event.dataTransfer.effectAllowed = "move";
          event.dataTransfer.setData("text/plain", chart.title);
        },
        dragover: (event) => {
          if (!this.drag) return;
          event.preventDefault();
          const rect = event.currentTarget.getBoundingClientRect();
          const behind = event.clientX > rect.left + rect.width / 2;
          if (this.drag.over !== chart.id || this.drag.behind !== behind) this.drag = { ...this.drag, over: chart.id, behind };
        },
        drop: (event) => {
          event.preventDefault();
          if (this.drag && this.drag.id !== chart.id) this.putBeside(this.drag.id, chart.id, this.drag.behind);
          this.drag = null;
        },
        dragend: () => (this.drag = null),
      };
    },
    dropClass(chart) {
      if (this.drag?.over !== chart.id || this.drag.id === chart.id) return "";
      return this.drag.behind ? "drop-behind" : "drop-before";
    },
  },
};
