// Shows values at the pointer. All else of the file works without scripts.
const tip = document.createElement("div");
tip.className = "tip";

function linesOf(plot) {
  return [...plot.querySelectorAll(".line")].map((line) => {
    line.querySelector("title")?.remove(); // its tooltip would be above this one
    const places = [...line.querySelector("path").getAttribute("d").matchAll(/[ML]([^,]+)/g)].map(([, x]) => Number(x));
    const points = line.dataset.points.split(",").map((point) => point.split(" ").map(Number));
    return { name: line.dataset.name, color: line.classList[1], places, points };
  });
}

function valueText(value, scale) {
  const [factor, suffix] = scale.findLast(([size]) => size <= Math.abs(value)) || scale[0] || [1, ""];
  return (value / factor).toLocaleString("en", { maximumSignificantDigits: 4 }) + suffix;
}

for (const plot of /** @type {NodeListOf<SVGSVGElement>} */ (document.querySelectorAll("svg.plot"))) {
  const scale = JSON.parse(plot.dataset.scale);
  const ground = plot.querySelector("rect");
  const cursor = document.createElementNS("http://www.w3.org/2000/svg", "path");
  cursor.classList.add("cursor");
  let lines = null;
  plot.addEventListener("pointermove", (event) => {
    lines ||= linesOf(plot).filter(({ places }) => places.length);
    if (!lines.length) return;
    const { x } = new DOMPoint(event.clientX, event.clientY).matrixTransform(ground.getScreenCTM().inverse());
    const apart = (place) => Math.abs(place - x);
    const near = lines.map(({ places }) => places.reduce((best, place, index) => (apart(place) < apart(places[best]) ? index : best), 0));
    const first = near.reduce((best, index, line) => (apart(lines[line].places[index]) < apart(lines[best].places[near[best]]) ? line : best), 0);
    tip.replaceChildren(`step ${lines[first].points[near[first]][0].toLocaleString("en")}`);
    lines.forEach(({ name, color, points }, line) => {
      const row = tip.appendChild(document.createElement("div"));
      row.appendChild(document.createElement("span")).className = `dot ${color}`;
      row.append(`${name} ${valueText(points[near[line]][1], scale)}`);
    });
    document.body.append(tip);
    tip.style.left = `${Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8)}px`;
    tip.style.top = `${Math.min(event.clientY + 14, innerHeight - tip.offsetHeight - 8)}px`;
    cursor.setAttribute("d", `M${lines[first].places[near[first]]},0V${plot.viewBox.baseVal.height}`);
    plot.append(cursor);
  });
  plot.addEventListener("pointerleave", () => {
    tip.remove();
    cursor.remove();
  });
}
