"""The processes of a run: coordinator, workers, one instance, and the launcher of programs."""
