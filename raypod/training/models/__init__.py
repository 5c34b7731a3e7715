"""What the replicas compute: networks, the training and evaluation programs, and pipeline splits."""
