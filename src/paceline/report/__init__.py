"""The report of a run: one HTML file with curves, tables, configuration and checkpoints, readable offline."""

REPORT_FILE = "report.html"  # in the output folder
