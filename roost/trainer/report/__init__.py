"""What is left to look at of a run: one page, and two pictures."""

from roost.trainer.report.page import write_report
from roost.trainer.report.plots import write_plots

__all__ = ["write_plots", "write_report"]
