"""The operator's commands: `up`, `down`, `doctor` and `bundle`, and checkpoint copies collected from the hosts."""
