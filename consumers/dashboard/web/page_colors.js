// The colours of runs, or of groups: `run.color` is the number of one among `run.of`. Up to eight have one each by name,
// see --run-0 in page.css; of more, each has a hue, and a kind of line where these are not enough.
import { inkOf, isDark } from "page_theme";

const NAMED = 8;
const HUES = 17;
const DASHES = 3;
const APART = 7; // neighbours in a list are far from one another
const FIRST = 212;

// For what is drawn.
export function colorOf(run) {
  const count = run.of;
  if (run.baseline) return inkOf("--ink");
  if (count <= NAMED) return inkOf(`--run-${run.color % NAMED}`);
  return `hsl(${hueOf(run)}, ${isDark() ? "75%, 66%" : "72%, 40%"})`;
}

// For what is on the page.
export function swatchOf(run) {
  if (run.baseline) return "var(--ink)";
  return run.of <= NAMED ? `var(--run-${run.color % NAMED})` : `hsl(${hueOf(run)} var(--run-tone))`;
}

export function dashOf(run) {
  return run.of <= NAMED ? 0 : Math.floor(run.color / HUES) % DASHES;
}

function hueOf(run) {
  return Math.round(FIRST + (((run.color * APART) % HUES) * 360) / HUES) % 360;
}
