"""The emulated device in three layers: a program is compiled, executed, and computes by kernels of its own."""
