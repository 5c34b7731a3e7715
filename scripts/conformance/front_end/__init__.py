"""A core for PopTorch's own Python front end."""
