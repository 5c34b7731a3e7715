"""The state of a running process as a table, as JSON and for Prometheus, served on loopback to holders of a token."""
