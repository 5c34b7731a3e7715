"""A training state on disk: the format, tensor files, the writer, and resume."""
