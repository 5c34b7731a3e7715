"""This host: processes, durable files, network interfaces, the V-IPU tool, and the selection of the SDK."""
