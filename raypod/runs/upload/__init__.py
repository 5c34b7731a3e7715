"""Remote storage: a run is mirrored to a URL of fsspec while it trains, and restored from there on another pod."""
