"""The state of a training on disk: the format, the storage, tensor files, the writer, and resuming."""
