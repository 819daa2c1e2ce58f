"""GPT pretraining on megatron.core alone, once stock and once patched.

In the order in which to read it:

* ``options``, ``presets``, ``config``: what the user gives, the models by name, and the checked whole of a run
* ``data``, ``model``, ``fp8``: the text, and the GPT with its CUDA graphs and FP8 recipes
* ``trainer``, ``memory``: model, optimizer and random state, advanced a step at a time, and the memory they take
* ``variant``, ``record``: baseline or flux: a trainer, stock or patched, and the record of its steps
* ``loop``, ``description``: ``train`` and ``compare``, and what ``config.json`` says
* ``checkpoint``, ``unpickling``: saving and resuming; ``checkpoint_folder``: its files, and checks of them
* ``worker``, ``shims``: what every rank runs and its process groups, and megatron-core without CUDA
"""
