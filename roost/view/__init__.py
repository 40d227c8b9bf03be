"""Views of a plan: text, terminal grid, HTML and SVG."""
