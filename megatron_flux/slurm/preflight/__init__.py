"""Before a job begins: is every node fit for it, do the nodes match, and do their links reach their speed.

Job scripts start two modules: ``node`` on each node by itself, then ``ranks`` on all of them, which meet over the
transport of the training. ``rules`` decides from what they report; read it first.
"""
