// Warnings about the plan, with their positions in the config and their fixes.

function drawFindings(plan) {
  if (!plan.findings.length) return byId("findings").remove();
  byId("findings").append(
    make("h2", { id: "findings-title" }, "Findings"),
    ...plan.findings.map((finding) =>
      make(
        "article",
        { class: `finding ${finding.severity}` },
        make(
          "p",
          {},
          make("b", { class: "severity" }, finding.severity),
          " ",
          make("b", { class: "code" }, finding.code),
          " ",
          make("code", {}, finding.where),
          " ",
          make("code", { class: "path" }, finding.path),
        ),
        make("p", { class: "what" }, finding.what),
        pairs(
          [
            ["why", finding.why],
            ["fix", finding.fix],
          ].filter(([, words]) => words),
        ),
      ),
    ),
  );
}
