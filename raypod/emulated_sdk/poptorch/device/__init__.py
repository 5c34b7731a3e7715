"""The emulated device: compilation, replicas and their memory, weight updates."""
