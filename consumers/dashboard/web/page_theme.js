// The theme (dark, light, or the system's), which the browser remembers, and common parts of pages.
import { storeOf } from "page_settings";

const PAINTED_MS = 1000;
const THEMES = ["auto", "dark", "light"];
const WORDS = { auto: "as the system has it", dark: "dark", light: "light" };
const ICONS = { auto: "brightness_auto", dark: "dark_mode", light: "light_mode" };

export const THEME_BUTTON = `
  <Teleport to="#theme" defer>
    <q-btn flat round dense class="flat-ink" :icon="themeIcon" :aria-label="'Theme: ' + themeWords" @click="nextTheme()"></q-btn>
  </Teleport>`;

// A whole page. Its component has onLink (a new hash in the address), look (what is visible; null once the page is gone),
// settleMs if its event "look" is to wait, and onOwnKey, which returns true for a handled key.
/** @type {Component} */
export const paged = {
  data: () => ({ theme: THEMES.find((theme) => theme === storeOf("localStorage")?.getItem("theme")) || THEMES[0] }),
  computed: {
    themeIcon() {
      return ICONS[this.theme];
    },
    themeWords() {
      return WORDS[this.theme];
    },
  },
  watch: {
    theme: {
      immediate: true,
      handler(theme) {
        setDark(theme === "auto" ? null : theme === "dark");
        storeOf("localStorage")?.setItem("theme", theme);
      },
    },
  },
  mounted() {
    this.onVisibility = () => this.tell();
    document.addEventListener("visibilitychange", this.onVisibility);
    window.addEventListener("keydown", this.onShortcut);
    window.addEventListener("hashchange", this.onLink);
  },
  beforeUnmount() {
    document.removeEventListener("visibilitychange", this.onVisibility);
    window.removeEventListener("keydown", this.onShortcut);
    window.removeEventListener("hashchange", this.onLink);
  },
  methods: {
    // Reports what is visible, if it has changed.
    tell(wait = this.settleMs) {
      clearTimeout(this.telling);
      this.telling = setTimeout(() => {
        const look = this.look();
        const text = JSON.stringify(look);
        if (!look || text === this.told) return;
        this.told = text;
        this.$emit("look", look);
      }, wait);
    },
    nextTheme() {
      this.theme = THEMES[(THEMES.indexOf(this.theme) + 1) % THEMES.length];
    },
    onShortcut(event) {
      if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest?.("input, select, textarea")) return;
      if (event.key === "/") this.$refs.find.focus();
      else if (event.key === "d") this.nextTheme();
      else if (event.key === "?") this.$emit("help");
      else if (!this.onOwnKey?.(event.key)) return;
      event.preventDefault();
    },
  },
};

// For a component with a canvas: its method onTheme is called after a change of the theme.
export const redrawn = {
  mounted() {
    let dark = isDark();
    this.themes = new MutationObserver(() => {
      // Every update of the page writes the class again.
      if (isDark() === dark) return;
      dark = isDark();
      this.onTheme();
    });
    this.themes.observe(document.body, { attributeFilter: ["class"] });
  },
  beforeUnmount() {
    this.themes.disconnect();
  },
};

// For a component that asks for its data while it is on the screen, or nearer to it than its option `margin`: its method
// look is called when that changes.
export const watched = {
  mounted() {
    this.observer = new IntersectionObserver((entries) => {
      this.isOnScreen = entries.at(-1).isIntersecting;
      this.look();
    }, { rootMargin: this.$options.margin });
    this.observer.observe(this.$el);
    document.addEventListener("visibilitychange", this.look);
  },
  beforeUnmount() {
    this.isOnScreen = false;
    clearTimeout(this.looking);
    this.observer.disconnect();
    document.removeEventListener("visibilitychange", this.look);
  },
  methods: {
    // Returns what the server answers; nothing if it cannot, or for an unseen component.
    async answerOf(address) {
      if (!this.isOnScreen || document.hidden || !this.runs.length) return null;
      const answer = await fetch(address).catch(() => null);
      return answer?.ok ? answer.json() : null;
    },
    lookAgain(milliseconds) {
      clearTimeout(this.looking);
      if (this.isOnScreen && !document.hidden) this.looking = setTimeout(() => this.look(), milliseconds);
    },
  },
};

export function isDark() {
  return document.body.classList.contains("body--dark");
}

// The colour of a run or group for a canvas, without variables.
export function colorOf({ color }) {
  return color.replace(/var\((--[a-z0-9-]+)\)/, (_, name) => inkOf(name)).replace(/(?<=\d%?) /g, ", ");
}

// A partly transparent colour for a canvas.
export function faded(color, share) {
  return `color-mix(in srgb, ${color} ${100 * share}%, transparent)`;
}

export function inkOf(name) {
  return getComputedStyle(document.body).getPropertyValue(name).trim();
}

// Resolves after the next frame with its seconds, without the wait for the screen. A hidden page has no frames.
export function painted() {
  return new Promise((resolve) => {
    setTimeout(resolve, PAINTED_MS, 0);
    requestAnimationFrame((began) => setTimeout(() => resolve((performance.now() - began) / 1000)));
  });
}
