"""Entrypoints for torch.hub: ``torch.hub.load(repo, 'sa_quadratic_tiny_cifar', pretrained=True)``.

One per net, with the arguments of timm.create_model: pretrained, num_classes, in_chans, img_size, features_only.
"""
import functools

import timm

import timm_selfconv.models

dependencies = ['torch', 'torchvision', 'timm', 'huggingface_hub', 'safetensors']

globals().update({
    name: functools.update_wrapper(functools.partial(timm.create_model, name), timm.model_entrypoint(name))
    for name in timm_selfconv.models.zoo_names()
})
