"""Output of a run: the live view, the summary at its end, the HTML page and plots."""
