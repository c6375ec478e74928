"""From logits to text: what a request asks for, the choice of a token, where a text ends.

Owns: sampling parameters and their limits, stop strings.
Gives: `engine.sampling.params.SamplingParams`, `engine.sampling.stops.StopText`; the sampler on
tensors is `engine.runner.torch_sampler.Sampler`.
Never imports: the router, the simulator, policies, the server.
Start reading at: `params.py`.
"""
