"""The HTTP front: clients on one port, operators on another.

Owns: reading requests, turning prompts into chains, relaying answers, the admin surface.
Gives: `client_app.client_app`, `admin_app.admin_app`.
Never imports: policies' formulas, torch.
Start reading at: `inference.py`.
"""
