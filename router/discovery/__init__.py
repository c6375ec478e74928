"""Sources that list workers besides the configuration: files, DNS, Redis, Kubernetes.

Owns: the specs of sources, and each kind of source.
Gives: `opening.open_source`, whose sources `router.fleet.sources` follows.
Never imports: the core's formulas, the client port's requests, policies.contract, policies.load,
torch.
Start reading at: `source.py` (`parse_source`), then `opening.py`.
"""
