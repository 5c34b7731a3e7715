"""The process of one instance: the PopTorch program, its control, collectives and the broadcast of weights."""
