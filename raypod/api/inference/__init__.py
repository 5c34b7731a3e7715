"""What is done with a finished or running run: evaluate, export, average and use its checkpoints."""
