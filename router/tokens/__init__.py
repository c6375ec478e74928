"""Makes the token ids of prompts, in the same way as the engines.

Owns: the tokenizer that the configuration names; the check that workers make the same ids of a
prompt; media in prompts, and the hashes of prompts with media.
Gives: `TokenCheck`, `TokenProbe`, `Encoders`, `encoders_of`; `media_chains`.
Never imports: `router.request`, which uses it for each prompt.
Start reading at: `check.py`.
"""
