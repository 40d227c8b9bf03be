"""Reports of a run: an HTML page and two plots."""

from roost.trainer.report.page import write_plots, write_report

__all__ = ["write_plots", "write_report"]
