"""An LLM engine: in-flight batching, a paged KV cache with prefix reuse, vLLM's wire.

Owns: requests, scheduler, block pool, step times, the timed runner, the worker's server, the models
that compute, KV that moves between workers, several workers on one device.
Gives: `engine.scheduler`, `engine.block_pool.BlockPool`, `engine.step_time.StepTime`,
`engine.profiles.profile`, `engine.timed.TimedRunner`, `engine.transfer`, `engine.server.serving`,
and `engine.wire`, which the router reads too. This `__init__` imports nothing, so that taking one
part costs no other.
Never imports: policies, the router, the simulator.
Start reading at: `scheduler/scheduler.py`, then `timed.py`, which drives it.
"""
