"""The state of a training on disk: the format, tensor files, the writer, and resuming."""
