"""``omnilearn demo``: the same training twice on an emulated cluster, with plain DDP and with OmniLearn."""
