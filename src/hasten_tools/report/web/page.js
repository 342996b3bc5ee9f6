"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const root = document.documentElement;
  const at = (id) => document.getElementById(id);
  const several = data.runs.length > 1;
  const dashes = { training: "solid", validation: "dash", test: "dot" };
  const byLook = window.matchMedia("(prefers-color-scheme: dark)");
  // plotly reads some HTML in texts: a name is a name.
  const plain = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
  const css = (name) => getComputedStyle(root).getPropertyValue(name).trim();
  const isDark = () => (root.dataset.theme || (byLook.matches ? "dark" : "light")) === "dark";
  const number = (value) => value === null ? "not finite" : Math.abs(value) >= 1e4 ? Math.round(value).toLocaleString("en") : String(+value.toPrecision(4));

  const kept = (() => { try { return JSON.parse(sessionStorage.getItem("hasten-" + location.pathname)) || {}; } catch { return {}; } })();
  const show = { x: kept.x || "step", smooth: kept.smooth || 0, log: kept.log || false, range: kept.range || null };

  function smoothed(y, weight) {
    let sum = 0, seen = 0;
    return y.map((value) => {
      if (value === null) return null;
      sum = weight * sum + (1 - weight) * value;
      seen = weight * seen + (1 - weight);
      return sum / seen;
    });
  }

  function unit(panels) {
    let longest = 0;
    for (const panel of panels) for (const curve of panel.curves) for (const one of curve.time) if (one > longest) longest = one;
    return longest > 2 * 86400 ? [86400, "days"] : longest > 2 * 3600 ? [3600, "hours"] : longest > 180 ? [60, "minutes"] : [1, "seconds"];
  }

  const [seconds, timeName] = unit(data.panels);
  const titles = { step: "Step", epoch: "Epoch", time: "Time (" + timeName + ")" };

  function looks(panel) {
    // Several runs: the color is the run's, and the dashes are the stage's. One run: the color is the stage's.
    const used = {};
    return panel.curves.map((curve, place) => {
      const stage = curve.stage.split(",")[0];
      const key = several ? curve.run + stage : stage;
      const again = used[key] = (used[key] ?? -1) + 1;
      const order = { training: 0, validation: 1, test: 2 }[stage] ?? 0;
      const spread = panel.curves.length > 3 || again > 0 || (!several && panel.curves.every((one) => one.stage === curve.stage));
      const color = several ? curve.run : spread ? place % 7 : order;
      return { color: css("--run-" + color), dash: several ? (again ? ["dashdot", "longdash", "dot"][(again - 1) % 3] : dashes[stage] || "solid") : dashes[stage] && stage !== "training" && !spread ? "solid" : "solid" };
    });
  }

  function label(panel, curve) { return several ? data.runs[curve.run].name + ", " + curve.name : curve.name; }

  function traces(panel) {
    const look = looks(panel), found = [];
    panel.curves.forEach((curve, place) => {
      const x = show.x === "time" ? curve.time.map((one) => one === null ? null : one / seconds) : curve[show.x];
      const many = curve.y.length > 60;
      const line = { color: look[place].color, dash: look[place].dash, width: 2 };
      // A mean over ten values says nothing of a curve of ten.
      const smooth = show.smooth > 0 && curve.y.length * (1 - show.smooth) >= 3;
      const base = { x, type: "scatter", mode: many ? "lines" : "lines+markers", marker: { size: 5, color: line.color }, hoverinfo: "x+y+name", hoverlabel: { namelength: 40 }, connectgaps: false };
      if (smooth) found.push({ ...base, y: curve.y, mode: "lines", line: { ...line, width: 1 }, opacity: 0.28, hoverinfo: "skip", showlegend: false });
      found.push({ ...base, y: smooth ? smoothed(curve.y, show.smooth) : curve.y, line: { ...line, width: many && !smooth ? 1.4 : 2 }, name: plain(label(panel, curve)) });
    });
    return found;
  }

  function layout(panel) {
    const grid = css("--line"), ink = css("--quiet");
    const positive = panel.curves.some((curve) => curve.y.some((one) => one > 0));
    const axis = { gridcolor: grid, linecolor: grid, zeroline: false, tickfont: { color: ink, size: 12 }, automargin: true, ticks: "" };
    const values = panel.curves.flatMap((curve) => curve.y).filter((one) => one !== null);
    const flat = values.length && Math.min(...range(values)) === Math.max(...range(values));
    const largest = values.length ? Math.max(...range(values).map(Math.abs)) : 0;
    const y = { ...axis, type: show.log && positive ? "log" : "linear", nticks: 6, exponentformat: largest >= 1e4 ? "SI" : "e", minexponent: 3 };
    if (flat && y.type === "linear") { const one = values[0], room = Math.abs(one) * 0.1 || 1; y.range = [one - room, one + room]; }
    const x = { ...axis, showgrid: false, nticks: 7, showline: true, title: { text: titles[show.x], font: { size: 12, color: ink }, standoff: 6 } };
    x.range = show.range ? show.range.slice() : whole();
    x.autorange = false;
    return {
      margin: { l: 46, r: 8, t: 8, b: 40 }, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", showlegend: false,
      font: { family: "system-ui, -apple-system, Segoe UI, Roboto, DejaVu Sans, sans-serif", color: css("--ink"), size: 12 },
      xaxis: x, yaxis: y, hovermode: "x", dragmode: window.matchMedia("(pointer: coarse)").matches ? false : "zoom",
      hoverlabel: { bgcolor: css("--card"), bordercolor: grid, font: { color: css("--ink") } },
    };
  }

  // All panels show the same stretch, and so can be compared at a glance.
  function whole() {
    let last = 0;
    for (const panel of data.panels) for (const curve of panel.curves) for (const one of curve[show.x]) if (one > last) last = one;
    if (show.x === "time") last /= seconds;
    return [0, (last || 1) * 1.02];
  }

  function range(values) {
    let low = Infinity, high = -Infinity;
    for (const one of values) { if (one < low) low = one; if (one > high) high = one; }
    return [low, high];
  }

  const options = { responsive: true, displayModeBar: false, doubleClick: false };
  const drawn = new Set();

  function draw(panel) {
    const place = at(panel.id);
    const missing = show.x !== "step" && panel.curves.every((curve) => curve[show.x].every((one) => one === null));
    Plotly.react(place, missing ? [] : traces(panel), missing ? { ...layout(panel), annotations: [{ text: show.x === "time" ? "No times were recorded" : "No epochs were recorded", showarrow: false, x: 0.5, y: 0.5, xref: "paper", yref: "paper", font: { color: css("--quiet"), size: 14 } }], xaxis: { visible: false }, yaxis: { visible: false } } : layout(panel), options);
    if (!drawn.has(panel.id)) {
      drawn.add(panel.id);
      place.on("plotly_relayout", (change) => {
        const left = change["xaxis.range[0]"], right = change["xaxis.range[1]"];
        if (left !== undefined) zoom([left, right], panel.id);
      });
      place.on("plotly_doubleclick", () => zoom(null));
    }
    values(panel);
  }

  function values(panel) {
    const list = at(panel.id + "-values"), look = looks(panel);
    list.replaceChildren(...panel.curves.map((curve, place) => {
      const item = document.createElement("span"), mark = document.createElement("i");
      mark.style.borderTopColor = look[place].color;
      mark.style.borderTopStyle = { dash: "dashed", dot: "dotted" }[look[place].dash] || "solid";
      const extremes = curve.least === null || curve.least === curve.most ? "" : " (" + number(curve.least) + " to " + number(curve.most) + ")";
      const bad = curve.not_finite ? ", " + curve.not_finite + " not finite" : "";
      item.append(mark, label(panel, curve) + ": last " + number(curve.last) + extremes + bad);
      return item;
    }));
  }

  let linking = false;
  function zoom(wanted, from) {
    if (linking) return;
    show.range = wanted;
    linking = true;
    const change = { "xaxis.range": wanted || whole() };
    if (!wanted) change["yaxis.autorange"] = true;
    const others = data.panels.filter((panel) => panel.id !== from && drawn.has(panel.id));
    Promise.all(others.map((panel) => Plotly.relayout(at(panel.id), { ...change, "xaxis.range": change["xaxis.range"].slice() }))).finally(() => { linking = false; });
    sayRange();
    keep();
  }

  function sayRange() {
    const [left, right] = show.range || ["", ""], short = (one) => one === "" ? "" : String(+(+one).toPrecision(5));
    at("from").value = short(left); at("to").value = short(right);
  }

  function timelines() {
    for (const place of document.querySelectorAll(".timeline")) {
      const attempts = data.runs[+place.dataset.run].attempts, ink = css("--quiet");
      const colors = { completed: css("--good"), "stopped early": css("--good"), running: css("--live"), interrupted: css("--run-1") };
      // A long pause leaves some attempts too short to see: each has a mark at its start.
      Plotly.react(place, attempts.map((one) => ({
        type: "scatter", mode: "lines+markers", x: [new Date(one.start_ms), new Date(Math.max(one.end_ms, one.start_ms + 1))], y: [0, 0], line: { width: 16, color: colors[one.how] || css("--bad") },
        marker: { symbol: ["line-ns-open", "line-ns-open"], size: 22, color: css("--ink"), line: { width: 1.5 } }, hoverinfo: "text",
        text: plain("from step " + one.step + ", " + one.duration + ", " + one.how), showlegend: false,
      })), {
        margin: { l: 8, r: 8, t: 8, b: 30 }, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", hovermode: "closest", dragmode: false,
        xaxis: { type: "date", tickfont: { color: ink }, gridcolor: css("--line"), linecolor: css("--line"), zeroline: false, nticks: 6 },
        yaxis: { visible: false, fixedrange: true, range: [-1, 1] }, hoverlabel: { bgcolor: css("--card"), bordercolor: css("--line"), font: { color: css("--ink") } },
      }, options);
    }
  }

  // Panels are drawn when they come near the window: a page of sixty opens at once.
  const near = new IntersectionObserver((entries) => {
    for (const entry of entries) if (entry.isIntersecting) { near.unobserve(entry.target); draw(data.panels.find((panel) => panel.id === entry.target.id)); }
  }, { rootMargin: "900px" });

  function redraw() { for (const panel of data.panels) if (drawn.has(panel.id)) draw(panel); timelines(); }

  function controls() {
    if (!at("x")) return;
    at("x").value = show.x; at("smooth").value = show.smooth; at("log").checked = show.log;
    const say = () => { at("smooth-value").textContent = show.smooth ? show.smooth.toFixed(2) : "off"; };
    say();
    at("x").addEventListener("change", () => { show.x = at("x").value; show.range = null; sayRange(); redraw(); keep(); });
    at("smooth").addEventListener("input", () => { show.smooth = +at("smooth").value; say(); redraw(); keep(); });
    at("log").addEventListener("change", () => { show.log = at("log").checked; redraw(); keep(); });
    const typed = () => {
      const [first, last] = whole(), left = at("from").value, right = at("to").value;
      const wanted = [left === "" ? first : +left, right === "" ? last : +right];
      zoom((left === "" && right === "") || !(wanted[0] < wanted[1]) ? null : wanted);
    };
    at("from").addEventListener("change", typed); at("to").addEventListener("change", typed);
    at("reset").addEventListener("click", () => zoom(null));
    sayRange();
  }

  function keep(more) { try { sessionStorage.setItem("hasten-" + location.pathname, JSON.stringify({ ...show, ...more })); } catch { /* Pages from files may not store. */ } }

  function themeName() { at("theme-name").textContent = isDark() ? "Light" : "Dark"; }
  at("theme").addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    try { localStorage.setItem("hasten-theme", root.dataset.theme); } catch { /* As above. */ }
    themeName(); redraw();
  });
  byLook.addEventListener("change", () => { themeName(); redraw(); });
  let before;
  window.addEventListener("beforeprint", () => { before = root.dataset.theme; root.dataset.theme = "light"; for (const panel of data.panels) draw(panel); timelines(); });
  window.addEventListener("afterprint", () => { if (before) root.dataset.theme = before; else delete root.dataset.theme; redraw(); });

  themeName(); controls(); timelines();
  for (const panel of data.panels) near.observe(at(panel.id));
  if (kept.scroll) window.scrollTo(0, kept.scroll);

  if (data.following) {
    // Not while it is hidden, nor while a control or a curve is in use.
    const again = () => {
      if (document.hidden || document.querySelector("select:focus, input:active, input[type=number]:focus, .plot:hover")) { setTimeout(again, 1000); return; }
      keep({ scroll: window.scrollY });
      location.reload();
    };
    setTimeout(again, 1000 * data.interval);
  } else keep({ scroll: 0 });
})();
