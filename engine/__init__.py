"""An LLM engine: in-flight batching, a paged KV cache with prefix reuse, vLLM's wire.

Owns: requests, scheduler, block pool, step times, the timed runner, the worker on virtual time,
the worker's server.
Gives: `engine.scheduler.scheduler.Scheduler`, `engine.block_pool.BlockPool`,
`engine.step_time.StepTime`, `engine.profiles.profile`, `engine.timed.TimedRunner`,
`engine.virtual.VirtualWorker`, `engine.server.serving`, and `engine.wire`, which the router reads
too. This face imports nothing, so that taking one part costs no other.
Never imports: policies, the router, the simulator.
Start reading at: `scheduler/scheduler.py`, then `timed.py`, which drives it.
"""
