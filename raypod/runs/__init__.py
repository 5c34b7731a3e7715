"""What a run writes and prints: metrics, progress, sinks, the ledger and its verification, run folder and run state."""
