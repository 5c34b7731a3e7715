"""A core for the Python front end of PopTorch, with which it runs on the CPU; see `conformance/real_front_end.py`.

From the C++ sources of the clone, when it is imported: the names and types of the session options, the settings of
tensor locations, the operators. Written after these sources: which errors end a compilation (options, the number of
IPUs, the length of a pipeline, the loss), when a device is attached and the engine is loaded (a re-attach loads it
twice), the order of micro-batches, and what `readOptimizerState` returns.

Assumed, as the device and PopDist are not public, or simplified:

- A graph has no gradients while it is recorded: `requires_grad` of its tensors is False in `forward`. torch's autograd
  differentiates the replay. An operator with half operands runs in float32, and its result is rounded, as on the
  emulated SDK; nothing here tells which of the two meanings of mixed operands the SDK has.
- Integers keep 64 bits in the graph. Buffers that are not floating-point are constants.
- Gradients are added in float32 between replicas, in the order of the replicas. A pipeline computes what the same
  accumulation does without one. The names of the optimizer's state are PopART's where they are known.
- The state of the random numbers is a seed and the number of micro-batches; every replica has its own numbers.
- A process can hold one device, and a device has one holder. The death of a process frees it.
- The interpreter lock is held for the chosen time of an attach (ATTACH_S), load (LOAD_S), transfer (TRANSFER_S) and
  call of a training model (CALL_S); not while the graph is replayed, nor while an instance waits for another. A
  compilation (COMPILE_S) does not hold it; the replacement of torch's factories is the front end's own.
- All instances meet when an engine is loaded and at each weight update, by files. An instance that waits for a dead one
  ends its call as FAULT says: `raise` (RecoverableError; the device can be read), `unusable` (RecoverableError; then
  every access is an Error until the process ends), `unrecoverable` (UnrecoverableError, and the same), `partition`
  (RecoverableError with PARTITION_RESET, and so is every access of all instances until a command resets the partition),
  `hang` (holds the lock for HOST_SYNC_S, then an Error).
- Which instances are of one fleet is known from EMULATED_POD_RENDEZVOUS, as nothing public says how the SDK meets.
- An executable is cached by its graph and options; a hit costs no compilation.
- `popdist.init` is an error without mpirun (FRONT_END_MPI=1), a second time, and after `finalizeBackend`.

The settings above are environment variables with the prefix FRONT_END_. Not contained: custom operators, CPU operators,
loops and conditions, overlapped IO, executables in files, input groups, anchors, `replicaGrouping`.
"""
