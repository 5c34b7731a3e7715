"""The operator's commands: cluster up and down, doctor, and ssh access."""
