"""Is the pod ready for a run? Facts of every host (`probe`), what they mean (`findings`), and both together (`run`)."""
