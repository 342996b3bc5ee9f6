"""Lightning's loop objects: views of a run whose counters can be assigned.

The core has functions in their place, and reads none of them. They must not import ``hasten_tools``.
"""
