"""A dense model whose chat template writes tools in the styles of three families of models.

`style` in `chat_template_kwargs` selects the style: JSON in one line for each tool (Qwen 2.5,
Hermes), JSON over many lines before a question (Llama 3.1), or field by field (gpt-oss,
functionary).
"""

from __future__ import annotations

from tests.engines.hybrid_models import LLAMA, HybridModel

STYLES = ("hermes", "llama", "fields")
PARSER = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")

TEMPLATE = """\
{%- macro fields(function) %}
    {{- '\\n// ' + (function.description or '') + '\\ntype ' + function.name + ' = (_: {' }}
    {%- for name, one in ((function.parameters or {}).properties or {}).items() %}
        {{- '\\n// ' + (one.description | default('', true) | string) + '\\n' + name }}
        {{- '?' if name not in (function.parameters.required or []) else '' }}
        {{- ': ' + (one.type | default('any') | string) }}
        {%- if one.enum %}{{- ' = ' + one.enum | tojson }}{%- endif %}
        {%- if one.default is defined %}{{- ', // default: ' + one.default | tojson }}{%- endif %}
    {%- endfor %}
    {{- '\\n}) => any;' }}
    {%- if function.strict is defined %}{{- ' // strict: ' + function.strict | string }}{%- endif %}
{%- endmacro %}
{%- set style = style | default('hermes') %}
{%- set first = messages[0] %}
{{- '<|im_start|>system\\n' }}
{%- if first.role == 'system' %}{{- first.content }}
{%- else %}{{- 'You are a helpful assistant.' }}{%- endif %}
{%- if reasoning_effort is defined and reasoning_effort %}
    {{- '\\nReasoning: ' + reasoning_effort }}
{%- endif %}
{%- if enable_thinking is defined and enable_thinking is false %}{{- '\\n/no_think' }}{%- endif %}
{%- if tools and style == 'hermes' %}
    {{- '\\n\\n# Tools\\n\\nYou may call one or more functions to assist with the user query.' }}
    {{- '\\n\\nYou are provided with function signatures within <tools></tools> XML tags:' }}
    {{- '\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
    {{- '\\n</tools>\\n\\nFor each function call, return a json object with function name' }}
    {{- ' and arguments within <tool_call></tool_call> XML tags:\\n<tool_call>\\n' }}
    {{- '{\\"name\\": <function-name>, \\"arguments\\": <args-json-object>}\\n</tool_call>' }}
{%- elif tools and style == 'fields' %}
    {{- '\\n\\nnamespace functions {' }}
    {%- for tool in tools %}{{- fields(tool.function) }}{%- endfor %}
    {{- '\\n}' }}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- for message in messages %}
    {%- if loop.first and message.role == 'system' %}{%- continue %}{%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if tools and style == 'llama' and message.role == 'user' %}
        {{- 'Given the following functions, please respond with a JSON' }}
        {{- ' for a function call.\\n\\n' }}
        {%- for tool in tools %}{{- tool | tojson(indent=4) }}{{- '\\n\\n' }}{%- endfor %}
    {%- endif %}
    {{- message.content or '' }}
    {%- for call in message.tool_calls or [] %}
        {{- '\\n<tool_call>\\n{\\"name\\": \\"' + call.function.name + '\\", \\"arguments\\": ' }}
        {{- call.function.arguments | tojson + '}\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""

TOOLED = HybridModel(
    "llama-tools",
    {**LLAMA, "num_hidden_layers": 1, "max_position_embeddings": 32768},
    asked_size=32,
    blocks=1200,
    limits=(),
    max_tokens=16384,
    more=("--enable-scale-out", *PARSER),
    template=TEMPLATE,
)
