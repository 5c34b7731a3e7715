"""The device's side: tracing, replicas and their memory, the weight update (contract sections 2.4 to 2.6)."""
