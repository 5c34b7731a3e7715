"""`raypod monitor`: which IPUs work for whom and how a run is doing, live in a terminal, as text or as JSON."""
