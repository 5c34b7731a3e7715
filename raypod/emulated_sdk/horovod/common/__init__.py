"""`horovod.common`, emulated: the exceptions."""
