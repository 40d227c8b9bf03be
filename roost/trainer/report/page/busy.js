// How busy components and devices were.

function drawBusy(run) {
  const columns = within("busy", ".columns");
  const shares = [...run.series.entries()].filter(([key]) => key.startsWith("busy/"));
  if (shares.length) {
    const bars = shares.map(([key, values]) => {
      const name = key.slice("busy/".length);
      return busyBar(name, mean(known(values)) ?? 0, run.colours.get(name)?.colour, "mean of all steps");
    });
    columns.append(make("div", {}, make("h3", {}, "Components"), ...bars));
  }
  if (run.devices.length) {
    const bars = run.devices.map((device) => deviceBar(run, device));
    const more = run.hidden_devices ? make("p", { class: "dim" }, `and ${counted(run.hidden_devices, "device")} more in the trace`) : null;
    columns.append(make("div", {}, make("h3", {}, "Devices"), make("div", { class: "devices" }, ...bars), more));
  }
  if (!columns.children.length) byId("busy").append(make("p", { class: "nothing" }, "Nothing is known of how busy devices were."));
}

function busyBar(name, share, colour, note) {
  const filled = make("i", { "--share": `${Math.min(1, share) * 100}%`, "--colour": colour ?? "var(--rest)" });
  return make(
    "div",
    { class: "busy-row", title: note },
    make("span", {}, name),
    make("div", { class: "busy-bar" }, filled),
    make("b", {}, percent(share)),
  );
}

// Components may use a device at the same time: their parts are drawn in proportion, the whole is the busy time.
function deviceBar(run, device) {
  const parts = Object.entries(device.by_component).filter(([, time]) => time > 0);
  const all = sum(parts.map(([, time]) => time));
  const note = parts.map(([name, time]) => `${name} ${spellSeconds(time / 1e9)}`).join(", ");
  const isAlone = run.devices.every((other) => other.node === device.node);
  const name = `${isAlone ? "" : `node ${device.node}, `}accelerator ${device.device}`;
  const row = busyBar(name, device.busy_share, null, note);
  const bar = row.querySelector(".busy-bar");
  bar.replaceChildren(
    ...parts.map(([name, time]) =>
      make("i", { "--share": `${(device.busy_share * time * 100) / all}%`, "--colour": run.colours.get(name)?.colour ?? "var(--rest)" }),
    ),
  );
  return row;
}
