"""`horovod.torch.elastic`: raises ImportError. The emulated Horovod has no elastic mode."""

raise ImportError("the emulated Horovod has no elastic mode: horovod.torch.elastic needs an installed Horovod")
