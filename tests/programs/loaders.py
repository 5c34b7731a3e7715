"""Print an instance's share of 50,000 samples with the loaders of torch, poptorch, and poptorch with popdist."""

import popdist.poptorch
import poptorch
import torch

if __name__ == "__main__":
    dataset = torch.utils.data.TensorDataset(torch.zeros(50_000, 3), torch.arange(50_000))
    loaders = {
        "torch": torch.utils.data.DataLoader(dataset, batch_size=32, drop_last=True),
        "plain": poptorch.DataLoader(poptorch.Options(), dataset, batch_size=32),
        "popdist": poptorch.DataLoader(popdist.poptorch.Options(), dataset, batch_size=32),
    }
    for name, loader in loaders.items():
        samples, labels = next(iter(loader))
        print(name, len(loader), len(samples), "first label", labels[0].item())
