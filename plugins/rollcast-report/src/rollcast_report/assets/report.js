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

  // Timeline: the steps that are drawn; the arrow keys on a drawing go to the steps before and after.
  const steps = document.getElementById("timeline-steps");
  if (steps) {
    const drawings = [...document.querySelectorAll("[data-window]")];
    const moves = [...document.querySelectorAll("[data-move]")];
    const choose = (place, focus) => {
      const next = Math.max(0, Math.min(drawings.length - 1, place));
      steps.value = String(next);
      for (const drawing of drawings) drawing.hidden = drawing.dataset.window !== steps.value;
      for (const button of moves) button.disabled = drawings[next + Number(button.dataset.move)] === undefined;
      if (focus) drawings[next].querySelector("svg").focus();
    };
    steps.addEventListener("change", () => choose(Number(steps.value), false));
    for (const button of moves) {
      button.addEventListener("click", () => choose(Number(steps.value) + Number(button.dataset.move), false));
    }
    for (const drawing of drawings) {
      drawing.addEventListener("keydown", (event) => {
        const here = Number(steps.value);
        const place = { ArrowLeft: here - 1, ArrowRight: here + 1, Home: 0, End: drawings.length - 1 }[event.key];
        if (place === undefined) return;
        event.preventDefault();
        choose(place, true);
      });
    }
    choose(Number(steps.value), false);
  }
})();
