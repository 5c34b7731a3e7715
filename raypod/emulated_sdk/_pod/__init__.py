"""The communication layer of the emulated pod: rendezvous store, process groups and the gradient reduction."""
