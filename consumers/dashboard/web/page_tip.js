// The box at the pointer: what the lines of a chart are at its place, nearest lines first, and the marks there.
const MOST_ROWS = 8;
const GAP = 16;

let tip = null;

// At so many pixels of an element; `rows` are {x, y, apart, run, cells: {color, name, value, more}}, `marks` {color, text, when}.
export function showTip(element, left, top, { rows, focused, marks, placeText }) {
  if (!rows.length && !marks.length) return hideTip();
  const near = [...rows].sort((one, other) => one.apart - other.apart);
  const shown = near.slice(0, MOST_ROWS).sort((one, other) => other.y - one.y);
  tip ||= document.body.appendChild(made("div", "tip chart-tip"));
  tip.replaceChildren();
  if (near.length) {
    tip.append(made("div", "", placeText((near.find(({ run }) => run === focused) || near[0]).x)));
    const table = tip.appendChild(made("table", ""));
    for (const { run, cells } of shown) {
      const row = table.appendChild(made("tr", rows.length > 1 && run === focused ? "nearest" : ""));
      const name = row.appendChild(made("td", ""));
      name.append(dotOf(cells.color), cells.name);
      row.append(made("td", "number", cells.value), made("td", "at", cells.more));
    }
    if (near.length > shown.length) tip.append(made("div", "at", `and ${near.length - shown.length} more`));
  }
  for (const mark of marks.slice(0, MOST_ROWS)) {
    const row = tip.appendChild(made("div", "at-mark"));
    row.append(dotOf(mark.color), mark.text, " ", made("span", "at", mark.when));
  }
  if (marks.length > MOST_ROWS) tip.append(made("div", "at", `and ${marks.length - MOST_ROWS} more`));
  const box = element.getBoundingClientRect();
  const [x, y] = [box.left + left, box.top + top];
  const { offsetWidth: width, offsetHeight: height } = tip;
  const isRight = x + GAP + width <= window.innerWidth;
  tip.style.left = `${Math.max(isRight ? x + GAP : x - GAP - width, 0)}px`;
  tip.style.top = `${Math.max(Math.min(y + GAP, window.innerHeight - height - 4), 0)}px`;
}

export function hideTip() {
  tip?.remove();
  tip = null;
}

function made(tag, className, text = "") {
  return Object.assign(document.createElement(tag), { className, textContent: text });
}

function dotOf(color) {
  const dot = made("span", "dot");
  dot.style.background = color;
  return dot;
}
