"""What the replicas compute: networks, the task, the training and evaluation programs, and pipeline splits."""
