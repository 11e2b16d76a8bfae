// Zooming by the wheel, sixty times a second: while somebody zooms, only that part of the axis is drawn anew, with the
// points that are there, and of the other charts one with each picture. What takes longer is done when the wheel rests.
import { horizontalAxis } from "page_scales";

const SETTLED_MS = 140;
const WHEEL_PIXELS = 400;
const FURTHEST = 120;
const LINE_PIXELS = 16;

// Makes the wheel with Ctrl, and two fingers on a touchpad, zoom into a chart at the place of the pointer.
export function zoomByWheel(board, plot) {
  const onWheel = (event) => {
    if (!event.ctrlKey || !board.zooms(plot)) return;
    event.preventDefault();
    event.stopPropagation();
    const [low, high] = board.extent(plot);
    const [from, to] = board.range || [low, high];
    const place = plot.chart.convertFromPixel({ xAxisIndex: 0 }, event.clientX - plot.element.getBoundingClientRect().left);
    const at = Math.min(Math.max(place, from), to);
    const pixels = event.deltaY * (event.deltaMode ? LINE_PIXELS : 1);
    const factor = Math.exp(Math.min(Math.max(pixels, -FURTHEST), FURTHEST) / WHEEL_PIXELS);
    const range = [Math.max(at - (at - from) * factor, low), Math.min(at + (to - at) * factor, high)];
    // Closer than that numbers of 64 bits are no longer apart.
    if (range[1] - range[0] > 1e-9 * Math.max(Math.abs(low), Math.abs(high))) {
      zoomLightly(board, plot, range[0] <= low && range[1] >= high ? null : range);
    }
  };
  plot.element.addEventListener("wheel", onWheel, { passive: false, capture: true });
  plot.unwheel = () => plot.element.removeEventListener("wheel", onWheel, { capture: true });
}

// Shows that part of the axis in a chart with the next picture, and in all others soon.
export function zoomLightly(board, plot, range) {
  board.range = range;
  board.zoomed = plot;
  clearTimeout(board.settling);
  board.settling = setTimeout(() => settle(board), SETTLED_MS);
  if (board.lightly) return;
  board.lightly = requestAnimationFrame(() => {
    board.lightly = null;
    if (!board.zoomed) return;
    drawLightly(board, board.zoomed);
    const others = board.others(board.zoomed, true);
    if (others.length) drawLightly(board, others[(board.turn = ((board.turn || 0) + 1) % others.length)]);
  });
}

// Whether somebody is zooming at this moment: then what is new waits.
export function isZooming(board) {
  return Boolean(board.zoomed);
}

function drawLightly(board, plot) {
  if (!plot.chart || plot.chart.isDisposed()) return;
  const range = board.range || board.extent(plot);
  const grid = plot.chart.getModel().getComponent("grid").coordinateSystem.getRect();
  const { ticks, text } = horizontalAxis(...range, board.axisOf(plot), grid.width);
  const places = { customValues: ticks };
  board.setting = true;
  plot.chart.setOption(
    {
      dataZoom: [{ id: "zoom", startValue: range[0], endValue: range[1] }],
      xAxis: { axisLabel: { ...places, formatter: text }, axisTick: places },
    },
    { lazyUpdate: true },
  );
  board.setting = false;
  board.moveMarks(plot, range);
}

// Draws everything as it is to be, one chart with each picture, and asks for finer points.
function settle(board) {
  const first = board.zoomed;
  board.zoomed = null;
  board.tell();
  const waiting = [...board.plots].filter(([id]) => board.visible.has(id));
  waiting.sort(([, one], [, other]) => (other === first) - (one === first));
  board.extents = board.range ? board.extents : {};
  const next = () => {
    // Whoever zooms on, or has everything drawn, needs none of these.
    if (board.zoomed || !waiting.length) return;
    const [id] = waiting.shift();
    board.draw(id);
    if (waiting.length) requestAnimationFrame(next);
  };
  next();
}
