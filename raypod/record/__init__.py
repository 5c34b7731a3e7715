"""What a run leaves on the disk, beside its checkpoints; written such that it survives."""
