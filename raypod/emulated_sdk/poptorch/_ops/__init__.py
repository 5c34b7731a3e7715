"""What `poptorch.ops` is made of, a file for each family (contract 2.6)."""
