"""The page to look at: the fleet, its trunks, decisions and last minutes, in a browser.

Owns: the page (HTML, CSS, plain JavaScript), the state it shows, ten minutes of samples.
Gives: `handlers.UiPages`.
Never imports: policies' formulas, torch.
Start reading at: `state.py`, then `app.js`.
"""
