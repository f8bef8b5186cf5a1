"""Time of attention over that of the convolutions that it was made of: the theory chapter's table, on one CPU thread.

    python stage_speed.py [ROUNDS]

Stages 3 and 4 of each net and the net with both converted, in training (forward and backward) and in inference, in
float32 and under bfloat16 autocast. Both sides run in turn; shortest of ROUNDS process times each (7).
"""
import sys
import time

import timm
import torch

import timm_selfconv  # noqa: F401, registers the nets

NETS = {'resnet_tiny_cifar': (128, 16), 'resnet18_cifar': (32, 64)}  # images, channels of the first stage
STAGES = ['layer3', 'layer4']


def seconds(module, x, train, autocast):
    start = time.process_time()
    with torch.autocast('cpu', torch.bfloat16, enabled=autocast), torch.inference_mode(not train):
        out = module(x)
    if train:
        out.float().square().mean().backward()
    return time.process_time() - start


def main(rounds='7'):
    torch.set_num_threads(1)
    print(f'{"":24} train: float32, bfloat16; run: float32, bfloat16')
    for name, (images, channels) in NETS.items():
        nets = [timm.create_model(name, **kwargs) for kwargs in ({}, dict(attention_stages=STAGES))]
        shapes = {'layer3': (2 * channels, 16), 'layer4': (4 * channels, 8), '': (3, 32)}
        for stage, (inputs, side) in shapes.items():
            ratios = []
            for train in (True, False):
                sides = [net.train(train).get_submodule(stage) for net in nets]
                for autocast in (False, True):
                    x = torch.randn(images, inputs, side, side, requires_grad=train)
                    times = [[seconds(module, x, train, autocast) for module in sides] for _ in range(int(rounds) + 1)]
                    conv, attention = map(min, zip(*times[1:]))  # the first round warms up
                    ratios.append(f'{attention / conv:.1f}')
            print(f'{name} {stage or "net":6} {", ".join(ratios[:2])}; {", ".join(ratios[2:])}', flush=True)


if __name__ == '__main__':
    main(*sys.argv[1:])
