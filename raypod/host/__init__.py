"""This host: processes, durable files, network interfaces, the V-IPU tool, and SDK selection."""
