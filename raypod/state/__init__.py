"""A training's state between processes: as bytes, as one hash, per replica, carried to who lacks it."""
