"""What a training consists of: its data, models, tasks and checkpoints."""
