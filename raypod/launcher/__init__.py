"""Any program as the instances of a run, as poprun starts it (contract section 7): `python -m raypod.launch`."""
