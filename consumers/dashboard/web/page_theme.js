// Dark, light, or as the system has it: the same on every page. A component that mixes it in has `settings.theme`.
import { THEMES } from "page_settings";

const WORDS = { auto: "as the system has it", dark: "dark", light: "light" };
const ICONS = { auto: "brightness_auto", dark: "dark_mode", light: "light_mode" };

export const THEME_BUTTON = `
  <Teleport to="#theme" defer>
    <q-btn flat round dense class="flat-ink" :icon="themeIcon" :aria-label="'Theme: ' + themeWords" @click="nextTheme()"></q-btn>
  </Teleport>`;

export const themed = {
  computed: {
    themeIcon() {
      return ICONS[this.settings.theme];
    },
    themeWords() {
      return WORDS[this.settings.theme];
    },
  },
  watch: {
    "settings.theme": {
      immediate: true,
      handler(theme) {
        setDark(theme === "auto" ? null : theme === "dark");
      },
    },
  },
  methods: {
    nextTheme() {
      this.settings.theme = THEMES[(THEMES.indexOf(this.settings.theme) + 1) % THEMES.length];
    },
  },
};

export function isDark() {
  return document.body.classList.contains("body--dark");
}
