"""The host's side of a wrapped model: arguments in, outputs back, the life cycle (contract section 2)."""
