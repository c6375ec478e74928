"""Everything the router asks of its workers besides inference: who they are, how they fare.

Owns: recognition of a worker given by URL (by the adapters of `router.engines`), load reports,
health probes, joining and leaving; one worker for each data-parallel rank.
Gives: `manager.FleetManager`, which keeps the decision core informed.
Never imports: the HTTP server, policies' formulas, torch.
Start reading at: `manager.py`.
"""
