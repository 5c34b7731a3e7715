"""The report: what a run folder holds, condensed into data, and one HTML page that draws it."""
