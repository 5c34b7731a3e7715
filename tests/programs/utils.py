"""Flags, options and data of the training program in ddp_main.py."""

import argparse

import popdist
import popdist.poptorch
import poptorch
import torch
import torchvision


def parse_arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", default=32, type=int, help="micro-batch size")
    parser.add_argument("--epochs", default=2, type=int)
    parser.add_argument("--precision", default="16.16", choices=["16.16", "16.32", "32.32"])
    parser.add_argument("--gradient-accumulation", default=4, type=int, help="at least 3 for 2 IPUs")
    parser.add_argument("--device-iterations", default=1, type=int)
    parser.add_argument("--eight-bit-io", action="store_true", help="transfer images as 8-bit integers")
    parser.add_argument("--async-dataloader", action="store_true")
    parser.add_argument("--samples", default=512, type=int)
    if not popdist.isPopdistEnvSet():
        parser.add_argument("--replicas", default=1, type=int, help="replication factor for data parallel")
    return parser.parse_args()


def set_ipu_options(args):
    if popdist.isPopdistEnvSet():
        opts = popdist.poptorch.Options()
        opts.randomSeed(2022)
        opts.showCompilationProgressBar(popdist.getInstanceIndex() == 0)
    else:
        opts = poptorch.Options()
        opts.replicationFactor(args.replicas)
    opts.enableExecutableCaching("./cache")
    opts.Training.gradientAccumulation(args.gradient_accumulation)
    opts.Training.accumulationAndReplicationReductionType(poptorch.ReductionType.Sum)
    opts.deviceIterations(args.device_iterations)
    if args.precision == "16.16":
        opts.Precision.setPartialsType(torch.half)
    return opts


def get_transform(precision, eight_bit_io):
    transforms = [torchvision.transforms.RandomCrop(8, padding=1), torchvision.transforms.RandomHorizontalFlip()]
    transforms.append(torchvision.transforms.PILToTensor() if eight_bit_io else torchvision.transforms.ToTensor())
    if not eight_bit_io and precision.startswith("16"):
        transforms.append(torchvision.transforms.ConvertImageDtype(torch.half))
    return torchvision.transforms.Compose(transforms)


def get_dataset(args):
    transform = get_transform(args.precision, args.eight_bit_io)
    return torchvision.datasets.FakeData(args.samples, (3, 8, 8), 10, transform)
