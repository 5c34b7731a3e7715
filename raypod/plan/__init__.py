"""The run's plan, derived from configuration and cluster: every size, instance and leg. Imports neither torch nor Ray."""
