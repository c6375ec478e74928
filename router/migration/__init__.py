"""Continues a streamed answer at another worker when its worker is lost.

Owns: which requests allow it, what is kept of a stream (token ids), the request for the rest of an
answer, the seam (the client reads one stream, in the form of the first worker's), and the counts of
all this.
Gives: `stream.Migrations`, the `Movers` of `router.request.moving`.
Never imports: router.core, or another extra.
Start reading at: `stream.py`, then `journal.py` (what is kept; `generate.py` for SGLang's own API),
`plan.py` (what is asked for).

Exactness rests on token ids: text would be tokenized otherwise at the seam. Engines return them if
`return_token_ids` asks for them (vLLM from 0.10.2; SGLang's completions from July 2026), or always
(SGLang's `/generate`).
"""
