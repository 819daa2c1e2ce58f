"""Pre-flight: check every node, compare the nodes, and measure their links before a job begins.

Job scripts start two modules: ``node`` on each node by itself, then ``ranks`` on all of them, which meet over the
transport of the training. ``rules`` decides from what they report; read it first.
"""
