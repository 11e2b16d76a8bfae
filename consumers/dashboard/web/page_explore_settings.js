// What the views beside the table show, as it stands in the address.

export const VIEWS = ["table", "scatter", "parallel"];

// A column without a name is the usual one.
export function exploreSettingsOf(given) {
  return {
    view: VIEWS.includes(given.get("view")) ? given.get("view") : VIEWS[0],
    x: given.get("x") || "",
    y: given.get("y") || "",
    color: given.get("color") || "",
    axes: given.has("axis") ? [...new Set(given.getAll("axis"))] : null,
  };
}

export function tellExploreSettings(told, settings) {
  if (settings.view !== VIEWS[0]) told.set("view", settings.view);
  for (const name of ["x", "y", "color"]) if (settings[name]) told.set(name, settings[name]);
  settings.axes?.forEach((one) => told.append("axis", one));
}

// What the server is told of them.
export function exploreLookOf({ view, x, y, color, axes }) {
  return view === VIEWS[0] ? null : { view, x, y, color, axes };
}
