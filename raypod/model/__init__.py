"""What the replicas compute: networks, the training and evaluation programs, and where a model is cut into pipeline
stages."""
