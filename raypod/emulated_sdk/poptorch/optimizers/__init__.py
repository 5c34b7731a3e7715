"""How a host optimizer becomes the device's (contract section 4)."""
