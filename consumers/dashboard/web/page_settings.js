import { exploreSettingsOf, tellExploreSettings } from "page_explore_settings";

// How the page is set: in the address, so that it survives a reload and goes along with a link.

export const AXES = ["batch", "sample", "epoch", "time"];
export const NEWEST_FIRST = "-started";
export const MOST_SMOOTHING = 0.99;

export function settingsOf(hash) {
  const given = new URLSearchParams(hash.replace(/^#/, ""));
  const one = (name, known) => (known.includes(given.get(name)) ? given.get(name) : known[0]);
  const smoothing = Number(given.get("smoothing"));
  return {
    x: one("x", AXES),
    smoothing: smoothing > 0 ? Math.min(smoothing, MOST_SMOOTHING) : 0,
    log: given.get("log") === "1",
    find: given.get("find") || "",
    closed: [...new Set(given.getAll("closed"))],
    wide: [...new Set(given.getAll("wide"))],
    pinned: [...new Set(given.getAll("pin"))],
    marks: { 0: false, 1: true }[given.get("marks")] ?? null,
    rank: Number(given.get("rank")) || 0,
  };
}

export function hashOf(settings) {
  const told = new URLSearchParams();
  if (settings.x !== AXES[0]) told.set("x", settings.x);
  if (settings.smoothing) told.set("smoothing", settings.smoothing);
  if (settings.log) told.set("log", "1");
  if (settings.find) told.set("find", settings.find);
  settings.closed.forEach((title) => told.append("closed", title));
  settings.wide.forEach((id) => told.append("wide", id));
  settings.pinned.forEach((id) => told.append("pin", id));
  if (settings.marks !== null) told.set("marks", settings.marks ? "1" : "0");
  if (settings.rank) told.set("rank", settings.rank);
  KEPT.forEach((name) => keptOf(name).forEach((value) => told.append(name, value)));
  return asHash(told);
}

// What other parts of the page keep in its address, by a name of theirs.
const KEPT = ["image", "ranks"];

export function keptOf(name) {
  return new URLSearchParams(location.hash.replace(/^#/, "")).getAll(name);
}

export function keep(name, values) {
  const told = new URLSearchParams(location.hash.replace(/^#/, ""));
  told.delete(name);
  values.forEach((value) => told.append(name, value));
  history.replaceState(history.state, "", asHash(told) || location.pathname + location.search);
}

function asHash(told) {
  const text = told.toString().replaceAll("%2F", "/");
  return text ? "#" + text : "";
}

// The same of the page of all runs: what is looked for, the order, the columns, and what is selected.
export function homeSettingsOf(hash) {
  const given = new URLSearchParams(hash.replace(/^#/, ""));
  return {
    find: given.get("find") || "",
    sort: given.get("sort") || NEWEST_FIRST,
    columns: given.has("column") ? [...new Set(given.getAll("column"))] : null,
    archived: given.get("archived") === "1",
    runs: [...new Set(given.getAll("run"))],
    group: given.get("group") || "",
    folded: given.get("folded") === "1",
    toggled: [...new Set(given.getAll("toggled"))],
    baseline: given.get("baseline") || "",
    ...exploreSettingsOf(given),
  };
}

export function homeHashOf(settings) {
  const told = new URLSearchParams();
  if (settings.find) told.set("find", settings.find);
  if (settings.sort !== NEWEST_FIRST) told.set("sort", settings.sort);
  settings.columns?.forEach((name) => told.append("column", name));
  if (settings.archived) told.set("archived", "1");
  settings.runs.forEach((run) => told.append("run", run));
  if (settings.group) {
    told.set("group", settings.group);
    if (settings.folded) told.set("folded", "1");
    settings.toggled.forEach((text) => told.append("toggled", text));
  }
  if (settings.baseline) told.set("baseline", settings.baseline);
  tellExploreSettings(told, settings);
  return asHash(told);
}

// What the browser keeps: localStorage, or sessionStorage for a tab. Null where it keeps nothing.
export function storeOf(name) {
  try {
    return window[name];
  } catch {
    return null;
  }
}

// The address of all runs as it was last shown in this tab, behind its path.
export const ALL_RUNS = "all runs";
