"""Capacity planning: what a pass costs, how a replica behaves under load, how many are needed.

costs.py      seconds of a pass: from hardware limits, or from the doctor's measured curves
simulate.py   one replica as discrete events: arrivals, continuous batching, K by load
fleet.py      the smallest fleet that keeps a latency goal, with and without speculation
"""
