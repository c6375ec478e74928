"""Everything the router asks of its workers besides inference: who they are, how they fare.

Owns: recognition of a worker given by URL (by the adapters in `engines/`), load scrapes, health
probes, joining and leaving; one worker for each data-parallel rank.
Gives: `manager.FleetManager`, which keeps the decision core told.
Never imports: the HTTP front, policies' formulas, torch.
Start reading at: `manager.py`.
"""
