// Images over the steps of runs: a slider for each name, all runs side by side. The browser loads visible ones.
import { grouped } from "page_text";

const SETTLE_MS = 80;

export default /** @type {Component} */ ({
  template: `
    <div class="galleries">
      <section v-for="gallery in galleries || []" :key="gallery.name" class="gallery" :aria-label="gallery.title">
        <div class="gallery-head">
          <h3>{{ gallery.title }}</h3>
          <input v-if="stepsOf(gallery).length > 1" type="range" min="0" :max="stepsOf(gallery).length - 1" :value="placeOf(gallery)"
                 :aria-label="'Step of ' + gallery.title" :aria-valuetext="'batch ' + stepText(gallery)" @input="choose(gallery, Number($event.target.value))">
          <span class="gallery-step">batch {{ stepText(gallery) }}</span>
          <button v-if="chosen.has(gallery.name)" type="button" class="gallery-newest" :aria-label="'Newest of ' + gallery.title"
                  @click="choose(gallery, stepsOf(gallery).length - 1)">newest</button>
        </div>
        <div class="gallery-runs">
          <figure v-for="one in shownOf(gallery)" :key="one.run.address">
            <figcaption v-if="gallery.runs.length > 1 || one.note">
              <span v-if="gallery.runs.length > 1"><span class="dot" :style="{background: one.run.color}" aria-hidden="true"></span>{{ one.run.label }}</span>
              <span class="soft">{{ one.note }}</span>
            </figcaption>
            <img v-for="place in one.images" :key="place" :src="one.address + (place - 1)" loading="lazy" decoding="async"
                 :alt="one.alt + ', image ' + place + ' of ' + one.count">
          </figure>
        </div>
      </section>
    </div>`,
  props: { galleries: Array },
  data: () => ({
    // Not objects: a name may be that of a member of every object.
    chosen: new Map(), // name -> the chosen step; without one the newest
    drawn: new Map(), // the same, once the slider rests
  }),
  beforeUnmount() {
    clearTimeout(this.settling);
  },
  methods: {
    choose(gallery, place) {
      const steps = this.stepsOf(gallery);
      if (place >= steps.length - 1) this.chosen.delete(gallery.name);
      else this.chosen.set(gallery.name, steps[place]);
      clearTimeout(this.settling);
      this.settling = setTimeout(() => (this.drawn = new Map(this.chosen)), SETTLE_MS);
    },
    stepsOf(gallery) {
      const steps = gallery.runs.length === 1 ? gallery.runs[0].steps : gallery.runs.flatMap((run) => run.steps);
      return gallery.runs.length === 1 ? steps : [...new Set(steps)].sort((one, other) => one - other);
    },
    // A removed step is replaced by the one before it.
    placeOf(gallery, chosen = this.chosen) {
      const steps = this.stepsOf(gallery);
      const step = chosen.get(gallery.name);
      if (step === undefined) return steps.length - 1;
      return Math.max(steps.findLastIndex((one) => one <= step), 0);
    },
    stepText(gallery) {
      return grouped(this.stepsOf(gallery)[this.placeOf(gallery)]);
    },
    shownOf(gallery) {
      const step = this.stepsOf(gallery)[this.placeOf(gallery, this.drawn)];
      return gallery.runs.map((run) => {
        const place = run.steps.findLastIndex((one) => one <= step);
        if (place < 0) return { run, images: 0, note: `nothing before batch ${grouped(run.steps[0])}` };
        const own = run.steps[place];
        const count = run.counts[place];
        const images = Math.min(count, gallery.most);
        const notes = [own === step ? "" : `batch ${grouped(own)}`, images < count ? `${images} of ${count}` : ""];
        const address = `${run.address}?name=${encodeURIComponent(gallery.name)}&step=${own}&place=`;
        const alt = `${gallery.runs.length > 1 ? run.label + ": " : ""}${gallery.title}, batch ${grouped(own)}`;
        return { run, address, count, images, alt, note: notes.filter(Boolean).join(" · ") };
      });
    },
  },
});
