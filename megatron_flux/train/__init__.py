"""GPT pretraining on megatron.core alone, once stock and once patched.

In the order in which to read it:

* ``options``, ``presets``, ``config``: what the user gives, the models by name, and the checked whole of a run
* ``data``, ``model``: the text, the GPT and its CUDA graphs
* ``trainer``: model, optimizer and random state, advanced a step at a time
* ``arm``, ``measurements``: a trainer, stock or patched, and the record of every step; whose memory it is
* ``loop``, ``run_folder``: ``train`` and ``compare``, what is shown, what is left
* ``checkpoint``: saving and resuming; ``checkpoint_folder``: the files; ``checkpoint_access``: who may load and save
* ``worker``, ``shims``: what every rank runs and its process groups, and megatron-core without CUDA
"""
