"""`horovod.torch.elastic`: not emulated (contract section 8); the import says so."""

raise ImportError("the emulated Horovod has no elastic mode: horovod.torch.elastic needs the real one")
