"""`raypod logs`: the output of all instances, the coordinator's output and its events as one stream of lines."""
