"""The weight update on the device: its optimizers, their rules, and the values that the host passes to them."""
