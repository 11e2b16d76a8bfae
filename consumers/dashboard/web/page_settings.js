// How the page is set: in the address, so that it survives a reload and goes along with a link.

export const AXES = ["batch", "sample", "epoch", "time"];
export const THEMES = ["auto", "dark", "light"];
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
    theme: one("theme", THEMES),
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
  if (settings.theme !== THEMES[0]) told.set("theme", settings.theme);
  const text = told.toString().replaceAll("%2F", "/");
  return text ? "#" + text : "";
}
