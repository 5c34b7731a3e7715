"""The plan of a run: every size, instance and leg, derived from config and cluster. Imports neither torch nor Ray."""
