"""The run's main loop, failure recovery, and the checkpoint schedule."""
