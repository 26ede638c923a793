"use strict";
(() => {
  document.documentElement.classList.add("js");

  const make = (svg, name, css) => {
    const node = document.createElementNS(svg.namespaceURI, name);
    node.setAttribute("class", css);
    node.style.visibility = "hidden";
    return node;
  };

  // Tooltips: the nearest point by x, with the pointer, a finger or the arrow keys.
  for (const svg of document.querySelectorAll("svg[data-points]")) {
    const points = JSON.parse(svg.dataset.points);
    const width = svg.viewBox.baseVal.width;
    const rule = make(svg, "line", "rule");
    const cursor = make(svg, "circle", "cursor");
    const tip = document.createElement("div");
    let index = points.length;
    svg.querySelector("title").remove(); // the browser would show it on top; aria-label says the same
    rule.setAttribute("y1", svg.dataset.top);
    rule.setAttribute("y2", svg.dataset.bottom);
    cursor.setAttribute("r", "4.5");
    svg.append(rule, cursor);
    tip.className = "tip";
    tip.hidden = true;
    svg.parentNode.append(tip);

    const show = (next) => {
      index = Math.max(0, Math.min(points.length - 1, next));
      const [x, y, step, text] = points[index];
      const box = svg.getBoundingClientRect();
      const card = svg.parentNode.getBoundingClientRect();
      const scale = box.width / width;
      rule.setAttribute("x1", x);
      rule.setAttribute("x2", x);
      cursor.setAttribute("cx", x);
      cursor.setAttribute("cy", y);
      rule.style.visibility = cursor.style.visibility = "visible";
      tip.textContent = "";
      const label = document.createElement("span");
      label.textContent = "step " + step + " · ";
      tip.append(label, text);
      tip.hidden = false;
      const half = tip.offsetWidth / 2;
      const left = box.left - card.left + x * scale;
      tip.style.left = Math.max(half, Math.min(card.width - half, left)) + "px";
      tip.style.top = box.top - card.top + y * scale - 12 + "px";
    };
    const hide = () => {
      rule.style.visibility = cursor.style.visibility = "hidden";
      tip.hidden = true;
    };
    svg.addEventListener("pointermove", (event) => {
      const box = svg.getBoundingClientRect();
      const x = ((event.clientX - box.left) / box.width) * width;
      let low = 0;
      let high = points.length - 1;
      while (high - low > 1) {
        const middle = (low + high) >> 1;
        if (points[middle][0] < x) low = middle;
        else high = middle;
      }
      show(Math.abs(points[low][0] - x) <= Math.abs(points[high][0] - x) ? low : high);
    });
    svg.addEventListener("pointerleave", hide);
    svg.addEventListener("blur", hide);
    svg.addEventListener("keydown", (event) => {
      const move = { ArrowLeft: -1, ArrowRight: 1, Home: -points.length, End: points.length }[event.key];
      if (move === undefined) return;
      event.preventDefault();
      show(index + move);
    });
  }

  // Timeline: the steps that are drawn, and the part of them that is shown.
  const lanes = [...document.querySelectorAll("[data-window]")];
  if (lanes.length) {
    const steps = document.getElementById("timeline-steps");
    const moves = [...document.querySelectorAll("[data-move]")];
    const zooms = [...document.querySelectorAll("[data-zoom]")];
    const status = document.getElementById("timeline-shown");
    let here = lanes.length - 1;
    let view = [0, 1]; // shares of the drawing's width

    const draw = () => {
      const svg = lanes[here].querySelector("svg");
      const plot = svg.querySelector(".plot");
      const left = Number(plot.getAttribute("x"));
      const width = Number(plot.getAttribute("width"));
      const share = view[1] - view[0];
      const start = left + view[0] * width;
      plot.setAttribute("viewBox", [start, 0, width * share, plot.getAttribute("height")].join(" "));
      let last = -Infinity;
      for (const label of svg.querySelectorAll(".steps .start")) {
        if (label.dataset.at === undefined) label.dataset.at = label.getAttribute("x");
        const x = left + (Number(label.dataset.at) - start) / share;
        const fits = x >= left - 1 && x <= left + width - 8 && x - last >= 34;
        label.setAttribute("x", x);
        label.setAttribute("visibility", fits ? "visible" : "hidden");
        if (fits) last = x;
      }
      const seconds = Number(svg.dataset.seconds);
      const show = (value) => (value * seconds).toPrecision(3);
      status.textContent = share < 1 ? show(view[0]) + " s to " + show(view[1]) + " s of " + show(1) + " s" : "";
      for (const button of zooms) button.disabled = Number(button.dataset.zoom) < 1 && share >= 1;
    };
    const choose = (place, focus) => {
      here = Math.max(0, Math.min(lanes.length - 1, place));
      view = [0, 1];
      if (steps) steps.value = String(here);
      lanes.forEach((lane, index) => { lane.hidden = index !== here; });
      for (const button of moves) button.disabled = lanes[here + Number(button.dataset.move)] === undefined;
      draw();
      if (focus) lanes[here].querySelector("svg").focus();
    };
    const zoom = (factor, at) => {
      const share = factor === 0 ? 1 : Math.min(1, Math.max(1 / 4096, (view[1] - view[0]) / factor));
      const centre = view[0] + (view[1] - view[0]) * at;
      const start = Math.max(0, Math.min(1 - share, centre - share * at));
      view = [start, start + share];
      draw();
    };
    const pan = (shares) => {
      const share = view[1] - view[0];
      const start = Math.max(0, Math.min(1 - share, view[0] + shares * share));
      view = [start, start + share];
      draw();
    };
    if (steps) steps.addEventListener("change", () => choose(Number(steps.value), false));
    for (const button of moves) button.addEventListener("click", () => choose(here + Number(button.dataset.move), false));
    for (const button of zooms) button.addEventListener("click", () => zoom(Number(button.dataset.zoom), 0.5));
    for (const lane of lanes) {
      const svg = lane.querySelector("svg");
      const plot = svg.querySelector(".plot");
      const shareAt = (event) => {
        const box = svg.getBoundingClientRect();
        const x = ((event.clientX - box.left) / box.width) * svg.viewBox.baseVal.width;
        return Math.max(0, Math.min(1, (x - Number(plot.getAttribute("x"))) / Number(plot.getAttribute("width"))));
      };
      lane.addEventListener("keydown", (event) => {
        if (event.ctrlKey || event.metaKey || event.altKey) return;
        const isWhole = view[1] - view[0] >= 1;
        const actions = {
          "+": () => zoom(2, 0.5), "=": () => zoom(2, 0.5), "-": () => zoom(0.5, 0.5), 0: () => zoom(0, 0.5),
          ArrowLeft: () => (isWhole ? choose(here - 1, true) : pan(-0.25)),
          ArrowRight: () => (isWhole ? choose(here + 1, true) : pan(0.25)),
          PageUp: () => choose(here - 1, true), PageDown: () => choose(here + 1, true),
          Home: () => (isWhole ? choose(0, true) : pan(-Infinity)),
          End: () => (isWhole ? choose(lanes.length - 1, true) : pan(Infinity)),
        };
        const action = actions[event.key];
        if (action === undefined) return;
        event.preventDefault();
        action();
      });
      // A plain wheel scrolls the page; with Ctrl, as a pinch on a touchpad sends it, it zooms.
      lane.addEventListener("wheel", (event) => {
        if (!event.ctrlKey) return;
        event.preventDefault();
        zoom(event.deltaY < 0 ? 1.25 : 0.8, shareAt(event));
      }, { passive: false });
      let from = null;
      svg.addEventListener("pointerdown", (event) => {
        if (view[1] - view[0] >= 1) return;
        from = shareAt(event);
        svg.setPointerCapture(event.pointerId);
      });
      svg.addEventListener("pointermove", (event) => {
        if (from === null) return;
        const to = shareAt(event);
        pan(from - to);
        from = to;
      });
      for (const name of ["pointerup", "pointercancel"]) svg.addEventListener(name, () => { from = null; });
    }
    choose(here, false);
  }
})();
