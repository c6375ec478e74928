"""Who names workers besides the configuration: files, DNS, a registry in Redis, Kubernetes.

Owns: sources, what of them is believed (a failing one must not empty the pool, a flapping one must
not shake it), the union of all that names workers.
Gives: `discovery.Discovery`, which keeps the fleet in line with that union.
Never imports: the core's formulas, the client port's requests, policies, torch.
Start reading at: `source.py` (`Source`, `parse_source`), then `open_source` and `SourceTrust` in
`discovery.py`.
"""
