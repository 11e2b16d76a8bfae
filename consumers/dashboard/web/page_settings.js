// The settings of a page, in its address, so that they survive a reload and are part of a link.

export const AXES = ["batch", "sample", "epoch", "time"];
export const VIEWS = ["table", "scatter", "parallel"];
export const MOST_SMOOTHING = 0.99;

// A kind of setting reads its value from the address, and writes it unless it is the default.
const FLAG = { read: (given, name) => given.get(name) === "1", write: (params, name, value) => value && params.set(name, "1") };
const TEXT = textOr("");
const LIST = { read: (given, name) => [...new Set(given.getAll(name))], write: (params, name, value) => value?.forEach((one) => params.append(name, one)) };
const LIST_OR_NONE = { ...LIST, read: (given, name) => (given.has(name) ? LIST.read(given, name) : null) };
const FLAG_OR_NONE = { read: (given, name) => ({ 0: false, 1: true })[given.get(name)] ?? null, write: (params, name, value) => value !== null && params.set(name, Number(value)) };

function textOr(usual) {
  return { read: (given, name) => given.get(name) || usual, write: (params, name, value) => value && value !== usual && params.set(name, value) };
}

function oneOf(known) {
  return { ...textOr(known[0]), read: (given, name) => known.find((one) => one === given.get(name)) || known[0] };
}

function numberTo(most) {
  return { read: (given, name) => Math.max(Math.min(Number(given.get(name)) || 0, most), 0), write: (params, name, value) => value && params.set(name, value) };
}

// Setting to its name in the address, and its kind.
const OF_CHARTS = {
  x: ["x", oneOf(AXES)], smoothing: ["smoothing", numberTo(MOST_SMOOTHING)], log: ["log", FLAG], find: ["find", TEXT], closed: ["closed", LIST],
  wide: ["wide", LIST], pinned: ["pin", LIST], marks: ["marks", FLAG_OR_NONE], rank: ["rank", numberTo(Infinity)],
};
// A column without a name is the default.
const OF_HOME = {
  find: ["find", TEXT], sort: ["sort", textOr("-started")], columns: ["column", LIST_OR_NONE], archived: ["archived", FLAG], runs: ["run", LIST],
  group: ["group", TEXT], folded: ["folded", FLAG], toggled: ["toggled", LIST], baseline: ["baseline", TEXT],
  view: ["view", oneOf(VIEWS)], x: ["x", TEXT], y: ["y", TEXT], color: ["color", TEXT], axes: ["axis", LIST_OR_NONE],
};
// A setting of the panel of ranks.
const KEPT = "ranks";

function read(form, hash) {
  const given = new URLSearchParams(hash.replace(/^#/, ""));
  return Object.fromEntries(Object.entries(form).map(([key, [name, kind]]) => [key, kind.read(given, name)]));
}

function written(form, settings) {
  const params = new URLSearchParams();
  for (const [key, [name, kind]] of Object.entries(form)) kind.write(params, name, settings[key]);
  return params;
}

function asHash(params) {
  const text = params.toString().replaceAll("%2F", "/");
  return text ? "#" + text : "";
}

export function settingsOf(hash) {
  return read(OF_CHARTS, hash);
}

export function hashOf(settings) {
  const params = written(OF_CHARTS, settings);
  keptOf(KEPT).forEach((value) => params.append(KEPT, value));
  return asHash(params);
}

export function homeSettingsOf(hash) {
  return read(OF_HOME, hash);
}

export function homeHashOf(settings) {
  return asHash(written(OF_HOME, settings.group ? settings : { ...settings, folded: false, toggled: [] }));
}

export function keptOf(name) {
  return new URLSearchParams(location.hash.replace(/^#/, "")).getAll(name);
}

export function keep(name, values) {
  const params = new URLSearchParams(location.hash.replace(/^#/, ""));
  params.delete(name);
  values.forEach((value) => params.append(name, value));
  history.replaceState(history.state, "", asHash(params) || location.pathname + location.search);
}

// A list without a text, or with it at the end if it was not in it.
export function toggled(list, text) {
  return list.includes(text) ? list.filter((one) => one !== text) : [...list, text];
}

// The browser's localStorage, or sessionStorage of a tab; null without one.
export function storeOf(name) {
  try {
    return /** @type {any} */ (window)[name];
  } catch {
    return null;
  }
}

// Key of the last address of all runs in this tab, after its path.
export const ALL_RUNS = "all runs";
