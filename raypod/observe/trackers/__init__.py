"""Experiment trackers: MLflow, Weights & Biases, and your own, each fed by a process that follows a run's files."""
