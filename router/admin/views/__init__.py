"""The admin port's answers about workers, trunks, the policy and decisions, as JSON.

Owns: the rows of `/workers`, `/trunks`, `/policy` and `/explain`.
Gives: `rows.worker_shown`, `explain.ExplainPages`.
Never imports: router.server, router.admin.ui.
Start reading at: `rows.py`.
"""
