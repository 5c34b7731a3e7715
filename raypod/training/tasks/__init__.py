"""What is trained: the data, the network, the loss and the metrics of a task."""
