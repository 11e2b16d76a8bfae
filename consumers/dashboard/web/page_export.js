// A chart as a file: a picture of what it shows, or all values behind it, which the server has. A component that mixes
// this in has plots, runs, settings, optionOf and marksIn.
import { echarts } from "nicegui-echart";
import { FAINT, withoutCrowds } from "page_marks";
import { colorOf, inkOf } from "page_theme";

const TITLE_HEIGHT = 34;
const LEGEND_ROW = 18;
const LEGEND_ICON = 30;
const LETTER_PIXELS = 6.6;
const AXIS_NAME = 20;
const EDGE = 10;
const PIXEL_RATIO = 2;
const LABEL_ROOM = 60;
const MOST_NAMED = 24;
const UNLABELLED = ["evaluation"]; // there are many, and all alike
const LONGEST_NAME = 100;
const REVOKE_MS = 60000;

export const exporting = {
  props: { exports: String },
  methods: {
    exportItems(chart) {
      return [
        { label: "Save as PNG", begins: true, do: () => this.savePicture(chart) },
        { label: "Save all values as CSV", do: () => this.saveValues(chart) },
      ];
    },
    saveValues(chart) {
      const name = chart.kind === "phases" ? `${chart.id}/${this.rankOf(chart)}` : chart.id;
      save(`${this.exports}?chart=${encodeURIComponent(name)}`, "");
    },
    savePicture(chart) {
      const { option, width, height, background } = this.pictureOf(chart);
      const drawn = echarts.init(document.createElement("div"), null, { renderer: "canvas", width, height });
      drawn.setOption(option);
      const canvas = drawn.getRenderedCanvas({ pixelRatio: PIXEL_RATIO, backgroundColor: background });
      canvas.toBlob((blob) => {
        saveBlob(blob, `${this.fileName(chart)}.png`);
        drawn.dispose();
      });
    },
    // What the chart shows, with a title, a legend and the axis' name, as an option of ECharts.
    pictureOf(chart) {
      const plot = this.plots.get(chart.id);
      const { tooltip, dataZoom: [zoom], toolbox, ...shown } = this.optionOf(chart.id, plot);
      const [ink, soft, background] = ["--ink", "--ink-soft", "--card"].map(inkOf);
      const [width, plotHeight] = [plot.element.clientWidth + 2 * EDGE, plot.element.clientHeight];
      const { fontFamily } = getComputedStyle(document.body);
      const isPhases = plot.kind === "phases";
      const lines = isPhases ? [] : this.shownLines(chart.id).filter(({ run }) => !run.faint);
      const named = lines.slice(0, MOST_NAMED).map(({ run, color }) => [run.label, color]);
      if (lines.length > MOST_NAMED) named.push([`and ${lines.length - MOST_NAMED} more`, "transparent"]);
      const names = [...new Set(isPhases ? shown.series.filter((one) => one.type === "line").map((one) => one.name) : named.map(([name]) => name))];
      const rows = isPhases ? 0 : rowsOf(names, width - 2 * EDGE);
      const head = TITLE_HEIGHT + rows * LEGEND_ROW;
      const grid = {
        ...shown.grid, top: shown.grid.top + head, bottom: shown.grid.bottom + AXIS_NAME,
        left: shown.grid.left + EDGE, right: shown.grid.right + EDGE,
      };
      const legend = {
        data: names, icon: "rect", itemWidth: 16, itemHeight: 3, itemGap: 12, textStyle: { color: soft, fontSize: 11 },
        ...(isPhases ? { bottom: 6, left: "center" } : { top: TITLE_HEIGHT, left: EDGE, right: EDGE }),
      };
      const axisName = { nameLocation: "middle", nameGap: 26, nameTextStyle: { color: soft, fontSize: 11 } };
      const option = {
        ...shown, grid, legend, animation: false, textStyle: { fontFamily },
        title: { text: chart.ranks.length > 1 ? `${chart.title}, rank ${this.rankOf(chart)}` : chart.title, left: EDGE, top: 8, textStyle: { color: ink, fontSize: 14, fontWeight: 600, fontFamily } },
        xAxis: { ...shown.xAxis, min: zoom.startValue, max: zoom.endValue, name: isPhases ? "batch" : this.settings.x, ...axisName },
        // The legend goes by lines, which many runs are not drawn as.
        series: [...shown.series, ...named.map(([name, color]) => ({ type: "line", name, color, data: [] })), this.markSeries(plot, soft)],
      };
      return { option, width, height: plotHeight + head + AXIS_NAME, background };
    },
    markSeries(plot, ink) {
      const found = plot.area ? withoutCrowds(this.marksIn(plot)) : [];
      let labelled = -LABEL_ROOM;
      const data = found.map(({ run, mark: [kind], at, pixel }) => {
        const hasLabel = !UNLABELLED.includes(kind) && pixel - labelled >= LABEL_ROOM;
        if (hasLabel) labelled = pixel;
        const color = colorOf(run);
        const opacity = FAINT.includes(kind) ? 0.35 : 0.8;
        return { xAxis: at, label: { show: hasLabel, formatter: kind, color: ink, opacity: 1 }, lineStyle: { color, opacity } };
      });
      return {
        type: "line", name: "marks", data: [], yAxisIndex: 1,
        markLine: {
          silent: true, symbol: "none", animation: false, data, lineStyle: { width: 1, type: [3, 3] },
          label: { position: "end", distance: 2, fontSize: 9 },
        },
      };
    },
    fileName(chart) {
      const runs = this.runs.filter((run) => !this.hidden[run.id]);
      const name = `${runs.length === 1 ? runs[0].label : `${runs.length}-runs`}-${chart.id}`;
      return name.replace(/[^A-Za-z0-9._-]+/g, "-").replace(/^[-.]+|[-.]+$/g, "").slice(0, LONGEST_NAME) || "chart";
    },
  },
};

function rowsOf(names, width) {
  let [rows, used] = [1, 0];
  for (const name of names) {
    const needed = LEGEND_ICON + LETTER_PIXELS * name.length;
    if (used && used + needed > width) [rows, used] = [rows + 1, 0];
    used += needed;
  }
  return rows;
}

function saveBlob(blob, name) {
  const url = URL.createObjectURL(blob);
  save(url, name);
  setTimeout(() => URL.revokeObjectURL(url), REVOKE_MS);
}

function save(url, name) {
  const link = document.createElement("a");
  link.href = url;
  link.download = name;
  link.click();
}
