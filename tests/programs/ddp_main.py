"""A training program for poprun in the style of the tutorials: data parallelism over instances and replicas.

poprun --num-replicas 8 --num-instances 4 --ipus-per-replica 2 python ddp_main.py --gradient-accumulation 4 ...
"""

import horovod.torch as hvd
import popdist
import poptorch
import torch
import torchvision
from tqdm import tqdm
from utils import get_dataset, parse_arguments, set_ipu_options


class Net(torch.nn.Module):
    """A small ResNet that normalizes its images, and returns loss and accuracy as outputs."""

    def __init__(self, precision, eight_bit_io):
        super().__init__()
        self.is_half, self.eight_bit_io = precision.startswith("16"), eight_bit_io
        self.stem = torch.nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.body = torchvision.models.resnet.BasicBlock(8, 8)
        self.head = poptorch.BeginBlock(torch.nn.Linear(8, 10), "head", ipu_id=1)
        self.loss = torch.nn.CrossEntropyLoss()

    def forward(self, images, labels=None):
        if self.eight_bit_io:
            images = images.half() if self.is_half else images.float()
            images = images / 255.0
        outputs = self.head(self.body(self.stem(images)).mean((2, 3)))
        if not self.training:
            return outputs
        accuracy = (outputs.detach().argmax(dim=1) == labels).float().mean() * 100
        return outputs, self.loss(outputs, labels), accuracy


if __name__ == "__main__":
    if popdist.isPopdistEnvSet():
        hvd.init()
    args = parse_arguments()
    opts = set_ipu_options(args)
    print(args)

    mode = poptorch.DataLoaderMode.Async if args.async_dataloader else poptorch.DataLoaderMode.Sync
    train_dataloader = poptorch.DataLoader(
        opts, get_dataset(args), batch_size=args.batch_size, shuffle=True, drop_last=True, mode=mode
    )
    model = Net(args.precision, args.eight_bit_io).train()
    if args.precision == "16.16":
        model.half()
    optimizer = poptorch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9, loss_scaling=1.0)
    poptorch_model = poptorch.trainingModel(model, opts, optimizer)

    for epoch in range(1, args.epochs + 1):
        bar = tqdm(train_dataloader, total=len(train_dataloader), disable=popdist.getInstanceIndex() != 0)
        bar.set_description(f"[Epoch {epoch:02d}]")
        loss_values, accuracy_values = [], []
        for data, labels in bar:
            outputs, losses, accuracies = poptorch_model(data, labels)
            loss, accuracy = torch.mean(losses), torch.mean(accuracies)
            if popdist.isPopdistEnvSet():
                loss, accuracy = hvd.grouped_allreduce([loss, accuracy], op=hvd.Average)
            loss_values.append(loss.item())
            accuracy_values.append(accuracy.item())
            bar.set_postfix({"loss": loss.item(), "acc": accuracy.item()})
        epoch_loss = sum(loss_values) / len(loss_values)
        epoch_accuracy = sum(accuracy_values) / len(accuracy_values)
        if popdist.isPopdistEnvSet() and popdist.getInstanceIndex() == 0:
            print(f"\n[Epoch {epoch:02d}] loss: {epoch_loss:.3f}, acc: {epoch_accuracy:.1f}", end="")
        elif not popdist.isPopdistEnvSet():
            print(f"[Epoch {epoch:02d}] loss: {epoch_loss:.3f}, acc: {epoch_accuracy:.1f}")
    poptorch_model.detachFromDevice()
