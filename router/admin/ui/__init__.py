"""The page at `/ui`: the fleet, its trunks, decisions and last minutes, in a browser.

Owns: the page's files, its state once a second, ten minutes of samples.
Gives: `app.py` its handlers.
Never imports: cli, assembly.
Start reading at: `page.py`, then `state.py`.
"""
