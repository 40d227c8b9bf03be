"""Reports of a run: an HTML page and two plots."""

from roost.trainer.report.page import write_report
from roost.trainer.report.plots import write_plots

__all__ = ["write_plots", "write_report"]
