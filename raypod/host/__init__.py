"""What one host server has, and how a process settles on it: cores, devices, networks, memory, its partition."""
