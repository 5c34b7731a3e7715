"""From a data set's samples to what a device is fed: transforms, workers, calls ahead, the first step on it."""
