"""How a compiled program runs: its micro-batches on all replicas, and the weight updates."""
