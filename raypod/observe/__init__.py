"""Views of runs: status, monitor, report, dashboard, logs and trackers."""
