"""A cache of the ordinary path: calls that have been made before, made again without deciding anew."""
