"""Allreduce a loss and an accuracy between instances with Horovod, in single and half precision."""

import horovod.torch as hvd
import popdist
import torch

if __name__ == "__main__":
    if popdist.isPopdistEnvSet():
        hvd.init()
    index = popdist.getInstanceIndex()
    loss, accuracy = torch.tensor(float(index)), torch.tensor([100.0 * index, 0.5])
    for dtype in (torch.float32, torch.float16):
        mean = hvd.grouped_allreduce([loss.to(dtype), accuracy.to(dtype)], op=hvd.Average)
        if hvd.rank() == 0:
            print(mean[0].dtype, mean[0].item(), mean[1].tolist())
    print("rank", hvd.rank(), "of", hvd.size(), "local", hvd.local_rank(), "of", hvd.local_size())
