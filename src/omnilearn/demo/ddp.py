"""The demo's first run: plain DistributedDataParallel, equal batches. Started by ``omnilearn run``.

The samples come in the same order as in the OmniLearn run, so that both make the same steps.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

from omnilearn.data import Sampler
from omnilearn.demo import task
from omnilearn.demo.watch import Watch


def train(args: argparse.Namespace) -> None:
    train_set, test_set = task.digits(args.data)
    rank, workers = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(task.cnn(args.width, args.seed))
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)

    order = Sampler(len(train_set), [args.batch // workers] * workers, seed=args.seed, last="drop")
    my_tests = test_set[rank::workers]
    watch = Watch(args, order)
    progress = task.Progress(args, rank)
    for epoch in range(args.epochs):
        watch.epoch(epoch)
        progress.begin_epoch()
        for share in order.shares(rank):
            x, y = train_set[share.indices]
            loss = F.cross_entropy(model(x), y)
            watch.backward(loss)
            loss.backward()
            watch.step(share)
            optimizer.step()
            optimizer.zero_grad()
            order.consumed(share)
        progress.end_epoch()
        order.next_epoch()

        with torch.no_grad():
            x, y = my_tests
            counts = torch.tensor([(model(x).argmax(1) == y).sum().item(), len(y), progress.seconds])
        dist.all_reduce(counts)
        right, seen, seconds = counts.tolist()
        if progress.enough(epoch + 1, right / seen, seconds / workers):
            break
    watch.end()


if __name__ == "__main__":
    arguments = task.arguments()
    task.ready(arguments)
    train(arguments)
    task.leave()
