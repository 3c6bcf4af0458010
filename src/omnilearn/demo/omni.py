"""The demo's second run: OmniLearn. Started by ``omnilearn run``; the lines marked are the changed ones."""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F

from omnilearn import OmniLearn
from omnilearn.demo import task


def train(args: argparse.Namespace) -> None:
    train_set, test_set = task.digits(args.data)
    model = task.cnn(args.width, args.seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)

    with OmniLearn(global_batch=args.batch, mode=args.mode, seed=args.seed) as omni:  # changed
        model, optimizer = omni.prepare(model, optimizer)  # changed
        loader = omni.loader(train_set, shuffle=True, drop_last=True)  # changed
        tests = omni.loader(test_set, train=False, batch_size=90)  # changed
        progress = task.Progress(args, omni.rank)
        for epoch in range(args.epochs):
            progress.begin_epoch()
            for x, y in loader:
                loss = F.cross_entropy(model(x), y)
                omni.backward(loss)  # changed
                optimizer.step()
                optimizer.zero_grad()
            progress.end_epoch()

            right = seen = 0
            with torch.no_grad():
                for x, y in tests:
                    right += int((model(x).argmax(1) == y).sum())
                    seen += len(y)
            accuracy = omni.mean(right / max(seen, 1), weight=seen)
            if progress.enough(epoch + 1, accuracy, omni.mean(progress.seconds)):
                break


if __name__ == "__main__":
    arguments = task.arguments()
    task.ready(arguments)
    train(arguments)
    task.leave()
