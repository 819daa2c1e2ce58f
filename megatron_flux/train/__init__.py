"""GPT pretraining on megatron.core alone, once stock and once patched.

In the order in which to read it:

* ``options``, ``presets``, ``config``: what the user gives, the models by name, and the checked whole of a run
* ``data``, ``model``, ``cuda_graphs``, ``flops``: the text, the GPT, and what a step of it computes
* ``trainer``: model, optimizer and random state, advanced a step at a time; ``memory``: what of the device is its own
* ``arm``, ``measurements``: a trainer, stock or patched, and the record of every step
* ``loop``: ``train`` and ``compare``; ``stop``, ``progress``, ``run_folder``: signals, what is shown, what is left
* ``checkpoint``: saving and resuming; ``checkpoint_folder``: the files; ``checkpoint_access``: who may load and save
* ``worker``, ``distributed``, ``shims``: what every rank runs, its process groups, and megatron-core without CUDA
"""
