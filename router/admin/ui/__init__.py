"""The page at `/ui`, which shows the fleet, its trunks, decisions and last minutes in a browser.

Owns: the page's files, its state once a second, ten minutes of samples.
Gives: `page.UiPages` and `state.UiState`, for the routes of `app.py`.
Never imports: cli, assembly.
Start reading at: `page.py`, then `state.py`.
"""
