"""The admin port: workers, metrics, explanations, readiness, the page at `/ui`.

Owns: all paths of the admin port and their answers.
Gives: `app.AdminApi`, which answers the admin port's requests; `assembly` creates it.
Never imports: cli, assembly.
Start reading at: `app.py`.
"""
