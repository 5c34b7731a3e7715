"""The host's side of a wrapped model: `PoplarExecutor`, wrapping, saving."""
