"""GPT pretraining and fine-tuning on megatron.core alone, once stock and once patched.

``options`` and ``config`` are what the user gives and the checked whole of a run, ``trainer`` advances one model a step
at a time, ``variant`` records it as baseline or flux, ``loop`` runs one or both, and ``worker`` is what ranks start.
"""
