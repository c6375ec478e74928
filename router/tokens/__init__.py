"""Token ids of prompts as the engines make them.

Owns: the tokenizer that the configuration names; the check that workers make the same ids of a
prompt; what stands for media in a text.
Gives: `TokenCheck`, `TokenProbe`, `Encoders`, `encoders_of`.
Never imports: `router.request`, which asks it for one prompt after the other.
Start reading at: `check.py`.
"""
