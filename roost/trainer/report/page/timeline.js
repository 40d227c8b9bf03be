// The timeline: lanes with their names, and the part of the time that is shown.

function drawTimeline(run) {
  const box = within("timeline", ".lanes");
  if (!run.trace || !run.trace.lanes.length) {
    within("timeline", ".zoom").hidden = true;
    box.replaceWith(make("p", { class: "nothing" }, run.trace_problem ?? "There is no trace of this run."));
    return;
  }
  within("timeline", ".said").textContent = whatIsShown(run.trace);
  const canvas = make("canvas", { tabindex: 0, role: "img", "aria-label": "Spans of every device and process over time; plus, minus and arrows move" });
  const drawing = new LaneDrawing(run, canvas);
  box.append(laneNames(drawing.lanes), canvas);
  const end = drawing.lanes.reduce((most, lane) => {
    for (let at = 0; at < lane.bars.length; at += FIELDS) most = Math.max(most, lane.bars[at + 1] + lane.bars[at + 2]);
    return most;
  }, 1);
  moveAround(canvas, drawing, end);
}

function whatIsShown(trace) {
  const parts = [counted(trace.spans, "span")];
  if (trace.resolution) parts.push(`those under ${spellSeconds(trace.resolution / 1e6)} are drawn together`);
  if (trace.hidden_lanes) parts.push(`${counted(trace.hidden_lanes, "lane")} more in trace.json`);
  if (trace.dropped) parts.push(`${counted(trace.dropped, "span")} lost before they were collected`);
  return parts.join("; ");
}

function laneNames(lanes) {
  const names = lanes.flatMap((lane, index) => {
    const title = `${lane.node}: ${lane.name}`;
    const name = make("div", { class: "lane-name", "--height": `${lane.height}px`, title }, lane.name);
    const isFirst = lane.node !== lanes[index - 1]?.node;
    return isFirst ? [make("div", { class: "lane-name node", "--height": `${NODE}px` }, lane.node), name] : [name];
  });
  return make("div", { class: "lane-names", "--axis": `${AXIS}px` }, ...names);
}

function moveAround(canvas, drawing, end) {
  let [from, to] = [0, end];
  let isAsked = false;
  const redraw = () => {
    if (isAsked) return;
    isAsked = true;
    requestAnimationFrame(() => {
      isAsked = false;
      canvas.dataset.drawn = drawing.draw(from, to);
      canvas.dataset.from = Math.round(from);
      canvas.dataset.to = Math.round(to);
    });
  };
  const show = (start, length) => {
    const room = Math.min(end, Math.max(length, end * 1e-6, 10));
    from = Math.max(0, Math.min(start, end - room));
    to = from + room;
    redraw();
  };
  // Zoom by a factor around a place, which is a share of the width.
  const zoom = (factor, place = 0.5) => {
    const middle = from + (to - from) * place;
    show(middle - (to - from) * factor * place, (to - from) * factor);
  };
  const move = (share) => show(from + (to - from) * share, to - from);
  const actions = { in: () => zoom(0.5), out: () => zoom(2), all: () => show(0, end) };
  within("timeline", ".zoom").addEventListener("click", (event) => actions[event.target.dataset?.zoom]?.());
  const keys = { "+": actions.in, "=": actions.in, "-": actions.out, 0: actions.all, ArrowLeft: () => move(-0.2), ArrowRight: () => move(0.2) };
  canvas.addEventListener("keydown", (event) => {
    if (!keys[event.key]) return;
    event.preventDefault();
    keys[event.key]();
  });
  canvas.addEventListener("wheel", (event) => {
    // A plain wheel scrolls the page; with Ctrl, as in maps, it zooms; sideways it moves.
    if (!event.ctrlKey && !event.metaKey && Math.abs(event.deltaX) <= Math.abs(event.deltaY)) return;
    event.preventDefault();
    if (event.ctrlKey || event.metaKey) zoom(Math.exp(event.deltaY * 0.004), event.offsetX / drawing.width);
    else move(event.deltaX / drawing.width);
  }, { passive: false });
  canvas.addEventListener("dblclick", (event) => zoom(0.25, event.offsetX / drawing.width));
  canvas.addEventListener("pointerdown", (event) => canvas.setPointerCapture(event.pointerId));
  canvas.addEventListener("pointermove", (event) => {
    if (event.buttons & 1) {
      hideTip();
      move(-event.movementX / drawing.width);
    } else noteSpan(drawing.find(event.offsetX, event.offsetY), event);
  });
  canvas.addEventListener("pointerleave", hideTip);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  new ResizeObserver(redraw).observe(canvas.parentElement);
}

function noteSpan(bar, event) {
  if (!bar) return hideTip();
  const what = bar.spans > 1 ? `${counted(bar.spans, "short span")}, the longest ${bar.name}` : bar.name;
  showTip(
    event.clientX,
    event.clientY,
    make("b", {}, what),
    tipRow(bar.isWait ? "var(--wait)" : bar.colour, bar.lane.name, bar.isWait ? "waits" : ""),
    make("div", { class: "dim" }, `${spellSeconds(bar.length / 1e6)}, from ${spellSeconds(bar.start / 1e6)}`),
  );
}
