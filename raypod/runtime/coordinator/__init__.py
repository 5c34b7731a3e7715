"""The run's main loop: recovery, elastic sizes, stops, the checkpoint schedule, copies on other hosts."""
