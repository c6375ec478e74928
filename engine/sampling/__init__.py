"""From logits to text: what a request asks for, the choice of a token, where a text ends.

Owns: sampling parameters and their limits, the sampler, stop strings.
Gives: `engine.sampling.params.SamplingParams`, `engine.sampling.stops.StopText` and, where torch
is installed, `engine.sampling.torch_sampler.Sampler`. This `__init__` imports nothing.
Never imports: the router, the simulator, policies, the server.
Start reading at: `params.py`.
"""
