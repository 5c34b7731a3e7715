"""`raypod dashboard`: the report of the runs of a folder, live in a browser."""
