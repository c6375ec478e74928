"""API keys: who a client is, what its key allows, how much of it is left.

Owns: the key file, look-up by keyed digests, rate limits, counts by tenant.
Gives: `key_ring.KeyRing`, `key_file.KeyTerms`, `quota.Grant`, `tenant_counts.TenantCounts`.
Never imports: aiohttp, the core, policies.
Start reading at: `key_ring.py`.
"""
