"""Estimates that several policies share, learned from the core's facts.

Owns: the calibration of each worker's speed, the pool's arrival rate, the live sessions and the
workers that cache them, and the shared prefixes (trunks) that deserve several copies.
Gives: `speed.SpeedEstimator`, `arrivals.ArrivalEstimator`, `sessions.Sessions`;
the core publishes them as columns.
Never imports: router.core.placement.
Start reading at: `speed.py`.
"""
