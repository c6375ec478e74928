"""Cost functions that choose a worker: the plug-ins that router and simulator share.

Owns: the contract (`contract`, `facts`), the built-in policies, `pick`, loading by name.
Gives: `load(spec)` in `policies.load`; `pick` and `ranked` in `policies.pick`; this table.
Never imports: router, engine, simulator, kvkernels; only numpy and the standard library.
Start reading at: `contract.py`, then `least_requests.py`, then `hybrid.py`.

A policy is one file around one pure function. To add a built-in policy, write the file, add its
line below, an entry in `docs/catalogue.md` and a test. A policy of your own needs no line: use
`package.module:attr`, or an entry point of the group `warmroute.policies`, in place of a name.
`docs/policies.md` has the formulas.
"""

# Name -> "module:attr". Text, so that this face imports nothing.
POLICIES = {
    "round_robin": "policies.round_robin:RoundRobin",
    "random": "policies.uniform:Uniform",
    "least_requests": "policies.least_requests:LeastRequests",
    "power_of_two": "policies.power_of_two:PowerOfTwo",
    "kv_prefix": "policies.kv_prefix:KvPrefix",
    "kv_load": "policies.kv_load:KvLoad",
    "warmset": "policies.warmset:Warmset",
    "hybrid": "policies.hybrid:Hybrid",
    "llm_d": "policies.published.llm_d:LlmD",
    "trt_llm": "policies.published.trt_llm:TrtLlm",
    "trt_llm_conversation": "policies.published.trt_llm_conversation:TrtLlmConversation",
    "cache_aware": "policies.published.cache_aware:CacheAware",
    "least_load": "policies.published.least_load:LeastLoad",
    "prefix_hash": "policies.published.prefix_hash:PrefixHash",
    "chwbl": "policies.published.chwbl:Chwbl",
    "aibrix": "policies.published.aibrix:Aibrix",
    "ray_prefix": "policies.published.ray_prefix:RayPrefix",
    "dynamo_two_tier": "policies.published.dynamo_two_tier:DynamoTwoTier",
    "llm_d_sticky": "policies.published.llm_d_sticky:LlmDSticky",
    "least_tokens": "policies.published.least_tokens:LeastTokens",
    "smg_expected_wait": "policies.published.smg_expected_wait:SmgExpectedWait",
    "session_sticky": "policies.published.session_sticky:SessionSticky",
    "dynamo_load_guard": "policies.published.dynamo_load_guard:DynamoLoadGuard",
    "dynamo_subagent_group": "policies.published.dynamo_subagent_group:DynamoSubagentGroup",
    "thunder_agent": "policies.published.thunder_agent:ThunderAgent",
    "lmetric": "policies.published.lmetric:LMetric",
    "lpwl": "policies.published.lpwl:Lpwl",
    "dynamo": "policies.published.dynamo:Dynamo",
    "dynamo_agentic": "policies.published.dynamo_agentic:DynamoAgentic",
    "jsew": "policies.published.jsew:Jsew",
    "ramjet": "policies.published.ramjet:Ramjet",
    "mooncake": "policies.published.mooncake:Mooncake",
    "preble": "policies.published.preble:Preble",
    "dualmap": "policies.published.dualmap:DualMap",
    "prequal": "policies.published.prequal:Prequal",
    "lbgr": "policies.published.lbgr:Lbgr",
}

# The class of each wrapper of a policy, by the name that users write:
# `hybrid|bounded_load?epsilon=0.25`.
WRAPPERS = {
    "thresholds": "policies.wrappers.thresholds:Thresholds",
    "bounded_load": "policies.wrappers.bounded_load:BoundedLoad",
    "late_binding": "policies.wrappers.late_binding:LateBinding",
    "progressive": "policies.wrappers.progressive:Progressive",
}
