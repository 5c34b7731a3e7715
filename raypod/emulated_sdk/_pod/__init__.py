"""What connects the processes of an emulated pod, and the three doors of the emulated SDK.

A launcher such as raypod uses the emulated SDK through these modules, and names nothing else of it but what PopTorch,
PopDist and Horovod have, too. They need no torch, and have a documented answer with the Poplar SDK as well:

    activation    which SDK a process imports, and the settings of the emulated one
    telemetry     who waits for other processes, spans, states inside the SDK
    rendezvous    how the processes find each other, and how their waits end
"""
