"""The admin port: workers, metrics, explanations, readiness, the page at `/ui`.

Owns: all paths of the admin port and what they show.
Gives: `app.AdminApi`, which answers the admin port's requests, to `assembly`.
Never imports: cli, assembly.
Start reading at: `app.py`.
"""
