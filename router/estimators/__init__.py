"""Estimates that several policies share, learned from the core's facts.

Owns: the calibration of each worker's speed, and the pool's arrival rate and live sessions.
Gives: `speed.SpeedEstimator`, `arrivals.ArrivalEstimator`; the core publishes them as columns.
Never imports: asyncio, sockets, clocks, logging, random; nor any shell of the router.
Start reading at: `speed.py`.
"""
