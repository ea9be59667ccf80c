"use strict";
(() => {
  const root = document.documentElement;
  const data = JSON.parse(document.getElementById("data").textContent);
  const plots = new Map(); // figure -> {u, spec, prefix}

  const colour = (name) => getComputedStyle(root).getPropertyValue(name).trim();
  const shade = (name, percent) => `color-mix(in srgb, ${colour(name)} ${percent}%, transparent)`;

  const number = (v) => {
    if (v === null || v === undefined) return "–";
    const size = Math.abs(v);
    if (size >= 1e6) return (v / 1e6).toPrecision(3) + " M";
    if (size >= 100) return Math.round(v).toLocaleString("en-US");
    if (size >= 1e-3 || v === 0) return String(Number(v.toPrecision(4)));
    return v.toExponential(1);
  };

  addEventListener("scheme", () => {
    for (const { u } of plots.values()) u.redraw(false);
  });
  addEventListener("beforeprint", () => {
    for (const details of document.querySelectorAll("details.one")) details.open = true;
    for (const figure of document.querySelectorAll("figure[data-chart]")) draw(figure);
  });

  // Curves of a chart -> columns for uPlot. A stacked chart is summed from the top down, over what is switched on.
  // On a log scale the charts without a unit (loss, gradient norm, rate) hold logarithms, and the axis their values.
  let log = false;
  const logged = (spec) => log && !spec.stacked && !spec.unit;
  // Smoothed curves have what was measured behind them, faint; what is read is what was measured.
  let smooth = true;
  const smoothes = (spec, s) => smooth && spec.id !== "learning_rate" && !s.dots && !s.faint && spec.x.length >= 40;
  const trail = (values) => {
    const keep = 1 - Math.min(1, 80 / values.filter((v) => v !== null).length);
    let total = 0, norm = 0;
    return values.map((v) => {
      if (v === null) return null;
      total = total * keep + v * (1 - keep);
      norm = norm * keep + (1 - keep);
      return total / norm;
    });
  };
  // From both ends: a curve that only knows what came before lags behind.
  const mean = (values) => {
    const back = trail([...values].reverse()).reverse();
    return trail(values).map((v, i) => (v === null ? null : (v + back[i]) / 2));
  };
  const columns = (spec, on) => {
    const values = spec.series.map((s) => s.values);
    if (!spec.stacked) {
      const all = [...spec.series.map((s) => (smoothes(spec, s) ? mean(s.values) : s.values)), ...values,
        ...spec.series.flatMap((s) => (s.least ? [s.least, s.most] : []))];
      return [spec.x, ...(logged(spec) ? all.map((each) => each.map((v) => (v > 0 ? Math.log10(v) : null))) : all)];
    }
    const sum = new Array(spec.x.length).fill(0);
    const stacked = values.map((column, i) =>
      column.map((v, at) => (on[i] ? (sum[at] += v || 0) : null)));
    return [spec.x, ...stacked];
  };

  // What the curves are drawn over: steps, or what every run has besides. Runs that are compared have points of their own.
  const axes = Object.keys(data.axes["r0-"] || {}).filter((name) => Object.values(data.axes).every((of) => of[name]));
  let axis = "step";
  const lay = (spec, prefix) => {
    const from = (spec.base ||= { x: spec.x, series: spec.series });
    const own = data.axes[prefix];
    if (axis === "step") return Object.assign(spec, from);
    if (own) return Object.assign(spec, { x: own[axis] });
    const places = from.series.map((s) => {
      const of = data.axes[`r${s.run}-`];
      return new Map(of.step.map((step, i) => [step, of[axis][i]]));
    });
    const x = [...new Set(places.flatMap((place) => [...place.values()]))].sort((a, b) => a - b);
    const series = from.series.map((s, i) => {
      const at = new Map(s.values.map((v, n) => [places[i].get(from.x[n]), v]));
      return { ...s, values: x.map((v) => at.get(v) ?? null) };
    });
    return Object.assign(spec, { x, series });
  };

  // One stretch of steps for every chart; null is all of them. Runs of other lengths show what they have of it.
  const everywhere = (min, max) => {
    for (const { u } of plots.values()) {
      const x = u.data[0];
      const first = x[0], last = x[x.length - 1];
      const low = min === null ? first : Math.max(min, first), high = max === null ? last : Math.min(max, last);
      if (low < high || first === last) u.setScale("x", { min: low, max: high });
    }
    document.getElementById("reset").disabled = min === null;
  };

  const marks = (prefix) => (u) => {
    const { ctx, bbox } = u;
    for (const mark of data.marks[prefix] || []) {
      const x = u.data[0], place = axis === "step" ? mark.step : x[data.axes[prefix].step.findIndex((s) => s >= mark.step)];
      if (!(place >= u.scales.x.min && place <= u.scales.x.max)) continue;
      const at = Math.round(u.valToPos(place, "x", true));
      ctx.save();
      ctx.strokeStyle = colour("--bad");
      ctx.lineWidth = devicePixelRatio;
      ctx.setLineDash([3 * devicePixelRatio, 3 * devicePixelRatio]);
      ctx.beginPath();
      ctx.moveTo(at, bbox.top);
      ctx.lineTo(at, bbox.top + bbox.height);
      ctx.stroke();
      ctx.restore();
    }
  };

  const options = (figure, spec, prefix, on, size) => {
    const count = spec.series.length;
    const lines = spec.series.map((s, i) => {
      const name = `--s${i % 8}`;
      return {
        label: s.label,
        stroke: () => (s.faint ? shade(name, 55) : colour(name)),
        width: s.faint ? 1 : 1.75,
        fill: spec.stacked ? () => shade(name, 78) : undefined,
        points: { show: s.dots ? true : spec.x.length < 2, size: s.dots ? 7 : 5, fill: () => colour(name), stroke: () => colour("--paper") },
        spanGaps: true,
      };
    });
    const bands = [];
    const measured = (s, i) => ({ stroke: () => (on[i] && smoothes(spec, s) ? shade(`--s${i % 8}`, 38) : "transparent"), width: 1, points: { show: false }, spanGaps: true });
    const edges = spec.stacked ? [] : spec.series.map(measured);
    spec.series.forEach((s, i) => {
      if (!s.least || spec.stacked) return;
      const low = 1 + count + edges.length;
      const edge = { stroke: () => (on[i] ? shade(`--s${i % 8}`, 32) : "transparent"), width: 1, points: { show: false }, spanGaps: true };
      edges.push(edge, edge);
      bands.push({ series: [low + 1, low], fill: () => (on[i] ? shade(`--s${i % 8}`, 15) : "transparent") });
    });
    if (spec.stacked) for (let i = count; i > 1; i--) bands.push({ series: [i, i - 1], fill: () => shade(`--s${(i - 1) % 8}`, 78) });
    const grid = {
      stroke: () => colour("--soft"), font: "11px system-ui, sans-serif",
      grid: { stroke: () => colour("--line"), width: 1 }, ticks: { show: false },
    };
    return {
      ...size, legend: { show: false }, series: [{}, ...lines, ...edges], bands,
      scales: { x: { time: false, range: (u, min, max) => (min === max ? [min - 1, max + 1] : [min, max]) },
        y: { range: (u, min, max) => {
          if (min === null || max === null) return [0, 1];
          if (spec.stacked || (!logged(spec) && min >= 0 && (spec.unit || min < max * 0.4))) return [0, max * 1.06 || 1];
          const pad = (max - min) * 0.08 || Math.abs(max) * 0.05 || 1;
          return [min - pad, max + pad];
        } } },
      axes: [
        { ...grid, label: () => axis, labelSize: 15, labelFont: grid.font, labelGap: -4, size: 26, space: 70, values: (u, all) => all.map((v) => (axis !== "step" || Number.isInteger(v) ? number(v) : "")) },
        { ...grid, size: 46, gap: 4, space: 34, values: (u, all) => all.map((v) => number(logged(spec) ? 10 ** v : v)) },
      ],
      cursor: { sync: { key: "steps", setSeries: false }, drag: { x: true, y: false, setScale: false }, y: false,
        bind: { dblclick: () => () => { everywhere(null, null); return null; } },
        points: { size: 7, fill: (u, i) => u.series[i].stroke(), show: (u, i) => (i <= count ? undefined : false) } },
      hooks: {
        draw: [marks(prefix)],
        setSelect: [(u) => {
          const { left, width } = u.select;
          if (width < 4) return;
          everywhere(u.posToVal(left, "x"), u.posToVal(left + width, "x"));
          u.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
        }],
        setCursor: [(u) => read(figure, spec, on, u.cursor.idx)],
      },
    };
  };

  const read = (figure, spec, on, at) => {
    const none = at === null || at === undefined;
    const alone = spec.series.length === 1 ? `: ${none ? "" : number(spec.series[0].values[at])}` : "";
    figure.querySelector(".at").textContent = none ? "" : `${axis === "step" ? `step ${spec.x[at].toLocaleString("en")}` : `${number(spec.x[at])} ${axis}`}${alone}`;
    figure.querySelectorAll(".keys button").forEach((key, i) => {
      key.querySelector("output").textContent = none || !on[i] ? "" : number(spec.series[i].values[at]);
    });
  };

  const keyboard = (u, event) => {
    const x = u.data[0], last = x.length - 1;
    const { min, max } = u.scales.x;
    const step = event.shiftKey ? Math.max(1, Math.round(last / 20)) : 1;
    let at = u.cursor.idx === null || u.cursor.idx === undefined ? last : u.cursor.idx;
    const key = event.key;
    if (key === "ArrowLeft" || key === "ArrowRight") {
      at = Math.min(last, Math.max(0, at + (key === "ArrowLeft" ? -step : step)));
      u.setCursor({ left: u.valToPos(x[at], "x"), top: 10 });
    } else if (key === "+" || key === "=" || key === "-") {
      const half = ((max - min) / 2) * (key === "-" ? 2 : 0.5);
      const middle = Math.min(Math.max(x[at], min), max);
      everywhere(Math.max(x[0], middle - half), Math.min(x[last], middle + half));
    } else if (key === "0" || key === "Escape") {
      everywhere(null, null);
    } else {
      return;
    }
    event.preventDefault();
  };

  const draw = (figure) => {
    const area = figure.querySelector(".plot");
    if (plots.has(figure) || !area.clientWidth) return;
    const spec = data.charts[figure.dataset.chart];
    const prefix = figure.dataset.chart.slice(0, figure.dataset.chart.indexOf("-") + 1);
    const on = spec.series.map(() => true);
    lay(spec, prefix);
    const size = { width: area.clientWidth, height: area.clientHeight };
    const u = new uPlot(options(figure, spec, prefix, on, size), columns(spec, on), area);
    plots.set(figure, { u, spec, on, prefix });
    figure.querySelectorAll(".keys button").forEach((key, i) => {
      key.addEventListener("click", () => {
        on[i] = !on[i];
        key.setAttribute("aria-pressed", String(on[i]));
        u.setSeries(i + 1, { show: on[i] });
        if (spec.stacked) u.setData(columns(spec, on), false);
        u.redraw();
      });
    });
    area.addEventListener("keydown", (event) => keyboard(u, event));
    area.addEventListener("pointermove", (event) => {
      if (event.pointerType !== "touch") return;
      const box = u.over.getBoundingClientRect();
      u.setCursor({ left: event.clientX - box.left, top: event.clientY - box.top });
    });
    new ResizeObserver(() => {
      if (area.clientWidth && area.clientWidth !== u.width) u.setSize({ width: area.clientWidth, height: area.clientHeight });
    }).observe(area);
  };

  const again = () => {
    for (const { u, spec, on, prefix } of plots.values()) u.setData(columns(lay(spec, prefix), on));
    everywhere(null, null);
  };
  const toggle = (id, turn) => document.getElementById(id).addEventListener("click", (event) => {
    event.currentTarget.setAttribute("aria-pressed", String(turn()));
    again();
  });
  toggle("log", () => (log = !log));
  toggle("smooth", () => (smooth = !smooth));
  const over = document.getElementById("axis");
  over.disabled = axes.length < 2;
  over.addEventListener("click", () => {
    axis = axes[(axes.indexOf(axis) + 1) % axes.length];
    over.textContent = `over: ${axis}`;
    again();
  });
  document.getElementById("reset").addEventListener("click", () => {
    everywhere(null, null);
  });
  for (const figure of document.querySelectorAll("figure[data-chart]")) draw(figure);
  for (const details of document.querySelectorAll("details.one")) {
    details.addEventListener("toggle", () => details.querySelectorAll("figure[data-chart]").forEach(draw));
  }
})();
