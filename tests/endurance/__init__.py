"""Many training steps of a small network, its input cut anew every few steps, next to the same steps on one device.

``python -m endurance`` takes thousands of steps and writes down whether anything grows; ``test_endurance.py`` takes a
few hundred, in which nothing may.
"""
