"""What `poptorch.options` is made of (contract sections 1.1 to 1.7)."""
