"""The plan of a run: every size, instance and segment, derived from config and cluster. Without torch and Ray."""
