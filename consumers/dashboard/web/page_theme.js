// Dark, light, or as the system has it: the same on every page, and remembered by the browser.
import { storeOf } from "page_settings";

const THEMES = ["auto", "dark", "light"];
const WORDS = { auto: "as the system has it", dark: "dark", light: "light" };
const ICONS = { auto: "brightness_auto", dark: "dark_mode", light: "light_mode" };

export const THEME_BUTTON = `
  <Teleport to="#theme" defer>
    <q-btn flat round dense class="flat-ink" :icon="themeIcon" :aria-label="'Theme: ' + themeWords" @click="nextTheme()"></q-btn>
  </Teleport>`;

export const themed = {
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
  methods: {
    nextTheme() {
      this.theme = THEMES[(THEMES.indexOf(this.theme) + 1) % THEMES.length];
    },
  },
};

// For a component that draws on a canvas: its method onTheme is called when dark becomes light, or the other way round.
export const redrawn = {
  mounted() {
    let dark = isDark();
    this.themes = new MutationObserver(() => {
      // The class is written anew with every update of the page.
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

export function isDark() {
  return document.body.classList.contains("body--dark");
}
