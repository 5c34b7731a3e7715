"""Launch any program on a pod, with poprun's options."""
