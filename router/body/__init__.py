"""Request bodies as data: reads what routing needs, and edits fields in place.

Owns: the inference paths and how each is read, the scan of a JSON body, the bodies of a request in
two legs.
Gives: `paths.PATHS`, `scan.scan`, `legs`.
Never imports: router.core, router.fleet, router.request.
Start reading at: `paths.py`, then `scan.py`.
"""
