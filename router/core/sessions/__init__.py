"""Estimates that several policies share, learned from the core's facts.

Owns: the calibration of each worker's speed, the pool's arrival rate and live sessions,
where sessions are at home, and which heads of prompts so many share that copies are wanted.
Gives: `speed.SpeedEstimator`, `arrivals.ArrivalEstimator`, `sessions.Sessions`;
the core publishes them as columns.
Never imports: router.core.placement.
Start reading at: `speed.py`.
"""
