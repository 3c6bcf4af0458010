"""The workloads' names, for those who must not load a framework to know them."""

NAMES = ("heavy", "even", "chatty", "digits", "resnet18", "resnet50", "vgg11", "alexnet", "gpt2")
TF_NAMES = ("heavy", "even", "chatty", "digits")
