"use strict";
(() => {
  // Keyboard and tooltip support for the bars: arrow keys move along a lane and between lanes.
  for (const chart of document.querySelectorAll(".gantt")) {
    const svg = chart.querySelector("svg");
    const lanes = [...svg.querySelectorAll("[data-lane]")].map((lane) => [...lane.querySelectorAll("[data-tip]")]);
    const rows = lanes.filter((bars) => bars.length);
    const tip = document.createElement("div");
    tip.className = "tip";
    tip.setAttribute("aria-hidden", "true"); // screen readers get the same text from the bar's label
    tip.hidden = true;
    chart.append(tip);
    const show = (bar) => {
      const box = bar.getBoundingClientRect();
      const card = chart.getBoundingClientRect();
      tip.textContent = bar.dataset.tip;
      tip.hidden = false;
      const half = tip.offsetWidth / 2;
      const middle = (Math.max(box.left, card.left) + Math.min(box.right, card.right)) / 2 - card.left;
      tip.style.left = Math.max(half, Math.min(card.width - half, middle)) + chart.scrollLeft + "px";
      tip.style.top = Math.max(box.top - card.top - 8, tip.offsetHeight) + "px";
    };
    const hide = () => {
      tip.hidden = true;
    };
    for (const bar of rows.flat()) {
      const title = bar.querySelector("title");
      if (title) title.remove(); // else the browser shows a second tooltip; aria-label has the same text
      bar.addEventListener("pointerenter", () => show(bar));
      bar.addEventListener("pointerleave", hide);
      bar.addEventListener("focus", () => show(bar));
      bar.addEventListener("blur", hide);
    }
    const go = (bar) => {
      for (const other of rows.flat()) other.setAttribute("tabindex", other === bar ? "0" : "-1");
      bar.focus();
      bar.scrollIntoView({ block: "nearest", inline: "nearest" });
    };
    svg.addEventListener("keydown", (event) => {
      if (event.key === "Escape") hide();
      const row = rows.findIndex((bars) => bars.includes(event.target));
      if (row < 0) return;
      const bars = rows[row];
      const place = bars.indexOf(event.target);
      const along = { ArrowLeft: place - 1, ArrowRight: place + 1, Home: 0, End: bars.length - 1 }[event.key];
      const across = { ArrowUp: row - 1, ArrowDown: row + 1 }[event.key];
      if (along === undefined && across === undefined) return;
      event.preventDefault();
      if (along !== undefined) go(bars[Math.max(0, Math.min(bars.length - 1, along))]);
      else {
        const next = rows[Math.max(0, Math.min(rows.length - 1, across))];
        const start = Number(event.target.dataset.start);
        const after = next.find((bar) => Number(bar.dataset.start) >= start);
        go(after || next[next.length - 1]);
      }
    });
  }
})();
