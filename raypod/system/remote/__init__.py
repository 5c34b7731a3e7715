"""Files at a URL: which library reads it, verified transfers, and errors without credentials."""
