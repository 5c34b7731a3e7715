"""Model parallelism: blocks, stages, execution strategies, and what they say of the device (contract 3)."""
