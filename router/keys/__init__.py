"""API keys of clients: they identify a client, and limit its use of the router.

Owns: the key file, look-up by keyed digests, rate limits, counts by tenant.
Gives: `key_ring.KeyRing`, `key_file.KeyTerms`, `quota.Grant`, `tenant_counts.TenantCounts`.
Never imports: aiohttp, the core, policies.
Start reading at: `key_ring.py`.
"""
