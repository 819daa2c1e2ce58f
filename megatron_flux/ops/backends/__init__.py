"""The ways to run an operator; base.py says what each has to offer, registry.py which one runs a call."""
