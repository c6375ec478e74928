"""Requests' bodies as data: what routing needs of them, read once, and edits in place.

Owns: the inference paths and how each is read, the scan of a JSON body, KServe v2 by HTTP and gRPC,
the bodies of a request in two legs.
Gives: `paths.PATHS`, `scan.scan`, `kserve_http`, `kserve_grpc`, `legs`.
Never imports: router.core, router.fleet, router.request.
Start reading at: `paths.py`, then `scan.py`.
"""
